"""The socket of one request: read until a deadline and up to a size, however a server sends.

A socket's own timeout bounds each wait only: a byte now and then would keep a run for ever.
"""

from __future__ import annotations

import io
import socket
import time
from typing import Any

from vision_exp.validate.reply import BadReply

#: Bytes of a reply with its head: a hundred times what the longest answer asked for here takes.
MOST = 16 << 20


class Wire:
    """What `http.client` needs of a socket. ``deadline`` is a time of `time.monotonic`.

    Reading raises TimeoutError past the deadline, and BadReply past `MOST` bytes.
    """

    def __init__(self, sock: socket.socket, url: str, deadline: float, seconds: float) -> None:
        self.sock, self.deadline = sock, deadline
        self._url, self._late = url, f"no whole reply within {seconds:g} s (--timeout)"
        self._read = 0

    def makefile(self, mode: str) -> io.BufferedReader:
        if mode != "rb":
            raise ValueError(f"a reply is read as bytes, not in mode {mode!r}")
        return io.BufferedReader(_Source(self))

    def close(self) -> None:
        self.sock.close()

    def read_into(self, file: Any, buffer: Any) -> int | None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(self._late)
        self.sock.settimeout(left)
        try:
            count: int | None = file.readinto(buffer)
        except TimeoutError as error:
            raise TimeoutError(self._late) from error
        self._read += count or 0
        if self._read > MOST:
            raise BadReply(self._url, f"more than {MOST} bytes")
        return count


class _Source(io.RawIOBase):
    def __init__(self, wire: Wire) -> None:
        # The socket stays open until this file is closed, as http.client relies on.
        self._wire, self._file = wire, wire.sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        return self._wire.read_into(self._file, buffer)

    def close(self) -> None:
        self._file.close()
        super().close()
