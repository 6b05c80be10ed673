"""Which chips a container may open, by what it was given: nodes, directories, rules, names."""

import os
from contextlib import suppress

from neurond.daemon import labels
from neurond.host import cdi
from neurond.host.docker import Container
from neurond.ledger.ledger import Ledger


def chips_in(ledger: Ledger, container: Container, home: str) -> list[int]:
    """Return the chips that a container may open: by its device nodes, whatever they are called on the host or in it,
    a directory of them, a rule of its device cgroup, or a CDI name of a lease.
    """  # noqa: D205 - one sentence
    numbers = {(chip.major, chip.minor): index for index, chip in ledger.chips.items()}
    by_path = {chip.node: index for index, chip in ledger.chips.items()}
    found = {by_path[path] for path in container.devices if path in by_path}
    for path in container.devices:
        found |= {numbers[device] for device in _devices_at(path) if device in numbers}
    for rule in container.cgroup_rules:
        found |= {index for device, index in numbers.items() if allows(rule, device)}
    for name in container.cdi:
        kind, _, lease_id = name.partition("=")
        lease = ledger.leases.get(lease_id) if kind == cdi.KIND else None
        if lease is not None:
            found |= set(lease.chips)
        elif kind == cdi.KIND and container.labels.get(labels.HOME) == home:  # else it is another daemon's lease
            found |= {int(chip) for chip in container.labels.get(labels.CHIPS, "").split(",") if chip.isdecimal()}
    return sorted(found & ledger.chips.keys())


def allows(rule: str, device: tuple[int, int]) -> bool:
    """Tell whether a rule such as "c 240:* rwm" lets a container open this character device."""
    kind, _, rest = rule.strip().partition(" ")
    numbers, _, rights = rest.partition(" ")
    if kind == "a":
        return True
    major, _, minor = numbers.partition(":")
    said = zip((major, minor), device, strict=True)
    matches = all(text == "*" or text.lstrip("0") == str(number).lstrip("0") for text, number in said)  # 004 is 4
    return kind == "c" and matches and bool({"r", "w"} & set(rights))


def _devices_at(path: str) -> set[tuple[int, int]]:
    """Return the numbers of a device, or of all devices in a directory, which docker maps all."""
    paths = [path]
    if os.path.isdir(path):  # noqa: PTH112 - as everywhere for devices
        paths = [os.path.join(at, name) for at, _, names in os.walk(path) for name in names]  # noqa: PTH118
    found = set()
    for one in paths:
        with suppress(OSError):
            device = os.stat(one).st_rdev  # noqa: PTH116
            found.add((os.major(device), os.minor(device)))
    return found
