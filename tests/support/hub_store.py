"""Things that the Hub on loopback keeps and hands around: files, commits, pull requests, requests and answers."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

LFS_SUFFIXES = (".safetensors", ".bin", ".parquet", ".h5", ".gguf", ".msgpack", ".onnx", ".png", ".jpg", ".arrow")
MAX_REGULAR_BYTES = 10_000_000
"""A larger file goes to LFS, whatever it is called."""
DATE = "2025-01-01T00:00:00.000Z"


def is_lfs(path: str, size: int) -> bool:
    """Whether a file is kept outside git; an empty one never is."""
    return size > MAX_REGULAR_BYTES or (size > 0 and path.endswith(LFS_SUFFIXES))


class Request(NamedTuple):
    """A request and what it got."""

    method: str
    path: str
    bytes_sent: int
    authorization: bool
    status: int = 200


def git_oid(content: bytes) -> str:
    """Git's id of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(frozen=True)
class Blob:
    """A file's content, kept by its hash."""

    path: Path
    size: int
    oid: str
    sha256: str

    @property
    def pointer(self) -> bytes:
        """The text that git keeps of a large file in place of its content."""
        return f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {self.size}\n".encode()

    def entry(self, path: str) -> dict[str, Any]:
        """This file in a listing. Like git, it names a large file by the hash of its pointer, not of its content."""
        if not is_lfs(path, self.size):
            return {"type": "file", "oid": self.oid, "size": self.size, "path": path}
        lfs = {"oid": self.sha256, "size": self.size, "pointerSize": len(self.pointer)}
        return {"type": "file", "oid": git_oid(self.pointer), "size": self.size, "path": path, "lfs": lfs}


@dataclass
class Pull:
    """A pull request; its commit is at refs/pr/NUMBER."""

    number: int
    title: str
    author: str
    status: str


class Commit(NamedTuple):
    """A commit that a client made."""

    sha: str
    revision: str
    title: str


@dataclass
class Repo:
    """A repo with all its commits; `refs` points from a branch, tag or pull request to one of them.

    `log` holds what clients committed, in order; `objects` the sha256 of large files that they uploaded.
    """

    id: str
    kind: str
    readers: set[str]
    gated: bool = False
    private: bool = False
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    pulls: list[Pull] = field(default_factory=list)
    log: list[Commit] = field(default_factory=list)
    objects: set[str] = field(default_factory=set)

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
        if isinstance(self.body, bytes):
            return self.body[start:stop]
        with self.body.path.open("rb") as stream:
            stream.seek(start)
            return stream.read(stop - start)

    def __len__(self) -> int:
        return len(self.body) if isinstance(self.body, bytes) else self.body.size


def to_json(content: Any, status: int = 200, **headers: str) -> Answer:
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
