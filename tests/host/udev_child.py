"""A process that has umockdev's test bed in place of /sys and /dev: `python -m tests.host.udev_child SCENARIO`.

Each scenario prints what it saw as JSON; test_udev.py says what it should have been. umockdev works by LD_PRELOAD,
hence a process of its own.
"""

import asyncio
import ctypes
import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyudev
import uvloop

from neurond import catalog
from neurond.daemon import discovery
from neurond.daemon.discovery import Discovery
from neurond.host.sysfs import Sysfs
from neurond.host.udev import Udev
from neurond.ledger.chips import Chip

KIND = catalog.look_up("inf2.24xlarge")
SHORT_SETTLE = 0.3


class Bed:
    """umockdev's test bed, through its C library."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libumockdev.so.0")
        self._lib.umockdev_testbed_new.restype = ctypes.c_void_p
        self._lib.umockdev_testbed_get_root_dir.restype = ctypes.c_char_p
        self._bed = ctypes.c_void_p(self._lib.umockdev_testbed_new())
        self._root = Path(self._lib.umockdev_testbed_get_root_dir(self._bed).decode())

    def make(self, name: str, major: int, minor: int, *attributes: str) -> None:
        """Make a device of the class without telling anybody."""
        lines = (
            f"P: /devices/virtual/neuron_device/{name}",
            f"E: MAJOR={major}",
            f"E: MINOR={minor}",
            "E: SUBSYSTEM=neuron_device",
            f"A: dev={major}:{minor}\\n",
            *(f"A: {attribute}" for attribute in attributes),
        )
        text = "\n".join(lines).encode() + b"\n"
        if not self._lib.umockdev_testbed_add_from_string(self._bed, text, None):
            raise RuntimeError(f"umockdev did not take {text!r}")
        # Without DEVNAME umockdev makes no node; 0.17 aborts when it makes one again. Any file, and its numbers:
        (self._root / "dev/.node").mkdir(parents=True, exist_ok=True)
        (self._root / "dev" / name).touch()
        (self._root / "dev/.node" / name).symlink_to(f"{major}:{minor}")

    def add(self, index: int, *attributes: str, major: int = 239) -> None:
        """Plug a chip."""
        self.make(f"neuron{index}", major, index, *attributes)
        self.tell(index, "add")

    def remove(self, index: int) -> None:
        """Pull a chip."""
        self.tell(index, "remove")
        self.vanish(index)

    def vanish(self, index: int) -> None:
        """Pull a chip without telling anybody."""
        self._lib.umockdev_testbed_remove_device(self._bed, self._path(index))
        for directory in ("dev", "dev/.node"):
            (self._root / directory / f"neuron{index}").unlink(missing_ok=True)

    def tell(self, index: int, action: str) -> None:
        """Send a uevent."""
        self._lib.umockdev_testbed_uevent(self._bed, self._path(index), action.encode())

    def set(self, index: int, attribute: str, text: str) -> None:
        """Write an attribute."""
        self._lib.umockdev_testbed_set_attribute(self._bed, self._path(index), attribute.encode(), text.encode())

    def _path(self, index: int) -> bytes:
        return f"/sys/devices/virtual/neuron_device/neuron{index}".encode()


def readable(udev: Udev) -> bool:
    """Tell whether there is news."""
    return bool(select.select([udev.fileno()], [], [], 0.2)[0])


def told(chips: dict[int, Chip]) -> dict[str, list[Any]]:
    """Return what matters of chips, in JSON's types."""
    return {
        str(index): [chip.major, chip.cores, chip.cores_from, list(chip.connected), chip.problem]
        for index, chip in chips.items()
    }


def start(bed: Bed, *indices: int) -> tuple[Udev, Discovery]:
    """Plug chips, and begin to watch and to look as the daemon does."""
    for index in indices:
        bed.add(index, "core_count=2", "connected_devices=0, 2\\n")
    udev = Udev()
    return udev, Discovery(udev, Sysfs(), KIND, period=1000)


def listing(bed: Bed) -> Any:
    """List chips, and things that are none."""
    bed.make("neuron_monitor", 239, 40)
    bed.make("neuron0.bak", 239, 41)
    udev, looking = start(bed, 10, 2, 0)
    names = sorted(path.name for path in udev.directories())
    return {"names": names, "chips": told(looking.look()[0])}


def hotplug(bed: Bed) -> Any:
    """Add, remove and add again under another major."""
    udev, looking = start(bed, 0, 1)
    steps: tuple[Callable[[], None], ...] = (
        lambda: None,
        lambda: bed.add(2, "core_count=2"),
        lambda: bed.remove(1),
        lambda: bed.add(1, "core_count=2", major=240),
    )
    seen = []
    for step in steps:
        step()
        news, whole, again = readable(udev), udev.drain(), readable(udev)
        majors = {str(index): chip.major for index, chip in looking.look()[0].items()}
        seen.append([news, whole, again, majors])
    return seen


