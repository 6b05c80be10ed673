"""`--device /dev/neuronN`: a chip that is asked for as a device is."""

from __future__ import annotations

import os

from neurond.cli import USAGE, Exit


class Device:
    """What one `--device /dev/neuronN` asks for: the chip, its path inside, the permissions ("": not given)."""

    __slots__ = ("chip", "inside", "permissions")

    def __init__(self, chip: int, inside: str, permissions: str) -> None:
        self.chip = chip
        self.inside = inside
        self.permissions = permissions

    @property
    def plain(self) -> bool:
        """Tell whether it is as neurond would map the chip anyway."""
        return self.inside == f"/dev/neuron{self.chip}" and self.permissions in {"", "rw"}


def chip_device(value: str) -> Device | None:
    """Return what a value of --device asks for, None if it is no chip. Raises Exit for a pattern: docker has none."""
    path, *rest = value.split(":")
    if path.startswith("/"):
        path = "/" + os.path.normpath(path).lstrip("/")
    number = path.removeprefix("/dev/neuron")
    if path.upper() == "ALL" or (number != path and any(letter in number for letter in "*?[{-,")):
        raise Exit(
            USAGE, f"--device {value}: docker takes one device at a time; ask for chips with -n N or --chips 0-3"
        )
    if number == path or not (number.isascii() and number.isdigit()) or str(int(number)) != number or len(rest) > 2:
        return None
    if len(rest) == 1 and rest[0] and set(rest[0]) <= set("rwm"):
        rest.insert(0, "")
    inside, permissions = (*rest, "", "")[:2]
    return Device(int(number), inside or path, permissions)
