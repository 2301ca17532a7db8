"""What client and worker say to each other: JSON objects with their length in front."""

import json
import socket
import struct
from typing import Any

INTERRUPT = b"\x03"  # from the client, after its request: a Ctrl-C
LENGTH = struct.Struct("!I")


def send(connection: socket.socket, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
    """Send a message; open files go along with its length."""
    content = json.dumps(message).encode()
    socket.send_fds(connection, [LENGTH.pack(len(content))], descriptors or [])
    connection.sendall(content)


def receive(connection: socket.socket, descriptors: int = 0) -> tuple[dict[str, Any], list[int]]:
    """The next message and the open files that came with it. Raises EOFError where the other side is gone."""
    header, files, _, _ = socket.recv_fds(connection, LENGTH.size, descriptors)
    header += _exactly(connection, LENGTH.size - len(header)) if header else b""
    if not header:
        raise EOFError
    return json.loads(_exactly(connection, *LENGTH.unpack(header))), files


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
