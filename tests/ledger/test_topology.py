"""Which sets of chips may be leased together, and which of them are taken first."""

import pytest

from neurond.catalog import look_up
from neurond.ledger.chips import chips_of, mask_of
from neurond.ledger.errors import InvalidRequest, NoCapacity
from neurond.ledger.leases import Want
from neurond.ledger.ledger import Ledger
from neurond.ledger.topology import Topology
from neurond.ledger.words import ranges
from tests.ledger.hosts import chips, host, take

SINGLE = ("inf1.xlarge", "inf1.2xlarge", "inf2.xlarge", "inf2.8xlarge", "trn1.2xlarge", "trn2.3xlarge")
RUN = {"inf1.6xlarge": 4, "inf1.24xlarge": 16, "inf2.24xlarge": 6, "inf2.48xlarge": 12}
GRID = ("trn1.32xlarge", "trn1n.32xlarge", "trn2.48xlarge", "trn2u.48xlarge")


def legal_sets(topology: Topology) -> set[tuple[int, ...]]:
    """Try every set of chips."""
    return {chips_of(mask) for mask in range(1 << topology.width) if topology.is_legal(mask)}


@pytest.mark.parametrize("name", SINGLE)
def test_host_of_one_chip_leases_that_chip(name: str) -> None:
    """On a host with one chip, this chip is the only legal set."""
    topology = look_up(name).topology
    assert legal_sets(topology) == {(0,)}
    assert topology.sizes == (1,)


@pytest.mark.parametrize(("name", "width"), RUN.items())
def test_inferentia_leases_any_run_of_neighbours(name: str, width: int) -> None:
    """On Inferentia, of all sets of chips exactly the runs of neighbouring indices are legal."""
    topology = look_up(name).topology
    assert legal_sets(topology) == {tuple(range(a, b + 1)) for a in range(width) for b in range(a, width)}
    assert topology.sizes == tuple(range(1, width + 1))


@pytest.mark.parametrize("name", GRID)
def test_trainium_leases_one_a_row_a_half_or_all(name: str) -> None:
    """On Trainium, of all sets of chips exactly the single ones, the four rows, the two halves and all are legal."""
    topology = look_up(name).topology
    assert legal_sets(topology) == {
        *((index,) for index in range(16)),
        (0, 1, 2, 3),
        (4, 5, 6, 7),
        (8, 9, 10, 11),
        (12, 13, 14, 15),
        (0, 1, 2, 3, 4, 5, 6, 7),
        (8, 9, 10, 11, 12, 13, 14, 15),
        (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
    }
    assert topology.sizes == (1, 4, 8, 16)


@pytest.mark.parametrize("name", ["inf1.xlarge", "inf2.48xlarge", "trn1.32xlarge"])
def test_groups_are_the_legal_sets_in_ascending_order(name: str) -> None:
    """The groups of all sizes are the legal sets, each size from the lowest indices up."""
    topology = look_up(name).topology
    groups = [[chips_of(mask) for mask in topology.groups(size)] for size in range(topology.width + 2)]
    assert groups == [sorted(s for s in legal_sets(topology) if len(s) == size) for size in range(topology.width + 2)]


@pytest.mark.parametrize(
    ("name", "size", "nearest"),
    [
        ("trn1.32xlarge", 0, (1,)),
        ("trn1.32xlarge", 2, (1, 4)),
        ("trn1.32xlarge", 3, (1, 4)),
        ("trn1.32xlarge", 5, (4, 8)),
        ("trn1.32xlarge", 9, (8, 16)),
        ("trn1.32xlarge", 15, (8, 16)),
        ("trn1.32xlarge", 17, (16,)),
        ("inf2.48xlarge", 13, (12,)),
        ("inf1.xlarge", 2, (1,)),
    ],
)
def test_nearest_sizes_are_the_next_below_and_above(name: str, size: int, nearest: tuple[int, ...]) -> None:
    """The nearest sizes are the next legal one below and the next above, where there are such."""
    assert look_up(name).topology.nearest_sizes(size) == nearest


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("trn2.3xlarge", "one chip at a time"),
        ("inf2.24xlarge", "any run of 1 to 6 neighbouring chips"),
        ("trn1.32xlarge", "1, 4 in a row (0-3, 4-7, 8-11, 12-15), 8 in a half (0-7, 8-15), 16 (0-15)"),
    ],
)
def test_legal_sets_are_said_in_words(name: str, words: str) -> None:
    """A topology says in words which sets are legal."""
    assert look_up(name).topology.describe() == words


