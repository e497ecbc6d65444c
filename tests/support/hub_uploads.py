"""Everything that writes to the Hub on loopback: new models, uploads, commits, pull requests, and checks of cards."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml
from hub_store import Answer, Blob, Call, Commit, Pull, RefusedError, Repo, is_lfs, refuse, to_json
from jsonschema import Draft202012Validator

LICENSES = ["apache-2.0", "mit", "llama3.1", "other", "unknown"]
"""Some of those that the Hub knows: the ones that cards here have."""
Schema = dict[str, Any]


def needs(*keys: str, **properties: Schema) -> Schema:
    """A mapping with these keys, some of which are more."""
    return {"type": "object", "required": list(keys), "properties": properties}


def listed(**item: object) -> Schema:
    """A text or a list of texts."""
    text = {"type": "string", **item}
    return {"anyOf": [text, {"type": "array", "items": text}]}


REPO_IDS = listed(pattern=r"^(?!.*(?:--|\.\.))[\w][\w.-]{0,95}(?:/[\w][\w.-]{0,95})?\Z")
METRICS = {"type": "array", "items": needs("type", "value")}
RESULT = needs("task", "dataset", "metrics", task=needs("type"), dataset=needs("type", "name"), metrics=METRICS)
MODEL = needs("name", name={"type": "string"}, results={"type": ["array", "null"], "items": RESULT})
TEXTS = ("license_name", "license_link", "library_name", "pipeline_tag", "thumbnail")
CARD = needs(
    **{key: {"type": "string"} for key in TEXTS},
    license=listed(enum=LICENSES), language=listed(), metrics=listed(), tags=listed(maxLength=64),
    base_model=REPO_IDS, datasets=REPO_IDS, base_model_relation={"enum": ["adapter", "merge", "quantized", "finetune"]},
    **{"model-index": {"type": ["array", "null"], "items": MODEL}},
)  # fmt: skip


def check_card(content: str) -> list[str]:
    match = re.match(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", content, re.DOTALL)
    try:
        data = yaml.safe_load(match[1] if match else "{}") or {}
    except yaml.YAMLError as error:
        return [f"Unable to parse YAML: {type(error).__name__}"]
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(CARD).iter_errors(data)]


if TYPE_CHECKING:
    from hub_server import HubServer


class Ticket(NamedTuple):
    """Leave to upload one large file; whoever has its number may, without a token."""

    repo: Repo
    sha256: str
    size: int


class Uploads:
    """The writing half of a HubServer."""

    def __init__(self, hub: HubServer) -> None:
        self.hub = hub
        self.spoil: Callable[[str, bytes], bytes] | None = None
        """Changes a regular file's content as it is committed: a Hub that stores something else."""
        self._tickets: dict[str, Ticket] = {}

    def routes(self, name: str, api: str, revision: str) -> list[tuple[str, str, Callable[[Call], Answer]]]:
        """Method, path and function of everything that writes, in the order in which they are tried."""
        lfs = rf"/{name}\.git/info/lfs"
        return [
            ("POST", "/api/repos/create", self._create),
            ("POST", "/api/validate-yaml", self._validate),
            ("POST", f"{api}/preupload/{revision}", self._preupload),
            ("POST", f"{lfs}/objects/batch", self._batch),
            ("POST", f"{lfs}/verify", self._verify),
            ("PUT", "/upload/(?P<ticket>[0-9a-f]+)", self._put),
            ("POST", f"{api}/commit/{revision}", self._commit),
        ]

    def _writer(self, call: Call) -> str:
        """The user of a token that may write. Refuses any other."""
        user, role = self.hub.user(call), self.hub.role(call)
        if user is None:
            raise RefusedError(refuse(401, "Invalid username or password."))
        if role == "read":
            raise RefusedError(refuse(403, "Forbidden: this token has no write permission"))
        return user

    def _open(self, call: Call, *, pull: bool) -> tuple[Repo, str, str]:
        """Repo, commit and user of a request that writes, which only a pull request may do to others' repos."""
        user = self._writer(call)
        repo, commit = self.hub.open(call)
        if not pull and repo.id.split("/")[0] not in self.hub.names(user):
            raise RefusedError(refuse(403, "Forbidden: pass `create_pr=1` as a query parameter to open a pull request"))
        return repo, commit, user

    def _create(self, call: Call) -> Answer:
        user = self._writer(call)
        asked = json.loads(call.body)
        owner = asked.get("organization") or user
        if owner not in self.hub.names(user):
            return refuse(403, f"You don't have the rights to create a model under the namespace {owner!r}")
        repo_id = f"{owner}/{asked['name']}"
        repo = Repo(repo_id, "model", {owner}, private=asked.get("visibility") == "private")
        url = f"{self.hub.url}/{repo.id}"
        if ("model", repo_id) in self.hub.repos:
            message = "You already created this model repo"
            return to_json({"error": message, "url": url}, 409, **{"X-Error-Message": message})
        suffixes = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
        repo.commit("main", {".gitattributes": self.hub.keep(suffixes)})
        self.hub.repos["model", repo_id] = repo
        return to_json({"url": url, "name": repo_id, "id": "0" * 24})

    def _validate(self, call: Call) -> Answer:
        errors = [{"message": text} for text in check_card(json.loads(call.body)["content"])]
        return to_json({"errors": errors, "warnings": []}, 400 if errors else 200)

    def _preupload(self, call: Call) -> Answer:
        repo, commit, _user = self._open(call, pull="create_pr" in call.query)
        asked, there = json.loads(call.body), repo.commits[commit]
        ignored = asked.get("gitIgnore")
        if ignored is None and ".gitignore" in there:
            ignored = there[".gitignore"].path.read_text()
        patterns = [line for line in (ignored or "").splitlines() if line and not line.startswith("#")]
        answered = []
        for file in asked["files"]:
            path, large = file["path"], is_lfs(file["path"], file["size"])
            told: dict[str, Any] = {"path": path, "uploadMode": "lfs" if large else "regular"}
            told["shouldIgnore"] = any(fnmatch(path, pattern) for pattern in patterns)
            if blob := there.get(path):
                told["oid"] = blob.sha256 if is_lfs(path, blob.size) else blob.oid
            answered.append(told)
        return to_json({"files": answered, "commitOid": commit})

    def _batch(self, call: Call) -> Answer:
        asked = json.loads(call.body)
        # a pull request names no branch
        repo, _commit, _user = self._open(call, pull="ref" not in asked)
        objects, there = [], self._known(repo)
        for wanted in asked["objects"]:
            entry: dict[str, Any] = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in there:
                entry["actions"] = self._actions(repo, wanted["oid"], wanted["size"])
            objects.append(entry)
        return to_json({"transfer": "basic", "objects": objects})

    def _actions(self, repo: Repo, sha256: str, size: int) -> dict[str, Any]:
        """The addresses that a large file goes to."""
        number = secrets.token_hex(16)
        self._tickets[number] = Ticket(repo, sha256, size)
        verify = f"{self.hub.url}/{repo.id}.git/info/lfs/verify"
        return {"upload": {"href": f"{self.hub.files_url}/upload/{number}"}, "verify": {"href": verify}}

    def _put(self, call: Call) -> Answer:
        """Keep a large file if it is the one that was announced, else refuse it."""
        ticket = self._tickets.get(call.found["ticket"])
        if ticket is None:
            return refuse(403, "this upload was never agreed to")
        found = hashlib.sha256(call.body).hexdigest()
        if len(call.body) != ticket.size or found != ticket.sha256:
            return refuse(400, "the content is not what was announced")
        self.hub.keep(call.body)
        ticket.repo.objects.add(ticket.sha256)
        return Answer(200, headers={"ETag": f'"{found}"'})

    def _verify(self, call: Call) -> Answer:
        repo, _commit, _user = self._open(call, pull=True)
        there = json.loads(call.body)["oid"] in repo.objects
        return to_json({}) if there else refuse(404, "this object was not uploaded")

    def _commit(self, call: Call) -> Answer:
        pull = "create_pr" in call.query
        repo, head, user = self._open(call, pull=pull)
        header, *steps = [json.loads(line) for line in call.body.splitlines() if line.strip()]
        told = header["value"]
        if not told.get("summary"):
            return refuse(400, "a commit needs a message")
        with self.hub.lock:
            head = repo.resolve(call.found["revision"]) or head
            if pull and told.get("parentCommit") in repo.commits:
                head = told["parentCommit"]  # a pull request starts there, whatever main is by now
            elif told.get("parentCommit", head) != head:
                return refuse(412, "A commit has happened since. Please refresh and try again.")
            files = self._apply(repo, repo.commits[head], steps)
            revision = call.found["revision"]
            if pull:
                repo.pulls.append(Pull(len(repo.pulls) + 1, told["summary"], user, "open"))
                revision = f"refs/pr/{len(repo.pulls)}"
            # the id depends on parent and place in history too
            listed = "".join(f"{path} {blob.oid}\n" for path, blob in sorted(files.items()))
            sha = hashlib.sha1(f"{head} {revision} {len(repo.log)}\n{listed}".encode()).hexdigest()
            repo.commits[sha], repo.refs[revision] = files, sha
            repo.log.append(Commit(sha, revision, told["summary"]))
        page = f"{self.hub.url}/{repo.id}"
        answer = {"success": True, "commitOid": sha, "commitUrl": f"{page}/commit/{sha}", "hookOutput": ""}
        return to_json(answer | ({"pullRequestUrl": f"{page}/discussions/{len(repo.pulls)}"} if pull else {}))

    def _apply(self, repo: Repo, before: Mapping[str, Blob], steps: list[dict[str, Any]]) -> dict[str, Blob]:
        """The files after a commit's steps."""
        files = dict(before)
        for step in steps:
            value, path = step["value"], step["value"]["path"]
            if step["key"] == "file":
                content = base64.b64decode(value["content"])
                if path == "README.md" and check_card(content.decode()):
                    raise RefusedError(refuse(400, "invalid metadata in README.md"))
                files[path] = self.hub.keep(self.spoil(path, content) if self.spoil else content)
            elif step["key"] == "lfsFile":
                files[path] = self._object(repo, value["oid"])
            elif step["key"] == "deletedFile":
                if path not in files:
                    raise RefusedError(refuse(404, "A file with this name doesn't exist", "EntryNotFound"))
                del files[path]
            else:
                raise RefusedError(refuse(400, f"nothing is known of {step['key']}"))
        return files

    def _known(self, repo: Repo) -> set[str]:
        """Large files that the repo has, or that were uploaded for it."""
        return repo.objects | {blob.sha256 for files in repo.commits.values() for blob in files.values()}

    def _object(self, repo: Repo, sha256: str) -> Blob:
        """A large file. Refuses one that was never uploaded."""
        if sha256 not in self._known(repo):
            raise RefusedError(refuse(400, "an LFS pointer points to a file that was not uploaded"))
        return self.hub.keep(self.hub.stored(sha256).read_bytes())
