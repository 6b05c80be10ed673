"""Chips as the ledger sees them, and sets of chips as bit masks."""

from collections.abc import Iterable
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


def ranges(chips: Iterable[int]) -> str:
    """Write chip indices as people read them: 0,1,2,3,5 becomes "0-3,5"; none is "none"."""
    parts: list[list[int]] = []
    for index in sorted(chips):
        if parts and parts[-1][-1] == index - 1:
            parts[-1].append(index)
        else:
            parts.append([index])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts) or "none"
