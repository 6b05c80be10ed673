"""The load: closed loops on many connections from one thread, made to cost as little as Python can.

Each connection sends a request, waits for the reply, and sends the next one, which follows from the reply. Requests are
bytes made beforehand, descriptors are polled by epoll and read and written without a layer in between.
"""

import gc
import os
import select
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

SIZE = 1 << 16
PATIENCE = 60.0
NS = 1e-9

Address = str | tuple[str, int]
"""The path of a Unix socket, or host and port."""


class LoadError(Exception):
    """A server answered with an error, or not at all."""


class Talk(Protocol):
    """What the clients of one server say."""

    end: bytes
    """How each reply ends."""

    def acquire(self, client: int) -> bytes:
        """Return the request that a client begins with."""
        ...

    def answer(self, client: int, reply: bytes) -> bytes:
        """Return the request that follows on a reply."""
        ...


@dataclass(frozen=True, slots=True)
class Round:
    """What happened in one round. Times in seconds, but `latencies` in ns, ascending.

    `server_cpu` and `load_cpu` are the processor time that both sides took, `server_waited` is how long the server was
    ready to run but its core was busy with something else.
    """

    requests: int
    seconds: float
    latencies: Sequence[int]
    server_cpu: float
    load_cpu: float
    server_waited: float

    @property
    def rate(self) -> float:
        """Requests a second."""
        return self.requests / self.seconds

    @property
    def cost(self) -> float:
        """Processor time of the server for a request, in seconds."""
        return self.server_cpu / self.requests

    def quantile(self, share: float) -> float:
        """Return the latency, in seconds, that this share of the requests did not exceed."""
        return self.latencies[min(int(share * len(self.latencies)), len(self.latencies) - 1)] * NS


def processor_time(pid: int) -> tuple[float, float]:
    """Return how long the threads of a process have run, and how long they were kept waiting for a core, in seconds."""
    ran = waited = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread that has just ended
            fields = task.joinpath("schedstat").read_text("ascii").split()
            ran, waited = ran + int(fields[0]), waited + int(fields[1])
    return ran * NS, waited * NS


class Load:
    """So many connections to a server; `run` keeps them busy. Nothing is held between two rounds."""

    def __init__(self, address: Address, connections: int, talk: Talk, pid: int) -> None:
        self.talk = talk
        self.pid = pid
        self._epoll = select.epoll()
        self._sockets = [_connect(address) for _ in range(connections)]
        self._due = {one.fileno(): talk.acquire(one.fileno()) for one in self._sockets}
        self._partial: dict[int, bytes] = {}
        for one in self._sockets:
            self._epoll.register(one, select.EPOLLIN)

    def close(self) -> None:
        """Close all connections."""
        for one in self._sockets:
            one.close()
        self._epoll.close()

    def run(self, seconds: float) -> Round:
        """Keep all connections busy for so long, then let go of what they hold."""
        server_before, load_before = processor_time(self.pid), time.process_time()
        gc.disable()
        try:
            latencies, took = self._busy(seconds)
        finally:
            gc.enable()
        ran, waited = processor_time(self.pid)
        load_cpu = time.process_time() - load_before
        self._let_go()
        latencies.sort()
        return Round(len(latencies), took, latencies, ran - server_before[0], load_cpu, waited - server_before[1])

    def _busy(self, seconds: float) -> tuple[list[int], float]:
        poll, read, write, clock = self._epoll.poll, os.read, os.write, time.perf_counter_ns
        answer, end, most = self.talk.answer, self.talk.end, len(self._sockets)
        latencies: list[int] = []
        note = latencies.append
        begun = clock()
        sent = dict.fromkeys(self._due, begun)
        for fd, request in self._due.items():
            write(fd, request)
        deadline = begun + int(seconds / NS)
        now = begun
        while now < deadline:
            ready = poll(PATIENCE, most)
            if not ready:
                raise LoadError(f"no reply within {PATIENCE:g} s")
            for fd, _ in ready:
                reply = read(fd, SIZE)
                if not reply.endswith(end):
                    if not self._whole(fd, reply):
                        continue
                    reply = self._partial.pop(fd)
                now = clock()
                note(now - sent[fd])
                sent[fd] = now
                write(fd, answer(fd, reply))
        return latencies, (now - begun) * NS

    def _let_go(self) -> None:
        """Take the replies that are under way, and give back what they say is held."""
        self._due = {}
        while len(self._due) < len(self._sockets):
            for fd, _ in self._epoll.poll(PATIENCE):
                reply = os.read(fd, SIZE)
                if not reply.endswith(self.talk.end):
                    if not self._whole(fd, reply):
                        continue
                    reply = self._partial.pop(fd)
                request = self.talk.answer(fd, reply)
                if request == self.talk.acquire(fd):
                    self._due[fd] = request
                else:
                    os.write(fd, request)

    def _whole(self, fd: int, data: bytes) -> bool:
        """Put a reply together that comes in pieces; tell whether it is whole."""
        if not data:
            raise LoadError("the server closed a connection")
        self._partial[fd] = self._partial.get(fd, b"") + data
        return self._partial[fd].endswith(self.talk.end)


def _connect(address: Address) -> socket.socket:
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    one = socket.socket(family, socket.SOCK_STREAM)
    one.connect(address)
    if family == socket.AF_INET:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one
