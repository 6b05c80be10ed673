"""NeuronCore arithmetic, and what a user may have set NEURON_RT_VISIBLE_CORES to."""

import pytest

from neurond.catalog import look_up
from neurond.ledger.cores import BadCoreList, contradiction, core_ids, parse_cores


@pytest.mark.parametrize(
    ("name", "chips", "cores"),
    [
        ("inf1.24xlarge", (12, 13), range(48, 56)),
        ("inf2.48xlarge", range(6, 12), range(12, 24)),
        ("trn1.32xlarge", (0,), range(2)),
        ("trn1.32xlarge", range(16), range(32)),
        ("trn2.48xlarge", (1,), range(4, 8)),
        ("trn2.48xlarge", range(12, 16), range(48, 64)),
    ],
)
def test_cores_count_through_all_chips_of_the_host(name: str, chips: tuple[int, ...], cores: range) -> None:
    """Logical core ids count from the first chip of the host on, with the type's default of logical cores."""
    kind = look_up(name)
    assert core_ids(chips, kind.cores, kind.lnc) == list(cores)


@pytest.mark.parametrize(("lnc", "cores"), [(1, range(8, 16)), (2, range(4, 8))])
def test_logical_cores_are_one_or_two_physical_ones(lnc: int, cores: range) -> None:
    """With 2 physical cores in a logical one, a Trainium2 chip has 4 logical cores, else 8."""
    assert core_ids((1,), 8, lnc) == list(cores)


def test_cores_are_ascending_and_leave_out_other_chips() -> None:
    """The ids rise whatever order the chips are in, and skip the cores of chips that are not among them."""
    assert core_ids((10, 9, 2), 2, 1) == [4, 5, 18, 19, 20, 21]


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("4", [4]),
        ("4-5", [4, 5]),
        ("4,5", [4, 5]),
        ("4-4", [4]),
        ("0,2,4-7", [0, 2, 4, 5, 6, 7]),
        ("9,10", [9, 10]),
        ("0-31", list(range(32))),
    ],
)
def test_core_lists_are_read_as_the_runtime_reads_them(text: str, cores: list[int]) -> None:
    """Single ids, ranges and lists of both are read."""
    assert parse_cores(text) == cores


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "'' is not a core list"),
        ("4, 5", "'4, 5' is not a core list"),
        (" 4", "' 4' is not a core list"),
        ("nc4", "'nc4' is not a core list"),
        ("4-", "'4-' is not a core list"),
        ("-4", "'-4' is not a core list"),
        ("4-5-6", "'4-5-6' is not a core list"),
        ("4,", "'4,' is not a core list"),
        ("+4", "'\\+4' is not a core list"),
        ("٤", "'٤' is not a core list"),
        ("5-4", "'5-4' does not rise"),
        ("5,4", "'5,4' does not rise"),
        ("4,4", "'4,4' does not rise"),
        ("4-6,5", "'4-6,5' does not rise"),
        ("0-100000", "'0-100000' names cores beyond 99999"),
    ],
)
def test_other_core_lists_are_refused_with_a_sentence(text: str, sentence: str) -> None:
    """What the runtime would not take is refused, and the sentence quotes it."""
    with pytest.raises(BadCoreList, match=f"^{sentence}"):
        parse_cores(text)


@pytest.mark.parametrize("value", ["4", "5", "4-5", "4,5"])
def test_value_within_the_lease_is_no_contradiction(value: str) -> None:
    """A user may name all cores of the lease, or some of them."""
    assert contradiction(value, [5, 4]) is None


@pytest.mark.parametrize("value", ["0-31", "3-4", "5,6", "0"])
def test_value_beyond_the_lease_is_a_contradiction(value: str) -> None:
    """A value that names a core outside the lease is refused with both in the sentence."""
    assert contradiction(value, [4, 5]) == (
        f"NEURON_RT_VISIBLE_CORES={value} names cores outside the lease, which has 4-5: "
        "unset it, or name cores of the lease"
    )


@pytest.mark.parametrize("value", ["5-4", "", "4, 5", "nc4"])
def test_value_that_is_no_core_list_is_a_contradiction(value: str) -> None:
    """A value that the runtime would not take does not fit any lease, and the sentence quotes it."""
    assert str(contradiction(value, [4, 5])).startswith(f"NEURON_RT_VISIBLE_CORES={value!r} ")
