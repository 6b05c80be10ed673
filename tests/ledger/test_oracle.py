"""The allocator against a plain one that works with sets: every occupancy of a host, every legal size."""

import pytest

from neurond.ledger.topology import Topology

Chips = frozenset[int]


def legal_sets(topology: Topology) -> dict[int, list[Chips]]:
    """Write down the legal sets of a host by size."""
    width = topology.width
    if topology.shape == "run":
        sizes = range(1, width + 1)
        return {size: [frozenset(range(i, i + size)) for i in range(width - size + 1)] for size in sizes}
    sets = {
        1: [range(index, index + 1) for index in range(16)],
        4: [range(4), range(4, 8), range(8, 12), range(12, 16)],
        8: [range(8), range(8, 16)],
        16: [range(16)],
    }
    return {size: [frozenset(s) for s in some if max(s) < width] for size, some in sets.items()}


def best(size: int, whole: dict[int, list[Chips]]) -> Chips:
    """Choose one of the wholly free legal sets of this size; no chips if there are none.

    Best is what touches the fewest wholly free sets of the largest size, then of the next smaller, and so on; then
    what has the lowest indices.
    """
    larger = [sets for other, sets in sorted(whole.items(), reverse=True) if other > size and sets]

    def cost(chips: Chips) -> tuple[list[int], list[int]]:
        return [sum(not chips.isdisjoint(other) for other in sets) for sets in larger], sorted(chips)

    return min(whole[size], key=cost, default=frozenset())


@pytest.mark.parametrize(
    "topology",
    [
        *(Topology("grid", width) for width in (4, 8, 12, 16)),
        *(Topology("run", width) for width in (1, 2, 4, 6, 12, 16)),
    ],
    ids=lambda topology: f"{topology.shape}-{topology.width}",
)
def test_every_choice_is_the_best(topology: Topology) -> None:
    """Whatever chips are free, the allocator takes the best legal set of a size, and finds one if there is one."""
    legal = legal_sets(topology)
    sizes = [size for size, sets in legal.items() if sets]
    for mask in range(2**topology.width):
        free = {index for index in range(topology.width) if mask & 2**index}
        whole = {size: [chips for chips in sets if chips <= free] for size, sets in legal.items()}
        for size in sizes:
            picked, wanted = topology.pick(mask, size), best(size, whole)
            assert picked == sum(2**index for index in wanted), f"{size} of {sorted(free)}: best is {sorted(wanted)}"


@pytest.mark.parametrize("topology", [Topology("grid", 16), Topology("run", 16)], ids=["grid", "run"])
@pytest.mark.parametrize("size", [-1, 0, 17, 99])
def test_an_illegal_size_is_never_picked(topology: Topology, size: int) -> None:
    """A size that has no legal set gets nothing, even on an empty host."""
    assert topology.pick(2**16 - 1, size) == 0


@pytest.mark.parametrize("size", [size for size in range(17) if size not in {1, 4, 8, 16}])
def test_the_grid_has_no_sizes_between(size: int) -> None:
    """A grid gives nothing for a size between its legal ones."""
    assert Topology("grid", 16).pick(2**16 - 1, size) == 0
