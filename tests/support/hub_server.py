"""A small Hugging Face Hub on loopback, for real clients to talk to unpatched."""

import hashlib
import os
import re
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from hub_faults import Fault, Faults
from hub_store import DATE, Answer, Blob, Call, RefusedError, Repo, Request, git_oid, is_lfs, refuse, to_json
from hub_uploads import Uploads

from featcal_cli.runtime.structured_text import load_documents


class HubServer:
    """Repos made from folders, served over HTTP from a thread; `requests` tells what clients did."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.tokens: dict[str, str] = {}
        self.roles: dict[str, str] = {}
        self.orgs: dict[str, set[str]] = {}
        self.repos: dict[tuple[str, str], Repo] = {}
        self.faults = Faults()
        self.uploads = Uploads(self)
        self.lock = threading.Lock()
        self._store = Path(tempfile.mkdtemp(prefix="hub-server-"))
        self._http = _Listener(("127.0.0.1", 0), _Handler)
        self._http.hub = self
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        # like the real Hub, large files come from another host, which must never see a token
        self.files_url = f"http://localhost:{self.port}"
        self.routes = self._routes()

    def start(self) -> None:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        shutil.rmtree(self._store, ignore_errors=True)

    def reset(self) -> None:
        for kept in (self.repos, self.tokens, self.roles, self.orgs, self.requests, self.faults):
            kept.clear()
        self.uploads = Uploads(self)
        self.routes = self._routes()

    def add_token(self, user: str, role: str = "write") -> str:
        """A token of `user`, who reads the private and gated repos that are theirs or granted to them.

        `role` is write, read, or fineGrained (which may write to the user's own repos).
        """
        secret = user if role == "write" else f"{user} {role}"
        token = "hf_" + hashlib.sha256(secret.encode()).hexdigest()[:34]
        self.tokens[token] = user
        self.roles[token] = role
        return token

    def add_org(self, org: str, *users: str) -> None:
        """Make users members of an organisation: what it has is theirs too."""
        for user in users:
            self.orgs.setdefault(user, set()).add(org)

    def delete_repo(self, repo_id: str, kind: str = "model") -> None:
        del self.repos[kind, repo_id]

    def fail(self, kind: str, fault: str | Fault, *, path: str = "", times: int | None = 1, after: int = 0) -> None:
        """Let requests fail: those of a kind (a name in KINDS, or a method) whose path has a match of `path`; the first
        `after` of them go well, then `times` fail (None: all). For faults see FAULTS."""
        self.faults.plan(kind, fault, path=path, times=times, after=after)

    def add_repo(
        self, repo_id: str, folder: Path, *, kind: str = "model", revision: str = "main", granted: Iterable[str] = (),
        gated: bool = False, private: bool = False,
    ) -> str:  # fmt: skip
        """Commit the files of `folder` to a branch of a new or existing repo; return the commit."""
        fresh = Repo(repo_id, kind, {repo_id.split("/")[0], *granted}, gated, private)
        repo = self.repos.setdefault((kind, repo_id), fresh)
        return repo.commit(revision, self._read(folder))

    def sent(self, pattern: str = "") -> int:
        """Body bytes sent for paths that match the regular expression."""
        return sum(request.bytes_sent for request in self.requests if re.search(pattern, request.path))

    def file_bytes(self) -> int:
        """Body bytes of files (not of API answers) sent."""
        return self.sent(r"/resolve/|^/cdn/")

    def _read(self, folder: Path) -> dict[str, Blob]:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): self.keep(path.read_bytes()) for path in files}

    def stored(self, sha256: str) -> Path:
        return self._store / sha256

    def keep(self, content: bytes) -> Blob:
        sha256 = hashlib.sha256(content).hexdigest()
        (self._store / sha256).write_bytes(content)
        return Blob(self._store / sha256, len(content), git_oid(content), sha256)

    # What follows answers requests.

    def answer(self, method: str, target: str, headers: Mapping[str, str], body: bytes = b"") -> Answer:
        """The answer to a request, before ranges."""
        parts = urlsplit(target)
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        for verb, pattern, route in self.routes:
            if method in verb and (match := re.fullmatch(pattern, parts.path)):
                found = {key: unquote(value or "") for key, value in match.groupdict().items()}
                try:
                    return route(Call(found, query, headers, body))
                except RefusedError as refused:
                    return refused.answer
        return refuse(404, f"nothing is served at {method} {parts.path}")

    def _routes(self) -> list[tuple[str, str, Callable[[Call], Answer]]]:
        """Method, path and function of everything that is served, in the order in which they are tried."""
        name = r"(?P<id>[\w.-]+(?:/[\w.-]+)?)"
        api = rf"/api/(?P<kind>model|dataset)s/{name}"
        revision = "(?P<revision>[^/]+|refs/pr/[0-9]+)"
        return [
            ("GET", "/api/whoami-v2", self._whoami),
            ("GET HEAD", "/cdn/(?P<sha256>[0-9a-f]{64})", self._cdn),
            ("GET", f"{api}/revision/{revision}", self._info),
            ("GET", rf"{api}/tree/{revision}(?:/(?P<folder>.*))?", self._tree),
            ("POST", f"{api}/paths-info/{revision}", self._paths),
            ("GET", f"{api}/discussions", self._discussions),
            ("GET HEAD", f"/(?:(?P<kind>dataset)s/)?{name}/resolve/{revision}/(?P<path>.+)", self._file),
            ("GET", api, self._info),
            *self.uploads.routes(name, api, revision),
        ]

    def user(self, call: Call) -> str | None:
        """The user of the request's token. Refuses a token that was never handed out."""
        kind, _, token = call.headers.get("Authorization", "").partition(" ")
        if not token:
            return None
        if kind != "Bearer" or token not in self.tokens:
            raise RefusedError(refuse(401, "Invalid credentials in Authorization header"))
        return self.tokens[token]

    def role(self, call: Call) -> str:
        """The role of the request's token; one that was handed out without a word may write."""
        return self.roles.get(call.headers.get("Authorization", "").partition(" ")[2], "write")

    def names(self, user: str | None) -> set[str]:
        """The namespaces of a user: their own and those of their organisations."""
        return {user, *self.orgs.get(user, ())} if user else set()

    def open(self, call: Call, *, files: bool = False) -> tuple[Repo, str]:
        """The repo and commit that a request names, as far as its user may read them (`files`: the contents too)."""
        user = self.user(call)
        repo = self.repos.get((call.found.get("kind") or "model", call.found["id"]))
        may_read = repo is not None and not repo.readers.isdisjoint(self.names(user))
        if repo is None or (repo.private and not may_read):
            status, message = (401, "Invalid username or password.") if user is None else (404, "Repository not found")
            raise RefusedError(refuse(status, message, "RepoNotFound"))
        if files and repo.gated and not may_read:
            message = f"Access to {repo.kind} {repo.id} is restricted."
            raise RefusedError(refuse(401 if user is None else 403, message, "GatedRepo"))
        commit = repo.resolve(call.found.get("revision") or "main")
        if commit is None:
            raise RefusedError(refuse(404, f"Invalid rev id: {call.found['revision']}", "RevisionNotFound"))
        return repo, commit

    def _whoami(self, call: Call) -> Answer:
        user = self.user(call)
        if user is None:
            return refuse(401, "Invalid username or password.")
        role = self.role(call)
        entity = {"_id": "0" * 24, "type": "user", "name": user}
        scope = {"entity": entity, "permissions": ["repo.content.read", "repo.write"]}
        rights = {"fineGrained": {"canReadGatedRepos": True, "global": [], "scoped": [scope]}}
        token = {"displayName": "test", "role": role, **(rights if role == "fineGrained" else {})}
        orgs = [{"type": "org", "name": org, "roleInOrg": "write"} for org in sorted(self.orgs.get(user, ()))]
        auth = {"type": "access_token", "accessToken": token}
        return to_json({"type": "user", "name": user, "fullname": user, "orgs": orgs, "auth": auth})

    def _info(self, call: Call) -> Answer:
        repo, commit = self.open(call)
        files = repo.commits[commit]
        siblings: list[dict[str, Any]] = [{"rfilename": path} for path in files]
        if "blobs" in call.query:
            for sibling, (path, blob) in zip(siblings, files.items(), strict=True):
                entry = blob.entry(path)
                sibling |= {"size": blob.size, "blobId": entry["oid"]}
                if "lfs" in entry:
                    sibling["lfs"] = {**entry["lfs"], "sha256": entry["lfs"]["oid"]}
        content = {
            "_id": "0" * 24, "id": repo.id, "author": repo.id.split("/")[0], "sha": commit, "lastModified": DATE,
            "createdAt": DATE, "private": repo.private, "gated": "manual" if repo.gated else False, "disabled": False,
            "downloads": 0, "likes": 0, "tags": [], "cardData": _card_data(files), "siblings": siblings,
        }  # fmt: skip
        return to_json(content | ({"modelId": repo.id} if repo.kind == "model" else {}))

    def _tree(self, call: Call) -> Answer:
        repo, commit = self.open(call)
        inside = call.found["folder"].rstrip("/") + "/" if call.found["folder"] else ""
        below = {path: blob for path, blob in repo.commits[commit].items() if path.startswith(inside)}
        if inside and not below:
            return refuse(404, f"{call.found['folder']} does not exist", "EntryNotFound")
        folders = {str(parent) for path in below for parent in Path(path).parents if str(parent) != "."}
        entries = [blob.entry(path) for path, blob in below.items()] + [
            {"type": "directory", "oid": hashlib.sha1(folder.encode()).hexdigest(), "size": 0, "path": folder}
            for folder in sorted(folders)
            if folder.startswith(inside)
        ]
        if call.query.get("recursive", "").lower() not in ("true", "1"):
            entries = [entry for entry in entries if "/" not in entry["path"][len(inside) :]]
        return to_json(entries)

    def _paths(self, call: Call) -> Answer:
        repo, commit = self.open(call)
        paths, files = parse_qs(call.body.decode())["paths"], repo.commits[commit]
        entries = [files[path].entry(path) for path in paths if path in files]
        for path in paths:
            if any(file.startswith(f"{path}/") for file in files):
                entries.append({"type": "directory", "oid": "0" * 40, "size": 0, "path": path})
        return to_json(entries)

    def _discussions(self, call: Call) -> Answer:
        repo, _commit = self.open(call)
        author, status = call.query.get("author"), call.query.get("status", "all")
        about = {"createdAt": DATE, "repo": {"name": repo.id, "type": repo.kind}, "isPullRequest": True}
        listed = [
            {"num": pull.number, "title": pull.title, "author": {"name": pull.author}, "status": pull.status, **about}
            for pull in repo.pulls
            if call.query.get("type", "all") in ("all", "pull_request") and author in (None, pull.author)
            if status == "all" or (status == "open") == (pull.status == "open")
        ]
        return to_json({"discussions": listed, "count": len(listed), "start": 0})

    def _file(self, call: Call) -> Answer:
        repo, commit = self.open(call, files=True)
        blob = repo.commits[commit].get(call.found["path"])
        pinned = {"X-Repo-Commit": commit}
        if blob is None:
            missing = refuse(404, "Entry not found", "EntryNotFound")
            return Answer(404, missing.body, missing.headers | pinned)
        if not is_lfs(call.found["path"], blob.size):
            return Answer(200, blob, pinned | {"ETag": f'"{blob.oid}"'})
        linked = {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(blob.size)}
        return Answer(302, b"", pinned | linked | {"Location": f"{self.files_url}/cdn/{quote(blob.sha256)}"})

    def _cdn(self, call: Call) -> Answer:
        path = self._store / call.found["sha256"]
        if not path.exists():
            return refuse(404, "no such file")
        return Answer(200, Blob(path, path.stat().st_size, "", path.name), {"ETag": f'"{path.name}"'})


def _card_data(files: Mapping[str, Blob]) -> Any:
    """The metadata between the dashes of README.md."""
    text = files["README.md"].path.read_text(encoding="utf-8") if "README.md" in files else ""
    match = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    try:
        return load_documents(match[1])[0] if match else None
    except (ValueError, IndexError):
        return None  # what cannot be read, and what unfolds without end, a card may still hold


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    hub: HubServer


class _Handler(BaseHTTPRequestHandler):
    """Reads a request, sends the hub's answer (or the range of it that was asked for), and notes it."""

    server: _Listener
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are sent apart, and the second would wait 40 ms for the first

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def handle_one_request(self) -> None:
        # a client that has gone away is none of the server's business, nor is a file once the tests are over
        try:
            super().handle_one_request()
        except (ConnectionError, FileNotFoundError):
            self.close_connection = True

    def _body(self) -> bytes:
        """The request's body, which a client that does not know its length sends in chunks."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _serve(self) -> None:
        body = self._body()
        headers = {key.title(): value for key, value in self.headers.items()}
        fault = self.server.hub.faults.take(self.command, urlsplit(self.path).path) or Fault()
        threading.Event().wait(fault.seconds)  # tests may have replaced time.sleep
        if fault.action:
            fault.action()
        answer = self.server.hub.answer(self.command, self.path, headers, body) if fault.carried_out else Answer()
        if fault.status:
            answer = refuse(fault.status, fault.message)
            answer.headers |= {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
        if fault.body is not None:
            answer = Answer(fault.status or 200, fault.body, {"Content-Type": "text/html"})
        answer.headers = {name: value for name, value in answer.headers.items() if name not in fault.without}
        answer.headers |= fault.headers
        start, stop = 0, len(answer)
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", headers.get("Range", "")) if answer.status == 200 else None
        if wanted and any(wanted.groups()):
            first, last = wanted.groups()
            start = int(first) if first else max(0, stop - int(last))
            if start >= stop:
                answer, start, stop = Answer(416, b"", {"Content-Range": f"bytes */{stop}"}), 0, 0
            else:
                answer.status = 206
                stop = min(stop, int(last) + 1) if first and last else stop
                answer.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(answer)}"
        self._send(answer, start, stop, fault)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815

    def _send(self, answer: Answer, start: int, stop: int, fault: Fault) -> None:
        content = b"" if self.command == "HEAD" else answer.part(start, stop)
        whole, content = fault.share == 1, content[: int(len(content) * fault.share)]
        # noted before it is sent, so that a client that has its answer finds it in the list
        known = "Authorization" in self.headers
        path = urlsplit(self.path).path
        self.server.hub.requests.append(Request(self.command, path, len(content), known, answer.status))
        if whole or content:
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(stop - start))
            self.end_headers()
            self.wfile.write(content)
        if not whole:
            self.close_connection = True
        if fault.reset:
            # with nothing left to linger for, closing sends an RST; an orderly end must not come first
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())
