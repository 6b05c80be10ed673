"""Which chips there are: what the kernel shows, completed from the catalog, when it has settled.

News from udev means "look again", never a difference: every look takes in the whole set. A slow periodic look is the
backstop for news that never came.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import structlog

from neurond.catalog import InstanceType
from neurond.host.sysfs import Sysfs
from neurond.ledger.chips import Chip

log = structlog.get_logger()

SETTLE = 3.0
"""Seconds that a new chip may take to get its sysfs files: the driver adds them after the `add` event."""
PERIOD = 10.0
QUIET = 0.02
"""Seconds to wait after news, so that a burst of events is one look."""


class Source(Protocol):
    """Where chips come from: the real host's udev, or a simulated host."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is news."""
        ...

    def drain(self) -> bool:
        """Take in the news; False if the descriptor is another one now."""
        ...

    def directories(self) -> list[Path]:
        """Return the sysfs directories of all devices."""
        ...


class Discovery:
    """Looks at the chips of this host, at the start and whenever there may be news."""

    def __init__(self, source: Source, sysfs: Sysfs, kind: InstanceType, period: float = PERIOD) -> None:
        self.source = source
        self.sysfs = sysfs
        self.kind = kind
        self.period = period
        self._first_seen: dict[tuple[int, int, int], float] = {}
        self._fd = source.fileno()
        self._again = asyncio.Event()
        self._looking = asyncio.Lock()

    async def look_now(self) -> tuple[dict[int, Chip], bool]:
        """Do as `look`, in a thread."""
        async with self._looking:
            return await asyncio.to_thread(self.look)

    def look(self) -> tuple[dict[int, Chip], bool]:
        """Return the chips by index, and whether one of them has not settled yet and is left out. Blocks shortly."""
        found, unsettled = {}, False
        seen: dict[tuple[int, int, int], float] = {}
        for index, chip in self.sysfs.read(self.source.directories()).items():
            key = index, chip.major, chip.minor
            seen[key] = self._first_seen.get(key, time.monotonic())
            if chip.cores is None and chip.problem is None and self._age(chip, seen[key]) < SETTLE:
                unsettled = True
            else:
                found[index] = self._complete(chip)
        self._first_seen = seen
        return found, unsettled

    def note(self, chips: dict[int, Chip]) -> str | None:
        """Return what is remarkable about this host: no chips and why, or a type that the catalog does not have."""
        if not chips:
            return f"this host has no Neuron chips: {self.sysfs.why_empty()}"
        if not self.kind.known:
            return (
                f"instance type {self.kind.name!r} is not in the catalog: chips are leased one at a time or all "
                "together, as nothing is known about larger sets"
            )
        return None

    async def follow(self, take: Callable[[dict[int, Chip]], None]) -> None:
        """Look whenever there may be news, and hand the whole set to `take`. Runs until cancelled."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._fd, self._news)
        try:
            delay = 0.0
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(delay or self.period):
                        await self._again.wait()
                await asyncio.sleep(QUIET)
                self._again.clear()
                try:
                    chips, unsettled = await self.look_now()
                except OSError as error:
                    log.warning("discovery.failed", error=str(error), follows="keeping the chips as they were")
                    delay = 1.0
                else:
                    take(chips)
                    delay = 0.2 if unsettled else 0.0
        finally:
            loop.remove_reader(self._fd)

    def _news(self) -> None:
        self._again.set()
        if not self.source.drain():
            log.warning("discovery.monitor_restarted", follows="looking at all chips again")
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._fd)
            self._fd = self.source.fileno()
            loop.add_reader(self._fd, self._news)

    def _age(self, chip: Chip, first_seen: float) -> float:
        # The clock of the node may have been set since, but a wrong age only costs a short wait or saves one.
        return max(time.monotonic() - first_seen, time.time() - self.sysfs.age(chip))

    def _complete(self, chip: Chip) -> Chip:
        if not self.kind.known:
            return chip
        if chip.cores is None:
            chip = replace(chip, cores=self.kind.cores, cores_from="catalog")
        if not chip.connected and self.kind.connected(chip.index):
            chip = replace(chip, connected=self.kind.connected(chip.index), connected_from="catalog")
        return replace(chip, memory=self.kind.memory, device_name=chip.device_name or self.kind.chip)
