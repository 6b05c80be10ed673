"""A systemd journal of the tests' own: a real datagram socket, and what was sent to it, read as journald reads it."""

import array
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from neurond.host.journald import SEALS

Entry = dict[str, list[str]]


def decode(data: bytes) -> Entry:
    """Take an entry apart, by the rules of the native protocol."""
    entry: Entry = {}
    while data:
        line, _, rest = data.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            size = int.from_bytes(rest[:8], "little")
            value, end, rest = rest[8 : 8 + size], rest[8 + size : 9 + size], rest[9 + size :]
            assert end == b"\n"
        entry.setdefault(name.decode(), []).append(value.decode())
        data = rest
    return entry


class Heard:
    """A journal that is read by hand, so it can be busy too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.setblocking(False)
        path.chmod(0o666)
        self.files = 0
        self.entries: list[Entry] = []

    def read(self) -> list[Entry]:
        """Read what is there, and return all entries so far."""
        while True:
            try:
                data, ancillary, _, _ = self.socket.recvmsg(1 << 20, socket.CMSG_SPACE(4))
            except BlockingIOError:
                return self.entries
            for _, _, rights in ancillary:
                (fd,) = array.array("i", rights)
                assert data == b""
                assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == SEALS
                with os.fdopen(fd, "rb") as file:
                    file.seek(0)
                    data = file.read()
                self.files += 1
            self.entries.append(decode(data))

    def of(self, event: str) -> list[Entry]:
        """Return the entries of one kind."""
        return [entry for entry in self.read() if entry["NEUROND_EVENT"] == [event]]

    def close(self) -> None:
        """End it, as if journald was gone."""
        self.socket.close()
        self.path.unlink(missing_ok=True)


@contextmanager
def journal_at(path: Path) -> Iterator[Heard]:
    """Listen at a path for a while."""
    heard = Heard(path)
    try:
        yield heard
    finally:
        heard.close()
