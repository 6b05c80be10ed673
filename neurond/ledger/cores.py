"""NeuronCore arithmetic: which logical core ids belong to which chips.

A logical core is one or two physical cores (logical NeuronCore configuration, LNC; 2 is the default on
Trainium2). On a host, ids count through all chips: chip N of a kind with C logical cores has N*C .. N*C+C-1
(AWS's example: chips 12 and 13 of an inf1.24xlarge have cores 48-55).
"""

from collections.abc import Iterable

from neurond.ledger.words import ranges


class BadCoreList(ValueError):
    """A value of NEURON_RT_VISIBLE_CORES that the runtime would not take."""


def core_ids(chips: Iterable[int], cores_per_chip: int, lnc: int) -> list[int]:
    """Return the host-wide logical core ids of these chips, ascending.

    `cores_per_chip` counts physical cores, `lnc` the physical cores of one logical core.
    """
    logical = cores_per_chip // lnc
    return [chip * logical + core for chip in sorted(chips) for core in range(logical)]


def parse_cores(text: str) -> list[int]:
    """Read a core list as the Neuron runtime does: "4", "4-7", "0,2,4-7"; rising, no blanks.

    Raises BadCoreList with a sentence.
    """
    ids: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not (first.isascii() and first.isdigit()) or (dash and not (last.isascii() and last.isdigit())):
            raise BadCoreList(f"{text!r} is not a core list such as 4, 4-7 or 4,5,6,7")
        if len(first) > 5 or len(last) > 5:
            raise BadCoreList(f"{text!r} names cores beyond 99999")
        low, high = int(first), int(last) if dash else int(first)
        if high < low or (ids and low <= ids[-1]):
            raise BadCoreList(f"{text!r} does not rise; the runtime wants ascending core ids")
        ids.extend(range(low, high + 1))
    return ids


def contradiction(wanted: str, leased: Iterable[int]) -> str | None:
    """Say why a user's NEURON_RT_VISIBLE_CORES does not fit the leased logical cores; None if it does."""
    own = sorted(leased)
    try:
        asked = parse_cores(wanted)
    except BadCoreList as error:
        return f"NEURON_RT_VISIBLE_CORES={error}"
    beyond = sorted(set(asked) - set(own))
    if beyond:
        return (
            f"NEURON_RT_VISIBLE_CORES={wanted} names cores outside the lease, which has {ranges(own)}: "
            "unset it, or name cores of the lease"
        )
    return None
