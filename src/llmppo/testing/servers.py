"""Servers that a test starts in another process: a free port, and waiting until one answers."""

import socket
import time
import urllib.request


def free_port() -> int:
    """A port of this machine that nothing listens on at the moment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def wait_for(address: str, seconds: float = 120) -> None:
    """Until a server answers; AssertionError when it doesn't within `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < deadline, f"{address} does not answer"
            time.sleep(0.3)
