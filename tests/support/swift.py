"""A `featcal` for scripts under test: each call is a fork of one process in which everything is imported already.

What runs is the command itself, in a process of its own, with the caller's folder, environment and streams.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zygote import import_everything, run_main

CLIENT = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    order = json.dumps(dict(arguments=sys.argv[1:], folder=os.getcwd(), environment=dict(os.environ))).encode()
    socket.send_fds(server, [len(order).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(order)
    sys.exit(int(server.makefile().read()))
"""


@contextmanager
def installed(folder: Path) -> Iterator[Path]:
    """Inside, the folder holds a `featcal` to be put into PATH; yields the folder."""
    address = folder / "server"
    server = subprocess.Popen([sys.executable, __file__, str(address)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
        client = folder / "featcal"
        client.write_text(CLIENT.format(python=sys.executable, address=str(address)))
        client.chmod(0o755)
        yield folder
    finally:
        server.terminate()
        server.wait(10)


def _serve(address: str) -> None:
    import_everything()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            connection, _ = server.accept()
            if os.fork() == 0:  # waits for the command and tells how it ended
                _answer(connection)
            connection.close()


def _answer(connection: socket.socket) -> None:
    size, streams, _, _ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as sent:
        order = json.loads(sent.read(int.from_bytes(size, "big")))
    if (pid := os.fork()) == 0:
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.environ.clear()
        run_main(order["folder"], order["arguments"], order["environment"])
    _, status = os.waitpid(pid, 0)
    connection.sendall(str(os.waitstatus_to_exitcode(status) % 256).encode())
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1])
