"""Chips as the ledger sees them, and sets of chips as bit masks."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Source = Literal["sysfs", "catalog", "unknown"]


@dataclass(frozen=True, slots=True)
class Chip:
    """One Neuron chip as it was found on this host.

    `index` is N of /dev/neuronN, `cores` counts physical NeuronCores, `memory` is in bytes. The `*_from`
    fields tell where a fact was taken from. A `problem` withholds the chip from leases and says why.
    """

    index: int
    node: str
    major: int
    minor: int
    cores: int | None = None
    cores_from: Source = "unknown"
    connected: tuple[int, ...] = ()
    connected_from: Source = "unknown"
    serial: str | None = None
    device_name: str | None = None
    memory: int | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class User:
    """A process that has a chip open, as people see it; `container` is the id of the one it runs in, if any."""

    pid: int
    user: str
    command: str
    container: str = ""

    def __str__(self) -> str:
        where = f", container {self.container[:12]}" if self.container else ""
        return f"pid {self.pid} ({self.user}, {self.command}{where})"


@lru_cache(maxsize=1 << 16)
def mask_of(chips: tuple[int, ...]) -> int:
    """Return the bit mask of a tuple of chip indices: bit N stands for chip N."""
    mask = 0
    for index in chips:
        mask |= 1 << index
    return mask


@lru_cache(maxsize=1 << 16)
def chips_of(mask: int) -> tuple[int, ...]:
    """Return the ascending chip indices of a bit mask."""
    return tuple(index for index in range(mask.bit_length()) if mask >> index & 1)
