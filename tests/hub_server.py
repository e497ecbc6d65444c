"""A small Hugging Face Hub on loopback, for real clients to talk to unpatched."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

import yaml

LFS_SUFFIXES = (".safetensors", ".bin", ".parquet", ".h5", ".gguf", ".msgpack", ".onnx", ".png", ".jpg", ".arrow")
DATE = "2025-01-01T00:00:00.000Z"


class Request(NamedTuple):
    """What one request asked for and got."""

    method: str
    path: str
    bytes_sent: int
    authorization: bool


@dataclass(frozen=True)
class Blob:
    """A file's content, kept by its hash."""

    path: Path
    size: int
    oid: str
    sha256: str

    def lfs(self) -> dict[str, Any]:
        """Its git-lfs pointer, in the words of the tree listing."""
        return {"oid": self.sha256, "size": self.size, "pointerSize": 134}


@dataclass
class Pull:
    """A pull request; its commit is at refs/pr/NUMBER."""

    number: int
    title: str
    author: str
    status: str


@dataclass
class Repo:
    """A repo with all its commits; `refs` points from a branch, tag or pull request to one of them."""

    id: str
    kind: str
    gated: bool
    private: bool
    readers: set[str]
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    pulls: list[Pull] = field(default_factory=list)

    def resolve(self, revision: str) -> str | None:
        """The commit of a branch, tag, pull request or commit id (which may be cut short)."""
        if revision in self.refs:
            return self.refs[revision]
        found = [commit for commit in self.commits if len(revision) >= 7 and commit.startswith(revision)]
        return found[0] if len(found) == 1 else None

    def commit(self, revision: str, files: Mapping[str, Blob]) -> str:
        """Point `revision` at a commit with exactly `files`; return its id, which depends on nothing else."""
        content = "".join(f"{path} {blob.oid}\n" for path, blob in sorted(files.items()))
        sha = hashlib.sha1(content.encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.refs[revision] = sha
        return sha


@dataclass(frozen=True)
class Call:
    """A request: the named parts of its path, its query, headers and body."""

    found: dict[str, str]
    query: dict[str, str]
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Answer:
    """An HTTP answer; the body is bytes or a stored file."""

    status: int = 200
    body: bytes | Blob = b""
    headers: dict[str, str] = field(default_factory=dict)

    def part(self, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` of the body."""
        if isinstance(self.body, bytes):
            return self.body[start:stop]
        with self.body.path.open("rb") as stream:
            stream.seek(start)
            return stream.read(stop - start)

    def __len__(self) -> int:
        return len(self.body) if isinstance(self.body, bytes) else self.body.size


def to_json(content: Any, status: int = 200, **headers: str) -> Answer:
    """An answer with `content` as JSON."""
    return Answer(status, json.dumps(content).encode(), {"Content-Type": "application/json", **headers})


def refuse(status: int, message: str, code: str = "") -> Answer:
    """An error, in the headers in which huggingface_hub looks for it."""
    headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
    return to_json({"error": message}, status, **headers)


class RefusedError(Exception):
    """Carries the answer of a request that ends early."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


class HubServer:
    """Repos made from folders, served over HTTP from a thread; `requests` tells what clients did."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.tokens: dict[str, str] = {}
        self.repos: dict[tuple[str, str], Repo] = {}
        self._store = Path(tempfile.mkdtemp(prefix="hub-server-"))
        self._http = _Listener(("127.0.0.1", 0), _Handler)
        self._http.hub = self
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        # like the real Hub, large files come from another host, which must never see a token
        self.files_url = f"http://localhost:{self.port}"
        self.routes = self._routes()

    def start(self) -> None:
        """Serve from a thread until `stop`."""
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self) -> None:
        """Stop serving and delete what was stored."""
        self._http.shutdown()
        self._http.server_close()
        shutil.rmtree(self._store, ignore_errors=True)

    def reset(self) -> None:
        """Forget repos, tokens and requests."""
        self.repos.clear()
        self.tokens.clear()
        self.requests.clear()

    def add_token(self, user: str) -> str:
        """A token of `user`, who reads the private and gated repos that are theirs or granted to them."""
        token = "hf_" + hashlib.sha256(user.encode()).hexdigest()[:34]
        self.tokens[token] = user
        return token

    def add_repo(
        self,
        repo_id: str,
        folder: Path,
        *,
        kind: str = "model",
        gated: bool = False,
        private: bool = False,
        granted: Iterable[str] = (),
        revision: str = "main",
    ) -> str:
        """Commit the files of `folder` to a branch of a new or existing repo; return the commit."""
        fresh = Repo(repo_id, kind, gated, private, {repo_id.split("/")[0], *granted})
        repo = self.repos.setdefault((kind, repo_id), fresh)
        return repo.commit(revision, self._read(folder))

    def add_pull_request(
        self,
        repo_id: str,
        folder: Path,
        *,
        kind: str = "model",
        title: str = "Adding `safetensors` variant of this model",
        author: str = "SFconvertbot",
        status: str = "open",
    ) -> int:
        """Open a pull request that lays the files of `folder` over main; return its number."""
        repo = self.repos[kind, repo_id]
        number = len(repo.pulls) + 1
        repo.pulls.append(Pull(number, title, author, status))
        repo.commit(f"refs/pr/{number}", repo.commits[repo.refs["main"]] | self._read(folder))
        return number

    def sent(self, pattern: str = "") -> int:
        """Body bytes sent for paths that match the regular expression."""
        return sum(request.bytes_sent for request in self.requests if re.search(pattern, request.path))

    def file_bytes(self) -> int:
        """Body bytes of files (not of API answers) sent."""
        return self.sent(r"/resolve/|^/cdn/")

    def _read(self, folder: Path) -> dict[str, Blob]:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): self._keep(path.read_bytes()) for path in files}

    def _keep(self, content: bytes) -> Blob:
        sha256 = hashlib.sha256(content).hexdigest()
        (self._store / sha256).write_bytes(content)
        oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        return Blob(self._store / sha256, len(content), oid, sha256)

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
            ("GET", f"{api}/refs", self._refs),
            ("GET", f"{api}/discussions", self._discussions),
            ("GET HEAD", f"/(?:(?P<kind>dataset)s/)?{name}/resolve/{revision}/(?P<path>.+)", self._file),
            ("GET", api, self._info),
        ]

    def _user(self, call: Call) -> str | None:
        """The user of the request's token. Refuses a token that was never handed out."""
        kind, _, token = call.headers.get("Authorization", "").partition(" ")
        if not token:
            return None
        if kind != "Bearer" or token not in self.tokens:
            raise RefusedError(refuse(401, "Invalid credentials in Authorization header"))
        return self.tokens[token]

    def _open(self, call: Call, *, files: bool = False) -> tuple[Repo, str]:
        """The repo and commit that a request names, as far as its user may read them (`files`: the contents too)."""
        user = self._user(call)
        repo = self.repos.get((call.found.get("kind") or "model", call.found["id"]))
        if repo is None or (repo.private and user not in repo.readers):
            status, message = (401, "Invalid username or password.") if user is None else (404, "Repository not found")
            raise RefusedError(refuse(status, message, "RepoNotFound"))
        if files and repo.gated and user not in repo.readers:
            message = f"Access to {repo.kind} {repo.id} is restricted."
            raise RefusedError(refuse(401 if user is None else 403, message, "GatedRepo"))
        commit = repo.resolve(call.found.get("revision") or "main")
        if commit is None:
            raise RefusedError(refuse(404, f"Invalid rev id: {call.found['revision']}", "RevisionNotFound"))
        return repo, commit

    def _whoami(self, call: Call) -> Answer:
        user = self._user(call)
        if user is None:
            return refuse(401, "Invalid username or password.")
        token = {"displayName": "test", "role": "write"}
        content = {"type": "user", "name": user, "orgs": [], "auth": {"type": "access_token", "accessToken": token}}
        return to_json(content)

    def _info(self, call: Call) -> Answer:
        repo, commit = self._open(call)
        files = repo.commits[commit]
        siblings: list[dict[str, Any]] = [{"rfilename": path} for path in files]
        if "blobs" in call.query:
            for sibling, (path, blob) in zip(siblings, files.items(), strict=True):
                sibling |= {"size": blob.size, "blobId": blob.oid}
                if path.endswith(LFS_SUFFIXES):
                    sibling["lfs"] = {"sha256": blob.sha256, "size": blob.size, "pointerSize": 134}
        content = {
            "_id": "0" * 24,
            "id": repo.id,
            "author": repo.id.split("/")[0],
            "sha": commit,
            "lastModified": DATE,
            "createdAt": DATE,
            "private": repo.private,
            "gated": "manual" if repo.gated else False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "cardData": _card_data(files),
            "siblings": siblings,
        }
        return to_json(content | ({"modelId": repo.id} if repo.kind == "model" else {}))

    def _tree(self, call: Call) -> Answer:
        repo, commit = self._open(call)
        inside = call.found["folder"].rstrip("/") + "/" if call.found["folder"] else ""
        below = {path: blob for path, blob in repo.commits[commit].items() if path.startswith(inside)}
        if inside and not below:
            return refuse(404, f"{call.found['folder']} does not exist", "EntryNotFound")
        folders = {str(parent) for path in below for parent in Path(path).parents if str(parent) != "."}
        entries = [_entry(path, blob) for path, blob in below.items()] + [
            {"type": "directory", "oid": hashlib.sha1(folder.encode()).hexdigest(), "size": 0, "path": folder}
            for folder in sorted(folders)
            if folder.startswith(inside)
        ]
        if call.query.get("recursive", "").lower() not in ("true", "1"):
            entries = [entry for entry in entries if "/" not in entry["path"][len(inside) :]]
        return to_json(entries)

    def _paths(self, call: Call) -> Answer:
        repo, commit = self._open(call)
        if call.headers.get("Content-Type", "").startswith("application/json"):
            paths = json.loads(call.body)["paths"]
        else:
            paths = parse_qs(call.body.decode())["paths"]
        files = repo.commits[commit]
        entries = [_entry(path, files[path]) for path in paths if path in files]
        for path in paths:
            if any(file.startswith(f"{path}/") for file in files):
                entries.append({"type": "directory", "oid": "0" * 40, "size": 0, "path": path})
        return to_json(entries)

    def _refs(self, call: Call) -> Answer:
        repo, _commit = self._open(call)
        heads = {name: sha for name, sha in repo.refs.items() if not name.startswith("refs/")}
        pulls = {name: sha for name, sha in repo.refs.items() if name.startswith("refs/pr/")}
        content: dict[str, list[dict[str, str]]] = {
            "branches": [
                {"name": name, "ref": f"refs/heads/{name}", "targetCommit": sha} for name, sha in heads.items()
            ],
            "converts": [],
            "tags": [],
        }
        if call.query.get("include_prs"):
            content["pullRequests"] = [{"name": name, "ref": name, "targetCommit": sha} for name, sha in pulls.items()]
        return to_json(content)

    def _discussions(self, call: Call) -> Answer:
        repo, _commit = self._open(call)
        wanted = [
            pull
            for pull in repo.pulls
            if call.query.get("type", "all") in ("all", "pull_request")
            and (
                call.query.get("status", "all") == "all" or (call.query["status"] == "open") == (pull.status == "open")
            )
            and call.query.get("author", pull.author) == pull.author
        ]
        listed = [
            {
                "num": pull.number,
                "title": pull.title,
                "author": {"name": pull.author},
                "createdAt": DATE,
                "status": pull.status,
                "repo": {"name": repo.id, "type": repo.kind},
                "isPullRequest": True,
            }
            for pull in wanted
        ]
        return to_json({"discussions": listed, "count": len(listed), "start": 0})

    def _file(self, call: Call) -> Answer:
        repo, commit = self._open(call, files=True)
        blob = repo.commits[commit].get(call.found["path"])
        pinned = {"X-Repo-Commit": commit}
        if blob is None:
            answer = refuse(404, "Entry not found", "EntryNotFound")
            answer.headers |= pinned
            return answer
        if not call.found["path"].endswith(LFS_SUFFIXES):
            return Answer(200, blob, pinned | {"ETag": f'"{blob.oid}"'})
        linked = {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(blob.size)}
        return Answer(302, b"", pinned | linked | {"Location": f"{self.files_url}/cdn/{quote(blob.sha256)}"})

    def _cdn(self, call: Call) -> Answer:
        path = self._store / call.found["sha256"]
        if not path.exists():
            return refuse(404, "no such file")
        return Answer(
            200, Blob(path, path.stat().st_size, "", call.found["sha256"]), {"ETag": f'"{call.found["sha256"]}"'}
        )


def _entry(path: str, blob: Blob) -> dict[str, Any]:
    entry = {"type": "file", "oid": blob.oid, "size": blob.size, "path": path}
    return entry | ({"lfs": blob.lfs()} if path.endswith(LFS_SUFFIXES) else {})


def _card_data(files: Mapping[str, Blob]) -> Any:
    """The metadata between the dashes of README.md."""
    text = files["README.md"].path.read_text(encoding="utf-8") if "README.md" in files else ""
    match = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    return yaml.safe_load(match[1]) if match else None


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    hub: HubServer


class _Handler(BaseHTTPRequestHandler):
    """Reads a request, sends the hub's answer (or the range of it that was asked for), and notes it."""

    server: _Listener
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def handle_one_request(self) -> None:
        # a client that has gone away is none of the server's business
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {key.title(): value for key, value in self.headers.items()}
        answer = self.server.hub.answer(self.command, self.path, headers, body)
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
        self._send(answer, start, stop)

    def _send(self, answer: Answer, start: int, stop: int) -> None:
        content = b"" if self.command == "HEAD" else answer.part(start, stop)
        # noted before it is sent, so that a client that has its answer finds it in the list
        request = Request(self.command, urlsplit(self.path).path, len(content), "Authorization" in self.headers)
        self.server.hub.requests.append(request)
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        self.wfile.write(content)
