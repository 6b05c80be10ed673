"""The instance types: what a host of each kind should have. The data is in instances.toml, made for reading."""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from neurond.ledger.topology import Shape, Topology

MOST_COPIES = 6
"""A chip's number has two digits at most."""


@dataclass(frozen=True, slots=True)
class InstanceType:
    """One EC2 instance type. `cores` are physical cores per chip, `lnc` the default number of physical cores
    in a logical one, `memory` is bytes per chip, `links` gives the neighbours of each chip by index.
    """  # noqa: D205 - one thought

    name: str
    chip: str
    chips: int
    cores: int
    lnc: int
    memory: int
    shape: Shape
    links: str
    known: bool = True

    @property
    def topology(self) -> Topology:
        """The legal sets of this type."""
        return Topology(self.shape, self.chips)

    def connected(self, index: int) -> tuple[int, ...]:
        """Return the neighbours of a chip, ascending; empty where they are not known."""
        last = self.chips - 1
        if index > last:
            return ()
        if self.links == "chain":
            near = {index - 1, index + 1} & set(range(self.chips))
        elif self.links == "ring":
            near = {index - 1 if index else last, index + 1 if index < last else 0}
        elif self.links == "torus":
            row, column = divmod(index, 4)
            near = {
                (row + 1) % 4 * 4 + column,
                (row - 1) % 4 * 4 + column,
                row * 4 + (column + 1) % 4,
                row * 4 + (column - 1) % 4,
            }
        else:
            near = set()
        return tuple(sorted(near - {index}))


@cache
def _all() -> dict[str, InstanceType]:
    data = tomllib.loads(files(__name__).joinpath("instances.toml").read_text("utf-8"))
    found = {}
    for family in data["family"].values():
        for name, size in family["sizes"].items():
            found[name] = InstanceType(
                name=name,
                chip=family["chip"],
                chips=size["chips"],
                cores=family["cores"],
                lnc=family["lnc"],
                memory=family["memory_gib"] << 30,
                shape=size.get("sets", "single"),
                links=size.get("links", "unknown"),
            )
    return found


def names() -> list[str]:
    """Return the names of all known instance types."""
    return list(_all())


def look_up(name: str) -> InstanceType:
    """Return the instance type of this name.

    A name that is not in the catalog is accepted (`known` is False): its chips are leased one at a time, and
    nothing is claimed about their cores, memory or links. For simulation only, `trn1.32xlarge*4` is a host of four
    times the chips, up to MOST_COPIES times, whose links are not known either.
    """
    unknown = InstanceType(name or "unknown", "Neuron", 1, 0, 1, 0, "single", "unknown", known=False)
    base, _, times = name.partition("*")
    if base in _all() and times.isdecimal() and 1 <= int(times) <= MOST_COPIES:
        return replace(_all()[base], name=name, chips=_all()[base].chips * int(times), links="unknown")
    return _all().get(name, unknown)
