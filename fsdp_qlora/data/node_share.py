"""One rank of a node tokenizes, the others map what it made, without a file on any disk.

The tokens lie in anonymous memory (memfd_create), whose descriptor the ranks of a node pass on through
a socket with an abstract name. Both end with the last process that holds them, so a killed run leaves
nothing behind. A rank that finds no writer within five seconds, or one that ended or reads other data,
tokenizes for itself: what is shared saves time, and nothing depends on it. Linux alone has both.

https://man7.org/linux/man-pages/man2/memfd_create.2.html
"""

from __future__ import annotations

import os
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

_WRITER_COMES_S = 5.0  # ranks of a node start together; less than others wait for an error of one
_POLL_S = 0.1
_HERE, _FAILED = b"h", b"f"


T = TypeVar("T")


def can_share() -> bool:
    """Whether this system has memory and sockets without a name on a disk."""
    return hasattr(os, "memfd_create") and hasattr(socket, "send_fds")


class Writer:
    """Answers the other ranks of a node under `name` until this process ends; `writer_of` makes one."""

    def __init__(self, name: str):
        self.descriptor: Future[int] = Future()
        handler = type("_Handler", (_Handler,), {"writer": self})
        server = _Server("\0" + name, handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def write(self, made: Callable[[], bytes]) -> str:
        """Let the others have the bytes that `made()` gives, or its error; returns their path here."""
        if self.descriptor.done():
            if not self.descriptor.exception():
                return _path(self.descriptor.result())
            self.descriptor = Future()  # another try
        try:
            content = made()
            descriptor = os.memfd_create("tokens")
            with os.fdopen(descriptor, "wb", closefd=False) as file:
                file.write(content)
        except BaseException as error:
            self.descriptor.set_exception(error)
            raise
        self.descriptor.set_result(descriptor)
        return _path(descriptor)

    def answer(self, connection: socket.socket) -> None:
        """Give one rank the descriptor, or the error."""
        if not _is_own(connection):
            return
        if error := self.descriptor.exception():
            connection.sendall(_FAILED + str(error).encode())
        else:
            socket.send_fds(connection, [_HERE], [self.descriptor.result()])


_writers: dict[str, Writer] = {}  # of this process, by name


def writer_of(name: str) -> Writer | None:
    """The writer of this name; None if another process has it, or there are no such sockets."""
    if name not in _writers:
        try:
            _writers[name] = Writer(name)
        except OSError:
            return None
    return _writers[name]


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128


class _Handler(socketserver.BaseRequestHandler):
    writer: Writer

    def handle(self) -> None:
        with suppress(OSError):  # a rank that has ended
            self.writer.answer(self.request)


def read(name: str, load: Callable[[str], T]) -> T | None:
    """What `load(path)` makes of the writer's bytes; None if this rank must do without.

    Raises ValueError with the writer's error.
    """
    connection = _connected(name)
    if connection is None:
        return None
    with connection:
        try:
            data, descriptors, _, _ = socket.recv_fds(connection, 2**16, 1)
        except OSError:
            return None
    if data[:1] == _FAILED:
        raise ValueError(data[1:].decode())
    if not descriptors:  # the writer has ended
        return None
    try:
        return load(_path(descriptors[0]))
    finally:
        os.close(descriptors[0])


def _connected(name: str) -> socket.socket | None:
    """A connection to the writer, which may not have come that far yet; None if it does not come."""
    deadline = time.monotonic() + _WRITER_COMES_S
    while time.monotonic() < deadline:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect("\0" + name)
        except OSError:
            connection.close()
            time.sleep(_POLL_S)
            continue
        if _is_own(connection):
            return connection
        connection.close()
        break
    return None


def _is_own(connection: socket.socket) -> bool:
    """Whether this user's process is at the other end: all users see abstract names."""
    size = struct.calcsize("3i")
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, user, _ = struct.unpack("3i", peer)
    return user == os.getuid()


def _path(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"