def test_two_chips_at_a_time_fill_both_sides_of_a_hole() -> None:
    """Where chip 4 is missing, 2-chip leases are (0,1), (2,3) and (5,6) in some order; chip 7 is left alone."""
    ledger = host("inf2.48xlarge", (0, 1, 2, 3, 5, 6, 7))
    assert {take(ledger, Want(count=2)).chips for _ in range(3)} == {(0, 1), (2, 3), (5, 6)}
    with pytest.raises(NoCapacity):
        take(ledger, Want(count=2))
    assert take(ledger, Want(count=1)).chips == (7,)


def test_largest_run_beside_a_hole_is_found() -> None:
    """Where chip 4 is missing, 4 chips on the empty host are 0-3."""
    assert take(host("inf2.48xlarge", (0, 1, 2, 3, 5, 6, 7)), Want(count=4)).chips == (0, 1, 2, 3)


@pytest.mark.parametrize("size", range(1, 13))
def test_no_set_spans_a_hole(size: int) -> None:
    """Whatever is asked for, no lease has chips on both sides of a missing chip."""
    ledger = host("inf2.48xlarge", (0, 1, 2, 3, 5, 6, 7))
    if size <= 4:
        granted = take(ledger, Want(count=size)).chips
        assert max(granted) < 4 or min(granted) > 4
    else:
        with pytest.raises(NoCapacity):
            take(ledger, Want(count=size))


def test_fragments_of_a_run() -> None:
    """With 1 and 4 of inf2.24xlarge held, 2 chips are 2-3 and 3 are refused, naming the chips that are free."""
    ledger = host("inf2.24xlarge")
    for index in (1, 4):
        take(ledger, Want(chips=(index,)))
    with pytest.raises(NoCapacity, match=r"3 chips asked, 4 free but not a legal set \(free: 0,2-3,5\)"):
        take(ledger, Want(count=3))
    assert take(ledger, Want(count=2)).chips == (2, 3)


@pytest.mark.parametrize(
    ("name", "free", "size"),
    [
        ("inf2.48xlarge", (0, 11), 2),
        ("inf2.48xlarge", (0, 1, 10, 11), 3),
        ("trn1.32xlarge", (0, 1, 14, 15), 4),
        ("trn1.32xlarge", (0, 1, 2, 3, 12, 13, 14, 15), 8),
        ("trn1.32xlarge", (4, 5, 6, 7, 8, 9, 10, 11), 8),
        ("trn1.32xlarge", (0, 4, 8, 12), 4),
    ],
)
def test_no_set_wraps_around(name: str, free: tuple[int, ...], size: int) -> None:
    """The closing link of a ring or torus makes no legal set, nor does a column or the middle of a grid."""
    assert look_up(name).topology.pick(mask_of(free), size) == 0


def test_chips_at_both_ends_of_a_ring_are_refused_by_number() -> None:
    """Chips 0 and 11 of inf2.48xlarge are wired to each other, but not leased together."""
    with pytest.raises(InvalidRequest, match=r"chips 0,11 are not a set that inf2\.48xlarge leases together"):
        take(host("inf2.48xlarge"), Want(chips=(11, 0)))


@pytest.mark.parametrize("size", [1, 3, 16])
def test_sixty_four_chips_are_given_in_numeric_order(size: int) -> None:
    """On an empty host of 64 chips, leases of one size go up in numbers: 10 follows 9, not 1."""
    ledger = Ledger(Topology("run", 64), "a large host")
    ledger.look(chips(range(64)), 0)
    granted = [index for _ in range(64 // size) for index in take(ledger, Want(count=size)).chips]
    assert granted == list(range(64 // size * size))


def test_chips_are_taken_in_numerically_whatever_order_they_are_found_in() -> None:
    """News of chips come in numeric order, though the directory lists 10 before 2."""
    found = chips(int(name) for name in sorted(str(index) for index in range(64)))
    events = Ledger(Topology("run", 64), "a large host").look(found, 0)
    assert [getattr(event, "chip", None) for event in events] == [found[index] for index in range(64)]


@pytest.mark.parametrize(
    ("indices", "words"),
    [((), "none"), ((7,), "7"), ((10, 9, 8, 2), "2,8-10"), ((0, 2, 3, 5), "0,2-3,5"), (range(64), "0-63")],
)
def test_ranges_are_numeric(indices: tuple[int, ...], words: str) -> None:
    """Chip indices are written in numeric order, neighbours as a range."""
    assert ranges(indices) == words


@pytest.mark.parametrize("indices", [(), (0,), (9, 10, 11), (0, 63), tuple(range(64))])
def test_masks_and_indices_are_the_same_set(indices: tuple[int, ...]) -> None:
    """A mask has bit N for chip N, and gives the indices back in numeric order."""
    assert mask_of(indices) == sum(2**index for index in indices)
    assert chips_of(mask_of(indices[::-1])) == indices
