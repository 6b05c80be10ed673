"""A simulated host: the files and nodes that the Neuron driver would make, in a directory of our own.

As root the nodes are real character devices, so that a real container engine maps them and its device cgroup really
allows one and denies another. They borrow the numbers of virtual terminals that nobody uses (4:48 to 4:63; a second
and third simulated host beside the first get 4:32 and 4:16 onwards): any process may open those, and no two chips are
the same device. A kernel without virtual terminals gets numbers that have no driver: opening such a node fails with
ENXIO where the cgroup allows it and with EPERM where it does not.
"""

import os
import shutil
import socket
import stat
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TTY_MAJOR, TTYS, BLOCKS = 4, 16, (48, 32, 16)
SPARE_MAJORS = range(239, 199, -1)


@dataclass(frozen=True, slots=True)
class Model:
    """What to simulate: the DMI product name, and for each chip its cores, its name and its neighbours."""

    product: str
    chips: int
    cores: int
    device_name: str
    connected: Callable[[int], tuple[int, ...]]


class SimulatedHost:
    """A directory `root` with `sys` and `dev` in it. What an earlier run left is taken over if it is the same model.

    `fileno` is readable after a chip was pulled or plugged.
    """

    def __init__(self, root: Path, model: Model) -> None:
        self.root = root
        self.model = model
        self.sys = root / "sys"
        self.dev = root / "dev"
        self.real_nodes = os.geteuid() == 0
        self._devices = self.sys / "devices/virtual/neuron_device"
        self._class = self.sys / "class/neuron_device"
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        dmi = self.sys / "devices/virtual/dmi/id"
        if not dmi.joinpath("product_name").exists() or dmi.joinpath("product_name").read_text() != model.product:
            self.remove_all()
            for directory in (dmi, self._devices, self._class, self.sys / "module/neuron", self.dev):
                directory.mkdir(parents=True)
            self._make_nodes_openable()
            (self.sys / "module/neuron/version").write_text("2.30.2.0\n")
            (self._class / "ultraserver_mode").write_text("\n")
            self._block = _claim_block(BLOCKS)
            (root / "block").write_text(str(self._block[0]))
            for index in range(model.chips):
                self.add(index)
            dmi.joinpath("product_name").write_text(model.product)  # last: it says that the tree is whole
        else:
            self._block = _claim_block([int((root / "block").read_text())])

    def close(self) -> None:
        """Give up the descriptors; the tree stays."""
        os.close(self._news)
        self._block[1].close()

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is news."""
        return self._news

    def drain(self) -> bool:
        """Take in the news."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._news)
        return True

    def directories(self) -> list[Path]:
        """Return the sysfs directories of all devices of the class, files that are no devices included."""
        return sorted(self._class.iterdir())

    def add(self, index: int, major: int | None = None) -> None:
        """Plug a chip, under another major if one is given. Raises FileExistsError if it is there."""
        name = f"neuron{index}"
        if (self._class / name).is_symlink():
            raise FileExistsError(f"chip {index} is plugged already")
        major, minor = (major, index) if major is not None else self._numbers(index)
        directory = self._devices / name
        (directory / "info/architecture").mkdir(parents=True)
        for path, text in {
            "dev": f"{major}:{minor}\n",
            "uevent": f"MAJOR={major}\nMINOR={minor}\nDEVNAME={name}\n",
            "core_count": str(self.model.cores),
            "connected_devices": ", ".join(map(str, self.model.connected(index))) + "\n",
            "info/serial_number": f"{index:016x}\n",
            "info/architecture/device_name": self.model.device_name + "\n",
        }.items():
            (directory / path).write_text(text)
        node = self.dev / name
        if self.real_nodes:
            os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(major, minor))
        else:
            node.touch()
        node.chmod(0o666)  # what the driver's package sets
        (self._class / name).symlink_to(Path("../../devices/virtual/neuron_device") / name)
        os.eventfd_write(self._news, 1)

    def remove(self, index: int) -> None:
        """Pull a chip: its node and its sysfs directory go. Raises FileNotFoundError if it is not there."""
        name = f"neuron{index}"
        try:
            (self._class / name).unlink()
        except FileNotFoundError:
            raise FileNotFoundError(f"chip {index} is not plugged") from None
        shutil.rmtree(self._devices / name)
        (self.dev / name).unlink(missing_ok=True)
        os.eventfd_write(self._news, 1)

    def remove_all(self) -> None:
        """Take the whole tree away."""
        if self.dev.is_mount():
            subprocess.run(["umount", "--lazy", str(self.dev)], check=True)
        with suppress(FileNotFoundError):
            shutil.rmtree(self.root)

    def _numbers(self, index: int) -> tuple[int, int]:
        if self._block[0] and index < TTYS:
            return TTY_MAJOR, self._block[0] + index
        taken = {line.split()[0] for line in _known_devices() if line[:3].strip().isdigit()}
        return next(major for major in SPARE_MAJORS if str(major) not in taken), index

    def _make_nodes_openable(self) -> None:
        """Mount a tmpfs of our own where the file system does not let device nodes be opened (/run is `nodev`)."""
        if self.real_nodes and os.statvfs(self.dev).f_flag & os.ST_NODEV:
            options = "mode=755,size=64k,dev,nosuid,noexec"
            subprocess.run(["mount", "-t", "tmpfs", "-o", options, "neurond-sim", str(self.dev)], check=True)


def _claim_block(firsts: Sequence[int]) -> tuple[int, socket.socket]:
    """Claim a block of virtual terminals for this process; return its first, or 0 if there is none to be had.

    The claim is an abstract socket's name, which the kernel takes back when the process ends.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    for first in firsts if f"{TTY_MAJOR:>3} /dev/vc/0" in _known_devices() else ():
        with suppress(OSError):
            claim.bind(f"\0neurond-simulated-{first}")
            return first, claim
    return firsts[0] if len(firsts) == 1 else 0, claim


def _known_devices() -> list[str]:
    return Path("/proc/devices").read_text("ascii").partition("Block devices:")[0].split("\n")
