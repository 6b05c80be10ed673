"""What the kernel says of the chips: sysfs attributes and device nodes, read and never opened for use.

The class `neuron_device`, the names neuronN, `dev`, `uevent` and the node are made by the kernel's core and are
trusted. The driver's own attributes have moved between its versions, are root-only in some (core_count up to 2.27),
empty in others, and appear after the chip's `add` event: each is looked for by name, and what is missing is left
unknown. Opening a node would attach this process to the chip, could hang during a reset and would block a driver
upgrade, so no function here does.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from neurond.ledger.chips import Chip

CHIP_NAME = re.compile(r"neuron(0|[1-9][0-9]?)")
"""The driver makes at most 64 devices; neuron_monitor, neuron00 or neuron0.bak are no chips."""

MOST_CORES = 64
WALK_DEPTH = 4


class Sysfs:
    """The kernel's files below `sys`, with the device nodes below `dev`.

    With `stand_ins`, regular files stand for nodes: a simulated host without the right to make real ones.
    """

    def __init__(self, sys: Path = Path("/sys"), dev: Path = Path("/dev"), *, stand_ins: bool = False) -> None:
        self.sys = sys
        self.dev = dev
        self.stand_ins = stand_ins

    def product_name(self) -> str:
        """Return the instance type as the DMI tables give it, or "" (source: the driver itself reads it there)."""
        return _text(self.sys / "devices/virtual/dmi/id/product_name") or ""

    def logical_cores(self) -> int | None:
        """Return the host's logical NeuronCore configuration, if an admin has set one (1 or 2)."""
        root = self.sys.parent if self.sys.name == "sys" else Path("/")
        text = _text(root / "opt/aws/neuron/logical_nc_config")
        return int(text) if text in {"1", "2"} else None

    def why_empty(self) -> str:
        """Say why this host has no chips, and what to do."""
        if (self.sys / "module/neuron").exists():
            return (
                "the neuron module is loaded but made no device nodes: dmesg | grep -i neuron tells whether it "
                "found chips"
            )
        return (
            "the neuron kernel module is not loaded: try modprobe neuron (package aws-neuronx-dkms), and "
            "lspci -d 1d0f: tells whether the instance has chips"
        )

    def read(self, directories: Iterable[Path]) -> dict[int, Chip]:
        """Read the chips of these sysfs directories by index; names that are no chips are passed over.

        A directory that vanishes meanwhile is left out.
        """
        chips: dict[int, Chip] = {}
        for directory in directories:
            name = CHIP_NAME.fullmatch(directory.name)
            if name is None:
                continue
            chip = self._read_chip(int(name[1]), directory)
            if chip is not None:
                chips[chip.index] = chip
        return chips

    def age(self, chip: Chip) -> float:
        """Return the wall-clock time at which a chip's node was made or last changed, or 0."""
        with suppress(OSError):
            return os.stat(chip.node).st_ctime  # noqa: PTH116 - one way to stat in this module
        return 0.0

    def _read_chip(self, index: int, directory: Path) -> Chip | None:
        numbers = re.fullmatch(r"(\d{1,9}):(\d{1,9})", _text(directory / "dev") or "")
        if numbers is None:  # the device is vanishing: reading then fails with ENODEV, or there is nothing to read
            return None
        major, minor = int(numbers[1]), int(numbers[2])
        node = self.dev / directory.name
        chip = Chip(
            index,
            str(node),
            major,
            minor,
            serial=_attribute(directory, "info/serial_number") or None,
            device_name=_attribute(directory, "info/architecture/device_name") or None,
            problem=self._node_problem(node, major, minor),
        )
        return _with_links(_with_cores(chip, directory), directory)

    def _node_problem(self, node: Path, major: int, minor: int) -> str | None:
        try:
            found = node.lstat()
        except FileNotFoundError:
            return f"no node {node}"
        except OSError as error:
            return f"{node}: {error.strerror}"
        if self.stand_ins:
            return None
        if not stat.S_ISCHR(found.st_mode):
            return f"{node} is not a character device"
        numbers = os.major(found.st_rdev), os.minor(found.st_rdev)
        if numbers != (major, minor):
            return f"{node} is device {numbers[0]}:{numbers[1]}, the kernel says {major}:{minor}"
        return None


def _with_cores(chip: Chip, directory: Path) -> Chip:
    text = _attribute(directory, "core_count")
    if text:
        if text.isascii() and text.isdigit() and len(text) <= 6 and 0 < int(text) <= MOST_CORES:
            return replace(chip, cores=int(text), cores_from="sysfs")
        return replace(chip, problem=chip.problem or f"core_count reads {text[:20]!r}")
    # Root-only or empty: the core directories tell as well, if they are there.
    with suppress(OSError):
        count = sum(1 for entry in directory.iterdir() if re.fullmatch(r"neuron_core\d+", entry.name))
        if count:
            return replace(chip, cores=count, cores_from="sysfs")
    return chip


def _with_links(chip: Chip, directory: Path) -> Chip:
    text = _attribute(directory, "connected_devices")
    if not text or not re.fullmatch(r"\d{1,2}(, ?\d{1,2})*", text):
        return chip
    neighbours = tuple(sorted({int(part) for part in text.split(",")}))
    return replace(chip, connected=neighbours, connected_from="sysfs")


def _attribute(directory: Path, path: str) -> str | None:
    """Return an attribute without blanks around it: "" if it can't be read, None if there is none.

    It is looked for at its old place first, then by its name a few folders deep: driver 2.31 moved some.
    """
    text = _text(directory / path)
    if text is None:
        name = path.rpartition("/")[2]
        text = next((_text(found) for found in _walk(directory, name, WALK_DEPTH)), None)
    return text


def _walk(directory: Path, name: str, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name == name and entry.is_file(follow_symlinks=False):
            yield Path(entry.path)
    for entry in entries:
        skipped = entry.name in {"power", "subsystem", "stats"} or entry.name.startswith("neuron_core")
        if depth > 1 and not skipped and entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), name, depth - 1)


def _text(path: Path) -> str | None:
    try:
        return path.read_bytes()[:4096].decode("utf-8", "replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return ""
