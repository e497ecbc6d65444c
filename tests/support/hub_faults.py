"""Faults on demand for the Hub on loopback, and a name for every kind of request that its clients make."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pytest


class Kind(NamedTuple):
    """Requests with this method whose path has a match."""

    method: str
    path: str


READS = {
    "whoami": Kind("GET", "^/api/whoami-v2$"),
    "model info": Kind("GET", "^/api/models/[^/]+/[^/]+(/revision/.+)?$"),
    "dataset info": Kind("GET", "^/api/datasets/[^/]+/[^/]+(/revision/.+)?$"),
    "model tree": Kind("GET", "^/api/models/.+/tree/"),
    "dataset tree": Kind("GET", "^/api/datasets/.+/tree/"),
    "paths": Kind("POST", "^/api/.+/paths-info/"),
    "discussions": Kind("GET", "^/api/.+/discussions$"),
    "file head": Kind("HEAD", "/resolve/"),
    "file": Kind("GET", "/resolve/"),
    "large file": Kind("GET", "^/cdn/"),
}
"""Every kind of request that reads."""
WRITES = {
    "create": Kind("POST", "^/api/repos/create$"),
    "validate": Kind("POST", "^/api/validate-yaml$"),
    "preupload": Kind("POST", "^/api/.+/preupload/"),
    "batch": Kind("POST", "/info/lfs/objects/batch$"),
    "upload": Kind("PUT", "^/upload/"),
    "verify": Kind("POST", "/info/lfs/verify$"),
    "commit": Kind("POST", "^/api/.+/commit/"),
}
"""Every kind of request that belongs to a push."""
KINDS = READS | WRITES


@dataclass(frozen=True)
class Fault:
    """A fault that a request meets."""

    status: int = 0
    """Answered in place of what was asked for; 0: the answer is the usual one."""
    message: str = "this is a fault"
    """Text of such an answer."""
    retry_after: int | None = None
    """Seconds, in the header of that name."""
    carried_out: bool = True
    """Whether the request has its effect all the same."""
    share: float = 1.0
    """Share of the answer's body that is sent; 0: not even its headers."""
    reset: bool = False
    """Whether the connection then ends with an RST, rather than orderly but too early."""
    seconds: float = 0.0
    """Waited before anything is done."""
    body: bytes | None = None
    """Sent in place of the answer's own, as HTML."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent besides the answer's own."""
    without: tuple[str, ...] = ()
    """Headers of the answer that are left out."""
    action: Callable[[], object] | None = None
    """Called before anything is done."""


FAULTS = {
    "429": Fault(status=429, retry_after=1, carried_out=False),
    "500": Fault(status=500, carried_out=False),
    "503": Fault(status=503, carried_out=False),
    "reset": Fault(carried_out=False, share=0.0, reset=True),
    "reset midway": Fault(share=0.5, reset=True),
    "truncated": Fault(share=0.5),
    "slow": Fault(seconds=2.0),
    "lost reply": Fault(share=0.0, reset=True),
    "lost behind a gateway": Fault(status=504),
}
"""Faults by name; of the last two, and of those midway, the request is carried out and the client cannot know it."""


class Faults:
    """The faults that are planned, in the order in which they were."""

    def __init__(self) -> None:
        self.hits = 0
        """Requests that a fault has hit so far."""
        self._planned: list[tuple[Kind, str, Iterator[Fault | None]]] = []
        self._lock = threading.Lock()

    def plan(self, kind: str, fault: str | Fault, *, path: str, times: int | None, after: int) -> None:
        """Let requests of a kind (a name in KINDS, or a method) fail whose path has a match."""
        found = FAULTS[fault] if isinstance(fault, str) else fault
        hits = repeat(found) if times is None else repeat(found, times)
        self._planned.append((KINDS.get(kind, Kind(kind, "")), path, chain(repeat(None, after), hits)))

    def take(self, method: str, path: str) -> Fault | None:
        """The fault that hits this request, if any."""
        with self._lock:
            for kind, pattern, turns in self._planned:
                is_meant = kind.method == method and re.search(kind.path, path) and re.search(pattern, path)
                if is_meant and (fault := next(turns, None)):
                    self.hits += 1
                    return fault
        return None

    def clear(self) -> None:
        self._planned.clear()


def go_down(patch: pytest.MonkeyPatch) -> None:
    """Let every connection to the Hub be refused, as when it is down."""
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    def refuse(*_: object, **__: object) -> None:
        raise httpx.ConnectError("connection refused")

    patch.setattr(httpx.Client, "send", refuse)
