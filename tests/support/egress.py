"""A forward proxy on loopback that writes down every host that somebody tries to reach, and lets nobody through."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import urlsplit


class Egress(NamedTuple):
    """What lets HTTP clients of Python go through a proxy, except to this machine; and their attempts to leave."""

    environment: dict[str, str]
    hosts: list[str]
    """Host of every attempt, in order; empty where nothing left."""


@contextmanager
def watch_egress() -> Iterator[Egress]:
    """A running proxy; it stops when the block ends."""
    hosts: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def refuse(self) -> None:
            # CONNECT names HOST:PORT, every other method a whole URL
            host = self.path.rpartition(":")[0] if self.command == "CONNECT" else urlsplit(self.path).hostname
            hosts.append(str(host))
            self.send_response(403)
            self.send_header("Content-Length", "0")
            self.send_header("Connection", "close")
            self.end_headers()

        do_CONNECT = do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = refuse  # noqa: N815

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), f"http://127.0.0.1:{server.server_address[1]}")
    both = {**proxies, "NO_PROXY": "127.0.0.1,localhost"}
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield Egress({**both, **{name.lower(): value for name, value in both.items()}}, hosts)
    finally:
        server.shutdown()
        server.server_close()
