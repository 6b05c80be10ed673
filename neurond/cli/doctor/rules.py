"""Which udev rule gives a chip's node its mode and group, read from the rules files as udev orders them (udev(7))."""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from neurond.cli.doctor.findings import Host

DIRECTORIES = (
    "/etc/udev/rules.d",
    "/run/udev/rules.d",
    "/usr/local/lib/udev/rules.d",
    "/usr/lib/udev/rules.d",
    "/lib/udev/rules.d",
)
"""A file in an earlier directory replaces one of the same name in a later one."""
CHIP = {"SUBSYSTEM": "neuron_device", "KERNEL": "neuron0", "ACTION": "add"}
_TOKEN = re.compile(r'\s*([A-Z_]+(?:\{[^}]*\})?)\s*(==|!=|\+=|-=|:=|=)\s*"((?:[^"\\]|\\.)*)"\s*,?')


@dataclass(frozen=True, slots=True)
class Assigned:
    """A value and the file:line whose rule gave it; `final` values can't be changed by later rules."""

    value: str
    where: str
    final: bool


def winning(host: Host) -> dict[str, Assigned]:
    """Return what the rules assign to MODE and GROUP of a chip's node.

    A rule with a condition that can't be decided from the files (ENV, ATTR, PROGRAM and so on) is passed over.
    """
    files: dict[str, str] = {}
    for directory in DIRECTORIES:
        for name in host.names(directory):
            if name.endswith(".rules"):
                files.setdefault(name, f"{directory}/{name}")
    found: dict[str, Assigned] = {}
    for _, path in sorted(files.items()):
        for number, line in _lines(host.text(path) or ""):
            _apply(line, f"{path}:{number}", found)
    return found


def _lines(text: str) -> list[tuple[int, str]]:
    lines: list[tuple[int, str]] = []
    begun: tuple[int, str] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#"):
            continue
        start, before = begun or (number, "")
        if line.endswith("\\"):
            begun = start, before + line[:-1]
        else:
            begun = None
            lines.append((start, before + line))
    return lines


def _apply(line: str, where: str, found: dict[str, Assigned]) -> None:
    tokens = _TOKEN.findall(line)
    conditions = [token for token in tokens if token[1] in {"==", "!="}]
    if not any(key in {"SUBSYSTEM", "KERNEL"} for key, _, _ in conditions):
        return
    for key, operator, pattern in conditions:
        if key not in CHIP:
            return
        if (operator == "==") != any(fnmatchcase(CHIP[key], part) for part in pattern.split("|")):
            return
    for key, operator, value in tokens:
        if key in {"MODE", "GROUP"} and operator in {"=", ":="} and not (key in found and found[key].final):
            found[key] = Assigned(value, where, operator == ":=")
