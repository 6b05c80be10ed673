"""Follows what leases are bound to, and tells when it ends: processes, connections and time limits.

Containers are followed by the engine's watcher (containers.py), as the engine has to be asked.
"""

import asyncio
import os
from collections.abc import Callable

from neurond.host import processes
from neurond.ledger.leases import Binding, ByConnection, ByProcess, ByTime

LONGEST_SLEEP = 3600.0
"""Seconds; a timer of the loop does not see that the machine was suspended, so a long one is cut in pieces."""


class Bindings:
    """The bindings of all leases that live. `ended` is called once a lease, with the lease and the reason."""

    def __init__(self, ended: Callable[[str, str], None]) -> None:
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._pidfds: dict[str, int] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._connections: dict[object, set[str]] = {}
        self._connection_of: dict[str, object] = {}

    def follow(self, lease_id: str, binding: Binding, connection: object = None) -> None:
        """Begin to follow a binding. If it has ended already, `ended` is called soon, not from within."""
        match binding:
            case ByConnection():
                held = self._connections.get(connection)
                if held is None:
                    held = self._connections[connection] = set()
                held.add(lease_id)
                self._connection_of[lease_id] = connection
            case ByProcess(pid, ticks):
                try:
                    fd = processes.open_pidfd(pid, ticks)
                except processes.ProcessGone:
                    self._loop.call_soon(self._ended, lease_id, f"process {pid} ended")
                    return
                except OSError as error:
                    self._loop.call_soon(self._ended, lease_id, f"process {pid} can't be followed: {error.strerror}")
                    return
                self._pidfds[lease_id] = fd
                self._loop.add_reader(fd, self._process_ended, lease_id, pid)
            case ByTime(deadline):
                self._arm(lease_id, deadline)
            case _:
                pass

    def forget(self, lease_id: str) -> None:
        """Stop following; a second time does nothing."""
        connection = self._connection_of.pop(lease_id, None)
        if connection is not None:
            self._connections[connection].discard(lease_id)
            return
        fd = self._pidfds.pop(lease_id, None)
        if fd is not None:
            self._loop.remove_reader(fd)
            os.close(fd)
        timer = self._timers.pop(lease_id, None)
        if timer is not None:
            timer.cancel()

    def disconnected(self, connection: object) -> None:
        """End what was bound to this connection."""
        held = sorted(self._connections.pop(connection, ()))
        for lease_id in held:
            del self._connection_of[lease_id]
        for lease_id in held:
            self._ended(lease_id, "the client's connection closed")

    def _process_ended(self, lease_id: str, pid: int) -> None:
        self.forget(lease_id)
        self._ended(lease_id, f"process {pid} ended")

    def _arm(self, lease_id: str, deadline: float) -> None:
        left = deadline - processes.boottime()
        if left <= 0:
            self._timers.pop(lease_id, None)
            self._loop.call_soon(self._ended, lease_id, "its time limit passed")
        else:
            self._timers[lease_id] = self._loop.call_later(min(left, LONGEST_SLEEP), self._arm, lease_id, deadline)
