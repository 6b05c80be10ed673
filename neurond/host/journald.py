"""The systemd journal: its native protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL), by which an entry has fields.

Own code, as the protocol is one datagram for an entry, and systemd's binding for Python has to be built against its
library on each host. Nothing here ever waits: a journal that is busy is an error, BlockingIOError.
"""

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterable
from contextlib import suppress

SOCKET = "/run/systemd/journal/socket"
ROOM = 8 << 20
"""Bytes of entries that may be on their way, as in systemd's own library."""
TOO_LARGE = {errno.EMSGSIZE, errno.ENOBUFS}
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def is_behind(fd: int) -> bool:
    """Tell whether a descriptor is the journal, as systemd says in JOURNAL_STREAM (device:inode)."""
    try:
        status = os.fstat(fd)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def encode(fields: Iterable[tuple[str, str]]) -> bytes:
    """Return the bytes of an entry. A name is of A-Z, 0-9 and _, and may come several times; a value is any text."""
    parts: list[bytes] = []
    for name, text in fields:
        value = text.encode(errors="backslashreplace")
        if b"\n" in value:
            parts += (name.encode(), b"\n", len(value).to_bytes(8, "little"), value, b"\n")
        else:
            parts += (name.encode(), b"=", value, b"\n")
    return b"".join(parts)


class Journald:
    """A way to the journal that listens at `path`. The path is looked up for each entry, so it may come and go."""

    def __init__(self, path: str = SOCKET) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        with suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ROOM)  # no more than the kernel lets us have

    def send(self, entry: bytes) -> None:
        """Send an entry. Raises BlockingIOError while the journal has no room, OSError if there is none."""
        try:
            self._socket.sendto(entry, self.path)
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno not in TOO_LARGE:
                raise
            self._send_as_file(entry)

    def _send_as_file(self, entry: bytes) -> None:
        """Send an entry that is too large for a datagram, as a file in memory that nobody can change any more."""
        fd = os.memfd_create("neurond-log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with os.fdopen(fd, "wb") as file:
            file.write(entry)
            file.flush()
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fd.to_bytes(4, "little"))]
            self._socket.sendmsg([], rights, 0, self.path)

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close()


class Spill:
    """A stream for what the journal did not take, which never waits where it is a socket, as under systemd.

    What a socket has no room for is kept, up to `most` bytes; `lost` counts the lines beyond.
    """

    def __init__(self, fd: int, most: int = 4 << 20) -> None:
        self.lost = 0
        self._fd = fd
        self._is_socket = stat.S_ISSOCK(os.fstat(fd).st_mode)
        self._most = most
        self._rest = bytearray()

    @property
    def owes(self) -> bool:
        """Whether something is still to be written."""
        return bool(self._rest)

    def write(self, line: bytes) -> None:
        """Write a line, now or by a later call of `flush`."""
        if len(self._rest) + len(line) > self._most:
            self.lost += 1
        else:
            self._rest += line

    def flush(self) -> None:
        """Write as much as goes without waiting. A stream whose reader is gone has nobody to lose it to."""
        try:
            while self._rest:
                del self._rest[: self._write_some()]
        except BlockingIOError:
            return
        except OSError:
            self.lost += self._rest.count(b"\n")
            self._rest.clear()

    def _write_some(self) -> int:
        if not self._is_socket:
            return os.write(self._fd, self._rest)
        with socket.socket(fileno=os.dup(self._fd)) as stream:
            return stream.send(self._rest, socket.MSG_DONTWAIT)  # the descriptor's own flags are shared with others
