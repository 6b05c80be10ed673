"""Which sets of chips may be leased together, and which of them to take.

Sources: the AWS Neuron documentation of its Kubernetes scheduler extension and DRA driver (sizes and groups per
instance type). A set that wraps around a ring is never offered: the runtime numbers cores upward from the lowest
chip that it sees and wants the numbers without a gap.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from neurond.ledger.chips import chips_of
from neurond.ledger.words import ranges

Shape = Literal["single", "run", "grid"]

GRID_SIZES = (1, 4, 8, 16)
"""A row of the 4x4 grid is 4 chips, half of it 8."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The legal sets of one kind of host.

    `shape` is "single" (one chip at a time), "run" (any run of neighbouring indices) or "grid" (1, a row of 4,
    a half of 8, all 16). `width` is one more than the highest chip index that the host can have.
    """

    shape: Shape
    width: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The legal sizes of a set, ascending."""
        return sizes_of(self)

    def groups(self, size: int) -> tuple[int, ...]:
        """Return the legal sets of `size` chips as ascending bit masks; none where the size is not legal."""
        return groups_of(self, size)

    def is_legal(self, mask: int) -> bool:
        """Tell whether exactly these chips may be leased together."""
        return mask in groups_of(self, mask.bit_count())

    def pick(self, free: int, size: int) -> int:
        """Return the best legal set of `size` chips within the mask `free`, or 0 if there is none.

        Best is what keeps larger groups whole: of the candidates, the one that touches the fewest wholly free
        groups of the largest size, then of the next smaller one, and so on; then the lowest indices.
        """
        return pick_of_grid(self.width, free, size) if self.shape == "grid" else pick_of(self, free, size)

    def nearest_sizes(self, size: int) -> tuple[int, ...]:
        """Return the legal sizes next to an illegal one: the next below and the next above."""
        below = [s for s in self.sizes if s < size][-1:]
        above = [s for s in self.sizes if s > size][:1]
        return (*below, *above)

    def describe(self) -> str:
        """Say in words which sets are legal."""
        if self.shape == "single" or self.width == 1:
            return "one chip at a time"
        if self.shape == "run":
            return f"any run of 1 to {self.width} neighbouring chips"
        named = {4: "4 in a row", 8: "8 in a half", 16: "16"}
        parts = [
            f"{named[size]} ({', '.join(ranges(chips_of(mask)) for mask in self.groups(size))})"
            for size in self.sizes
            if size > 1
        ]
        return ", ".join(["1", *parts])


# Those below are functions beside the class because a cache on a method would need one cache per host.


@lru_cache(maxsize=64)
def sizes_of(topology: Topology) -> tuple[int, ...]:
    """Return the legal sizes of a topology; see Topology.sizes."""
    if topology.shape == "single":
        return (1,)
    if topology.shape == "run":
        return tuple(range(1, topology.width + 1))
    return tuple(size for size in GRID_SIZES if size <= topology.width)


@lru_cache(maxsize=1024)
def groups_of(topology: Topology, size: int) -> tuple[int, ...]:
    """Return the legal sets of one size; see Topology.groups."""
    if size not in sizes_of(topology):
        return ()
    step = size if topology.shape == "grid" else 1
    return tuple(((1 << size) - 1) << start for start in range(0, topology.width - size + 1, step))


@lru_cache(maxsize=64)
def starts_of_grid(width: int) -> dict[int, int]:
    """Return the mask of the first chips of all groups, by their size, the largest first."""
    topology = Topology("grid", width)
    return {size: sum(group & -group for group in groups_of(topology, size)) for size in reversed(sizes_of(topology))}


@lru_cache(maxsize=1 << 12)
def pick_of_grid(width: int, free: int, size: int) -> int:
    """Return the best free set of a grid; see Topology.pick.

    All groups are looked at together, as masks of their first chips. It is enough to ask whether a candidate lies in a
    wholly free larger group: it touches one at most, as the smaller groups of a grid lie within the larger ones.
    """
    starts = starts_of_grid(width)
    if size not in starts:
        return 0
    candidates = _wholly_free(free, size, starts[size])
    for larger, first in starts.items():
        if larger <= size or not candidates:
            break
        within = _wholly_free(free, larger, first) * ((1 << larger) - 1)
        candidates = candidates & ~within or candidates
    return (candidates & -candidates) * ((1 << size) - 1)


def _wholly_free(free: int, size: int, starts: int) -> int:
    """Return the mask of the first chips of the wholly free groups of a size, which is a power of two."""
    step = 1
    while step < size:
        free &= free >> step
        step *= 2
    return free & starts


@lru_cache(maxsize=1 << 12)
def pick_of(topology: Topology, free: int, size: int) -> int:
    """Return the best free set where groups overlap; see Topology.pick."""
    candidates = [group for group in groups_of(topology, size) if group & free == group]
    if len(candidates) < 2:
        return candidates[0] if candidates else 0
    for larger in reversed(sizes_of(topology)):
        if larger <= size or len(candidates) == 1:
            break
        whole = [group for group in groups_of(topology, larger) if group & free == group]
        if whole:
            broken = [sum(1 for group in whole if group & c) for c in candidates]
            least = min(broken)
            candidates = [c for c, count in zip(candidates, broken, strict=True) if count == least]
    return candidates[0]
