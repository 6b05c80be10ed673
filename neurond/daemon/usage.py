"""Who really has chips open or mapped, compared with who holds them: the kernel's word against the ledger's.

A look goes through all of /proc, in a thread. It is taken when inotify or the engine tell that something may have
changed, again and again while a chip drains or is used without a lease, and every so often as a backstop.
"""

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import structlog

from neurond.host import processes
from neurond.host.opens import Opens
from neurond.ledger.chips import Chip, User, mask_of
from neurond.ledger.leases import ByConnection, ByProcess, Lease, OnContainers

log = structlog.get_logger()

GONE = -1
"""The uid of a process that had ended when it was to be described."""
FIRST_PAUSE, LAST_PAUSE = 0.02, 1.0
"""Seconds between two looks while somebody has a chip open who should not: the first pause, and the longest."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A process that has a chip open, with what tells whose it is."""

    user: User
    uid: int
    ancestors: tuple[int, ...]
    lease: str | None


@dataclass(frozen=True, slots=True)
class Found:
    """What a look found: the processes by chip; and by pid, the age in seconds of those that it could not look into.

    It says nothing of what happened after it `began` (monotonic clock), such as the opening of the chips `missed`.
    """

    by_chip: dict[int, list[Seen]]
    unreadable: dict[int, float]
    began: float = 0.0
    missed: int = 0


class Usage:
    """Looks at who has chips open, whenever that may have changed. `take` gets what was found, on the loop.

    `period` tells how many seconds may pass between two looks without any news.
    """

    def __init__(self, opens: Opens, take: Callable[[Found], bool], period: Callable[[], float]) -> None:
        self.opens = opens
        self._take = take
        self._period = period
        self._devices: dict[processes.Device, int] = {}
        """Chips by their numbers: those they have, and those they had while somebody may have them open."""
        self._current: dict[int, processes.Device] = {}
        self._again = asyncio.Event()
        self._looking = asyncio.Lock()
        self._begun = 0
        self._unsettled = False

    def watch(self, chips: dict[int, Chip]) -> None:
        """Watch the nodes of these chips. One that vanished or has other numbers may be open under its old ones."""
        self._current |= {index: (chip.major, chip.minor) for index, chip in chips.items()}
        self._devices |= {device: index for index, device in self._current.items()}
        self.opens.watch({chip.node: index for index, chip in chips.items()})

    def soon(self) -> None:
        """Have a look soon."""
        self._again.set()

    async def look(self) -> bool:
        """Take a look that begins now or later; return what `take` does: whether to look again before long.

        All who ask while one look is under way share the next one.
        """
        begun = self._begun
        async with self._looking:
            if self._begun == begun:
                self._begun += 1
                self._again.clear()
                began = time.monotonic()  # the loop's clock stands still within a turn
                self.opens.begin()
                found = await asyncio.to_thread(_look, dict(self._devices))
                missed = self.opens.finish(mask_of(tuple(found.by_chip)))
                current = set(self._current.values())
                self._devices = {d: i for d, i in self._devices.items() if d in current or i in found.by_chip}
                self._unsettled = self._take(replace(found, began=began, missed=missed))
            return self._unsettled

    async def follow(self) -> None:
        """Look whenever there is reason to. Runs until cancelled."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self.opens.fileno(), self._opened)
        try:
            pause = FIRST_PAUSE  # what drained or was foreign at the start is looked at again soon
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._again.wait()
                    pause = FIRST_PAUSE
                try:
                    unsettled = await self.look()
                except Exception:  # whatever /proc may hold, chips in doubt stay withheld, and we look again
                    log.exception("usage.failed")
                    unsettled = True
                pause = min(2 * pause, LAST_PAUSE) if unsettled else self._period()
                await asyncio.sleep(FIRST_PAUSE)  # so that a burst of opens is a few looks, not thousands
        finally:
            loop.remove_reader(self.opens.fileno())

    def _opened(self) -> None:
        self.opens.look()
        self._again.set()


def belongs(seen: Seen, lease: Lease) -> bool:
    """Tell whether a process uses a chip by right of this lease.

    A holder's children do, also when they have been handed to init: their environment names the lease. Once a lease is
    at its end, every process of its owner on its chips is taken to be left over from it.
    """
    binding = lease.binding
    if isinstance(binding, OnContainers):
        return any(one and seen.user.container == one for _, one in binding.containers)
    if isinstance(binding, ByProcess | ByConnection) and binding.pid in seen.ancestors:
        return True
    same_owner = seen.uid == lease.owner.uid
    return same_owner and (seen.lease == lease.id or binding.kind == "time" or lease.state != "active")


def _look(devices: dict[processes.Device, int]) -> Found:
    uses = processes.users_of(set(devices))
    known: dict[int, Seen] = {}
    by_chip: dict[int, list[Seen]] = {}
    for device, index in devices.items():
        for pid in uses.pids.get(device, ()):
            if pid not in known:
                known[pid] = _seen(pid)
            seen = known[pid]
            if seen not in by_chip.setdefault(index, []):
                by_chip[index].append(seen)
    if os.geteuid() != 0:
        return Found(by_chip, {})  # other users' processes are closed to us: only root's daemon sees everything
    return Found(by_chip, {pid: processes.age(pid) for pid in uses.unreadable})


def _seen(pid: int) -> Seen:
    process = processes.describe(pid)
    if process is None:
        return Seen(User(pid, "?", "a process that ended just now"), GONE, (), None)
    user = User(pid, process.user, process.command, processes.container_of(pid) or "")
    lease = processes.environment_value(pid, "NEUROND_LEASE")
    return Seen(user, process.uid, tuple(processes.ancestors(pid)), lease)