def late(bed: Bed) -> Any:
    """Add chips whose files come later, or never."""
    discovery.SETTLE = SHORT_SETTLE
    _, looking = start(bed, 0)
    bed.add(1)
    bed.add(2)
    bed.add(3, "core_count=many")
    first, unsettled = looking.look()
    bed.set(1, "core_count", "4")
    second, still_unsettled = looking.look()
    time.sleep(SHORT_SETTLE)
    third, never_settled = looking.look()
    bed.set(2, "core_count", "2")
    return {
        "first": [told(first), unsettled],
        "second": [told(second), still_unsettled],
        "third": [told(third), never_settled],
        "fourth": told(looking.look()[0]),
    }


def late_again(bed: Bed) -> Any:
    """Add a chip again, under the same numbers, before its files are there."""
    _, looking = start(bed, 0, 1)
    before, _ = looking.look()
    bed.remove(1)
    gone, _ = looking.look()
    bed.add(1)
    after, unsettled = looking.look()
    return [sorted(before), sorted(gone), sorted(after), unsettled]


def vanishing(bed: Bed) -> Any:
    """Pull a chip between listing and reading, and another in the middle of the listing."""
    udev, _ = start(bed, 0, 1, 2, 3)
    listed = udev.directories()
    bed.vanish(1)
    read = Sysfs().read(listed)
    original = pyudev.Devices.from_sys_path
    pulled = [2]

    def pull_and_look_up(context: pyudev.Context, path: str) -> pyudev.Device:
        if pulled:
            bed.vanish(pulled.pop())
        return original(context, path)

    pyudev.Devices.from_sys_path = pull_and_look_up
    names = sorted(path.name for path in udev.directories())
    return [sorted(read), names]


def burst(bed: Bed) -> Any:
    """Send a thousand events in all, look now and then, and after the last."""
    udev, looking = start(bed, 0, 1, 2)
    for turn in range(250):
        bed.remove(1)
        bed.add(1, "core_count=2", major=240)
        bed.tell(2, "change")
        bed.tell(0, "change")
        udev.drain()  # often: umockdev aborts when a queue of ten is full
        if turn % 25 == 0:
            looking.look()
    bed.remove(0)
    udev.drain()
    chips, unsettled = looking.look()
    quiet = not readable(udev)
    bed.add(5, "core_count=2")
    return {"chips": told(chips), "unsettled": unsettled, "quiet": quiet, "hears": readable(udev)}


class DeadMonitor:
    """A monitor that has failed: its descriptor is readable, and reading fails."""

    def __init__(self) -> None:
        self._socket, self._other = socket.socketpair()
        self._other.close()

    def fileno(self) -> int:
        """Return a descriptor that is readable."""
        return self._socket.fileno()

    def poll(self, timeout: float) -> None:
        """Fail as pyudev does."""
        self._socket.close()
        raise OSError(f"Error while polling fd, timeout {timeout}")


def dead_monitor(bed: Bed) -> Any:
    """Let reading fail: of a stand-in, and of the real monitor whose socket is none any more."""
    udev, looking = start(bed, 0)
    seen = []
    for index in (1, 2):
        if index == 1:
            udev._monitor = DeadMonitor()
        else:
            broken = os.open("/", os.O_RDONLY)
            os.dup2(broken, udev.fileno())
            os.close(broken)
        noticed = not udev.drain()
        bed.add(index, "core_count=2")
        seen.append([noticed, readable(udev), udev.drain(), sorted(looking.look()[0])])
    return seen


def follow(bed: Bed) -> Any:
    """Follow the chips in the daemon's kind of loop, with a monitor that dies."""

    async def run() -> list[list[int]]:
        udev = Udev()
        udev._monitor = DeadMonitor()
        taken: asyncio.Queue[list[int]] = asyncio.Queue()
        looking = Discovery(udev, Sysfs(), KIND, period=1000)
        following = asyncio.create_task(looking.follow(lambda chips: taken.put_nowait(sorted(chips))))
        seen = [await asyncio.wait_for(taken.get(), 10)]
        changes: tuple[Callable[[], None], ...] = (lambda: bed.add(3, "core_count=2"), lambda: bed.remove(0))
        for change in changes:
            change()
            seen.append(await asyncio.wait_for(taken.get(), 10))
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        return seen

    bed.add(0, "core_count=2")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


SCENARIOS: dict[str, Callable[[Bed], Any]] = {
    scenario.__name__: scenario
    for scenario in (listing, hotplug, late, late_again, vanishing, burst, dead_monitor, follow)
}


def main() -> None:
    """Run one scenario and print what it saw."""
    print(json.dumps(SCENARIOS[sys.argv[1]](Bed())), flush=True)
    os._exit(0)  # umockdev's threads would be waited for


if __name__ == "__main__":
    main()
