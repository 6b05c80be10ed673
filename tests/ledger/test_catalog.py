"""The instance types: numbers and wiring as AWS states them."""

import pytest

from neurond.catalog import look_up, names

TYPES = {
    # name: chips, physical cores of a chip, physical cores in a logical one, GiB of a chip
    "inf1.xlarge": (1, 4, 1, 8),
    "inf1.2xlarge": (1, 4, 1, 8),
    "inf1.6xlarge": (4, 4, 1, 8),
    "inf1.24xlarge": (16, 4, 1, 8),
    "inf2.xlarge": (1, 2, 1, 32),
    "inf2.8xlarge": (1, 2, 1, 32),
    "inf2.24xlarge": (6, 2, 1, 32),
    "inf2.48xlarge": (12, 2, 1, 32),
    "trn1.2xlarge": (1, 2, 1, 32),
    "trn1.32xlarge": (16, 2, 1, 32),
    "trn1n.32xlarge": (16, 2, 1, 32),
    "trn2.3xlarge": (1, 8, 2, 96),
    "trn2.48xlarge": (16, 8, 2, 96),
    "trn2u.48xlarge": (16, 8, 2, 96),
}
TORUS = ("trn1.32xlarge", "trn1n.32xlarge", "trn2.48xlarge", "trn2u.48xlarge")


def test_all_public_types_are_there() -> None:
    """The catalog has the public types with Neuron chips, and no other."""
    assert sorted(names()) == sorted(TYPES)


@pytest.mark.parametrize(
    ("name", "chips", "cores", "lnc", "gib"), [(name, *numbers) for name, numbers in TYPES.items()]
)
def test_type_has_its_chips_cores_and_memory(name: str, chips: int, cores: int, lnc: int, gib: int) -> None:
    """A type has the number of chips, cores and bytes that AWS states."""
    kind = look_up(name)
    assert (kind.name, kind.known) == (name, True)
    assert (kind.chips, kind.cores, kind.lnc, kind.memory) == (chips, cores, lnc, gib * 2**30)
    assert kind.topology.width == chips


@pytest.mark.parametrize("name", TYPES)
def test_links_are_symmetric(name: str) -> None:
    """A chip's neighbours are other chips of the host, ascending, and have it as a neighbour too."""
    kind = look_up(name)
    for index in range(kind.chips):
        near = kind.connected(index)
        assert list(near) == sorted(set(near) - {index})
        assert all(0 <= other < kind.chips and index in kind.connected(other) for other in near)


@pytest.mark.parametrize(
    ("name", "index", "near"),
    [
        ("inf1.6xlarge", 0, (1,)),
        ("inf1.6xlarge", 2, (1, 3)),
        ("inf2.24xlarge", 0, (1,)),
        ("inf2.24xlarge", 5, (4,)),
        ("inf2.48xlarge", 0, (1, 11)),
        ("inf2.48xlarge", 11, (0, 10)),
        *((name, 0, (1, 3, 4, 12)) for name in TORUS),
        *((name, 10, (6, 9, 11, 14)) for name in TORUS),
        *((name, 15, (3, 11, 12, 14)) for name in TORUS),
    ],
)
def test_neighbours(name: str, index: int, near: tuple[int, ...]) -> None:
    """Chips of a chain, a ring and a torus have the neighbours that the driver reports."""
    assert look_up(name).connected(index) == near


@pytest.mark.parametrize("name", [name for name, numbers in TYPES.items() if numbers[0] == 1] + ["inf1.24xlarge"])
def test_no_links_are_claimed_where_none_are_known(name: str) -> None:
    """A single chip has no neighbour, and nothing is said about the wiring that no public source tells."""
    kind = look_up(name)
    assert {kind.connected(index) for index in range(kind.chips)} == {()}


@pytest.mark.parametrize("name", ["", "trn9.96xlarge", "m7i.large", "TRN1.32XLARGE"])
def test_unknown_type_is_accepted_and_claims_nothing(name: str) -> None:
    """A type that is not in the catalog leases its chips one at a time, and has no cores, memory or links."""
    kind = look_up(name)
    assert (kind.name, kind.known) == (name or "unknown", False)
    assert (kind.topology.sizes, kind.cores, kind.memory, kind.connected(0)) == ((1,), 0, 0, ())
