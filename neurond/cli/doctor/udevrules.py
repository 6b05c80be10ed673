"""Which udev rule decides the mode and the group of a chip's node.

As udev(7) has it: the files of all directories are taken in the order of their names, whatever directory they are in;
of two with one name the directory that comes first counts; a link to /dev/null switches a name off. A later assignment
replaces an earlier one, unless that was final (`:=`). A group without a mode makes the mode 0660.
"""

import os
import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from neurond.cli.doctor.host import Host

LOCATIONS = "/etc", "/run", "/usr/local/lib", "/usr/lib", "/lib"
DEVICE = {"SUBSYSTEM": "neuron_device", "KERNEL": "neuron0", "ACTION": "add", "DRIVER": ""}
DEVICE |= {"SUBSYSTEMS": "neuron_device", "KERNELS": "neuron0", "DRIVERS": ""}  # it has no parent: only its own count
DEVICE["DEVPATH"] = "/devices/virtual/neuron_device/neuron0"
PART = re.compile(r'\s*,?\s*([A-Z_]+)(?:\{[^}]*\})?\s*(==|!=|:=|\+=|-=|=)\s*[ei]*"((?:\\.|[^"\\])*)"')


class Assignment(NamedTuple):
    """A rule that sets something, its file and line, and whether that is final."""

    value: str
    where: str
    final: bool


@dataclass(slots=True)
class Outcome:
    """All that is assigned, in order; and rules for chips that depend on what can't be known from the files."""

    modes: list[Assignment] = field(default_factory=list)
    groups: list[Assignment] = field(default_factory=list)
    doubtful: list[str] = field(default_factory=list)

    @property
    def mode(self) -> Assignment | None:
        """The assignment of the mode that counts."""
        return winner(self.modes)

    @property
    def group(self) -> Assignment | None:
        """The assignment of the group that counts."""
        return winner(self.groups)

    @property
    def expected(self) -> tuple[int, str]:
        """The mode and the group that a node gets; the kernel makes it 0600 root:root."""
        group = self.group.value if self.group else "root"
        if self.mode:
            return int(self.mode.value, 8), group
        return (0o660 if group not in {"root", "0"} else 0o600), group


def winner(assignments: list[Assignment]) -> Assignment | None:
    """Return the first final assignment, else the last."""
    return next((one for one in assignments if one.final), assignments[-1] if assignments else None)


def files(host: Host) -> list[str]:
    """Return the files that count, in their order. Raises OSError."""
    found: dict[str, str] = {}
    for directory in (f"{one}/udev/rules.d" for one in LOCATIONS):
        for name in host.names(directory):
            if name.endswith(".rules"):
                found.setdefault(name, f"{directory}/{name}")
    return [path for _, path in sorted(found.items()) if not _is_off(host, path)]


def _is_off(host: Host, path: str) -> bool:
    return host.path(path).is_symlink() and os.readlink(host.path(path)) == "/dev/null"


def evaluate(host: Host) -> Outcome:
    """Apply all rules to a chip that is added. Raises OSError."""
    outcome = Outcome()
    for path in files(host):
        _apply(path, host.text(path) or "", outcome)
    return outcome


def _apply(path: str, text: str, outcome: Outcome) -> None:
    label = ""
    for number, line in _lines(text):
        parts = [(key, operator, value) for key, operator, value in PART.findall(line)]
        if label:
            if ("LABEL", "=", label) in parts:
                label = ""
            continue
        matches = [_matches(*part) for part in parts if part[1] in {"==", "!="}]
        if False in matches:
            continue
        settings = [part for part in parts if part[0] in {"MODE", "GROUP"} and part[1] in {"=", ":="}]
        if None in matches:
            if settings and any(key in {"SUBSYSTEM", "KERNEL"} and "neuron" in value for key, _, value in parts):
                outcome.doubtful.append(f"{path}:{number}")
            continue
        for key, operator, value in settings:
            if key == "MODE" and not re.fullmatch(r"0?[0-7]{3,4}", value):
                continue  # udev says so in its log, and goes on
            done = Assignment(value, f"{path}:{number}", operator == ":=")
            (outcome.modes if key == "MODE" else outcome.groups).append(done)
        label = next((value for key, _, value in parts if key == "GOTO"), "")


def _matches(key: str, operator: str, value: str) -> bool | None:
    """Say whether a chip matches; None if that can't be known here."""
    if key not in DEVICE:
        return None
    found = any(fnmatchcase(DEVICE[key], pattern) for pattern in value.split("|"))
    return found == (operator == "==")


def _lines(text: str) -> list[tuple[int, str]]:
    """Return the rules with the number of the line where each begins."""
    found: list[tuple[int, str]] = []
    begun = ""
    begin = 1
    for number, line in enumerate(text.split("\n"), 1):
        if not begun:
            begin = number
        if line.lstrip().startswith("#"):
            continue
        begun += line
        if begun.endswith("\\"):
            begun = begun[:-1]
            continue
        if begun.strip():
            found.append((begin, begun))
        begun = ""
    return found
