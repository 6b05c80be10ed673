"""A proxy between neurond and a Docker Engine that passes everything on, but for the answers that a test breaks.

It speaks as much HTTP as it must: it reads the first line of each request, and from then on hands bytes back and forth.
"""

import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

Breaker = Callable[[socket.socket], bool]
"""Gets the client's connection when it has asked; True if the request has had its answer, False to pass it on."""

HEAD_END = b"\r\n\r\n"
EVENT_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


class Proxy:
    """Listens at `url`; `breakers` are tried by a regular expression that the request's first line has to match."""

    def __init__(self, path: Path, engine_url: str) -> None:
        self.url = f"unix://{path}"
        self.asked: list[str] = []
        self._engine = engine_url.removeprefix("unix://")
        self._breakers: dict[str, Breaker] = {}
        self._lost: dict[str, float] = {}
        self._open: set[socket.socket] = set()
        self._closed = False
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Close all connections, and listen no more."""
        self._closed = True
        for end in (self._listening, *self._open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def cut(self) -> None:
        """Close the connections that there are, as an engine does that ends."""
        for end in tuple(self._open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def set(self, pattern: str, breaker: Breaker | None) -> None:
        """Have requests whose first line matches answered in this way from now on; None passes them on again."""
        self._breakers.pop(pattern, None)
        if breaker is not None:
            self._breakers[pattern] = breaker

    def lose(self, pattern: str, late: float | None = 0.0) -> None:
        """Hang up on such requests, and do them `late` seconds later, so that nobody gets the answer; None: no more."""
        self._lost.pop(pattern, None)
        if late is not None:
            self._lost[pattern] = late

    def times(self, pattern: str) -> int:
        """Return how often such a request came."""
        return sum(1 for line in self.asked if re.search(pattern, line))

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """Take requests of one client, each with a connection of its own to the engine."""
        self._open.add(client)
        with client, suppress(OSError):
            while head := _head(client):
                line = head.partition(b"\r\n")[0].decode()
                self.asked.append(line)
                found = next((b for pattern, b in tuple(self._breakers.items()) if re.search(pattern, line)), None)
                if found is not None and found(client):
                    break
                late = next((s for pattern, s in tuple(self._lost.items()) if re.search(pattern, line)), None)
                if late is not None:
                    self._do_alone(client, head, late)
                    break
                self._pass_on(client, head)
                break  # neurond's next request comes on a connection of its own
        self._open.discard(client)

    def _do_alone(self, client: socket.socket, request: bytes, late: float) -> None:
        """Read the rest of a request, hang up, and have the engine do it later."""
        head, _, body = request.partition(HEAD_END)
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        while length is not None and len(body) < int(length[1]):
            body += client.recv(1 << 16)
        client.close()
        time.sleep(late)
        with socket.socket(socket.AF_UNIX) as engine:
            engine.connect(self._engine)
            line, _, rest = head.partition(b"\r\n")
            rest = re.sub(rb"(?i)connection:[^\r]*\r\n", b"", rest + b"\r\n")
            engine.sendall(line + b"\r\nConnection: close\r\n" + rest + b"\r\n" + body)
            while engine.recv(1 << 16):
                pass

    def _pass_on(self, client: socket.socket, head: bytes) -> None:
        first, _, rest = head.partition(b"\r\n")
        if b"upgrade" not in rest.lower():
            rest = b"Connection: close\r\n" + re.sub(rb"(?i)connection:[^\r]*\r\n", b"", rest)
        with socket.socket(socket.AF_UNIX) as engine:
            engine.connect(self._engine)
            self._open.add(engine)
            engine.sendall(first + b"\r\n" + rest)
            upward = threading.Thread(target=_copy, args=(client, engine), daemon=True)
            upward.start()
            _copy(engine, client)
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
            upward.join()
            self._open.discard(engine)


def _head(client: socket.socket) -> bytes:
    """Read a request as far as its head goes, and what came with it; nothing at the end."""
    data = b""
    while HEAD_END not in data:
        more = client.recv(1 << 16)
        if not more:
            return b""
        data += more
    return data


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


# -- what may go wrong ------------------------------------------------------------------------------------------------


def fails(client: socket.socket) -> bool:
    """Answer 500."""
    body = b'{"message": "the storage driver is out of its mind"}'
    head = f"HTTP/1.1 500 Internal Server Error\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    client.sendall(head.encode() + body)
    return True


def hangs(seconds: float) -> Breaker:
    """Make a breaker that says nothing for some time, and then hangs up."""

    def work(_: socket.socket) -> bool:
        time.sleep(seconds)
        return True

    return work


def streams(*data: bytes) -> Breaker:
    """Make a breaker that begins an event stream, sends these chunks of it, and hangs up in the middle."""

    def work(client: socket.socket) -> bool:
        client.sendall(EVENT_STREAM)
        for chunk in data:
            client.sendall(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
        return True

    return work


def hangs_up(_: socket.socket) -> bool:
    """Close the connection without an answer."""
    return True
