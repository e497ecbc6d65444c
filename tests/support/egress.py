"""A forward proxy on loopback that writes down every host that somebody tries to reach, and lets nobody through."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

HERE = "127.0.0.1,localhost"


class Egress:
    """The proxy's address, and the attempts to leave so far."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.hosts: list[str] = []
        """Host of every attempt, in order; empty where nothing left."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which Python's HTTP clients go through the proxy, except to this machine."""
        through = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), self.url)
        both = through | {"NO_PROXY": HERE}
        return both | {name.lower(): value for name, value in both.items()}


@contextmanager
def watch_egress() -> Iterator[Egress]:
    """A running proxy; it stops when the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def refuse(self) -> None:
            # CONNECT names HOST:PORT, every other method a whole URL
            host = self.path.rpartition(":")[0] if self.command == "CONNECT" else urlsplit(self.path).hostname
            egress.hosts.append(str(host))
            self.send_response(403)
            self.send_header("Content-Length", "0")
            self.send_header("Connection", "close")
            self.end_headers()

        do_CONNECT = do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = refuse  # noqa: N815

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    egress = Egress(f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield egress
    finally:
        server.shutdown()
        server.server_close()
