"""Chips that vanish, appear, and come back as another device."""

import asyncio
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from neurond import catalog
from neurond.daemon.discovery import Discovery
from neurond.host.simulated import Model, SimulatedHost
from neurond.host.sysfs import Sysfs
from tests.daemon.support import ME, Raw, node_of
from tests.harness import PATIENCE, Daemon, eventually

Connect = Callable[[], Raw]


def simulate(daemon: Daemon, *arguments: str) -> None:
    """Pull or plug a chip with the command line."""
    done = daemon.cli("simulate", *arguments)
    assert done.returncode == 0, done.stderr


def test_a_pulled_chip_is_gone(daemon: Daemon) -> None:
    """A chip that is pulled is listed no more and can't be leased; plugged again, it can."""
    simulate(daemon, "remove", "3")
    eventually(lambda: 3 not in daemon.states())
    assert len(daemon.states()) == 15
    refused = daemon.cli("acquire", "--chips", "3", "--ttl", "1m")
    assert refused.returncode == 66
    assert "no chip 3 on this host (have 0-2,4-15)" in refused.stderr
    simulate(daemon, "add", "3")
    eventually(lambda: daemon.states().get(3) == "free")
    assert daemon.cli("acquire", "--chips", "3", "--ttl", "1m").returncode == 0


def test_a_hole_is_led_around(daemon: Daemon) -> None:
    """Where a chip is missing, a count is served from the rows that are whole."""
    simulate(daemon, "remove", "1")
    eventually(lambda: 1 not in daemon.states())
    assert daemon.call("Acquire", count=4, ttl=60)["chips"] == [4, 5, 6, 7]
    assert daemon.call("Acquire", count=1, ttl=60)["chips"] == [0]


@pytest.mark.parametrize(("action", "chip"), [("remove", 3), ("add", 4)], ids=["pull twice", "plug twice"])
def test_what_is_done_is_not_done_again(daemon: Daemon, action: str, chip: int) -> None:
    """A chip that is pulled can't be pulled, one that is plugged can't be plugged: exit code 66."""
    simulate(daemon, "remove", "3")
    done = daemon.cli("simulate", action, str(chip))
    assert done.returncode == 66
    assert f"chip {chip} is " in done.stderr


@pytest.mark.parametrize("chip", [-1, 64])
def test_a_chip_beyond_all_drivers_is_refused(daemon: Daemon, chip: int) -> None:
    """Chips have the numbers 0 to 63."""
    done = daemon.cli("simulate", "add", "--", str(chip))
    assert done.returncode == 66
    assert f"no chip {chip}: the driver knows chips 0 to 63" in done.stderr


@pytest.mark.root
def test_a_chip_comes_back_under_another_major(daemon: Daemon) -> None:
    """After a driver upgrade a chip has another major number: the daemon says the new one, which the node has too."""
    simulate(daemon, "remove", "2")
    simulate(daemon, "add", "2", "--major", "241")
    eventually(lambda: daemon.call("ListChips")["chips"][2]["device"] == "241:2")
    status = os.stat(node_of(daemon, 2))  # noqa: PTH116 - a device number is an os matter
    assert stat.S_ISCHR(status.st_mode)
    assert (os.major(status.st_rdev), os.minor(status.st_rdev)) == (241, 2)
    assert daemon.states()[2] == "free"


def test_a_leased_chip_that_vanishes_is_lost_and_comes_back_leased(daemon: Daemon, connect: Connect) -> None:
    """A chip that vanishes while leased stays that lease's: it is lost, then leased again, and never given away."""
    holder = connect()
    lease = holder.ask("Acquire", chips=[0, 1, 2, 3])["lease"]
    simulate(daemon, "remove", "1")
    eventually(lambda: daemon.states()[1] == "lost")
    (row,) = daemon.leases()
    assert (row["state"], row["chips"], row["lost"]) == ("active", [0, 1, 2, 3], [1])
    listed = daemon.cli("ls", "1").stdout.splitlines()[1].split()
    assert listed[:4] == ["1", "lost", lease, ME]
    assert "lost: 1" in daemon.cli("ps").stdout
    simulate(daemon, "add", "1")
    eventually(lambda: daemon.states()[1] == "leased")
    refused = daemon.cli("acquire", "--chips", "1", "--no-wait", "--ttl", "1m")
    assert refused.returncode == 75
    assert lease in refused.stderr
    holder.close()
    eventually(daemon.all_free)
    assert len(daemon.states()) == 16


def test_a_lost_chip_is_gone_with_its_lease(daemon: Daemon, connect: Connect) -> None:
    """When the lease of a vanished chip ends, the chip is listed no more, and the others are free."""
    holder = connect()
    holder.ask("Acquire", count=4)
    simulate(daemon, "remove", "0")
    eventually(lambda: daemon.states()[0] == "lost")
    holder.close()
    eventually(daemon.all_free)
    assert sorted(daemon.states()) == list(range(1, 16))


def test_a_host_without_chips_says_so(daemon: Daemon) -> None:
    """When the last chip is pulled, lists are empty with a note, and a request is refused with that note."""
    for chip in range(16):
        daemon.call("Simulate", chip=chip, action="remove")
    eventually(lambda: daemon.states() == {})
    listed = daemon.cli("ls")
    assert (listed.returncode, listed.stdout) == (0, "")
    assert "this host has no Neuron chips" in listed.stderr
    refused = daemon.cli("run", "-n", "1", "true")
    assert refused.returncode == 75
    assert "this host has no Neuron chips" in refused.stderr


@pytest.mark.root
def test_a_node_that_is_another_device_quarantines_its_chip(daemon: Daemon) -> None:
    """A chip whose node is not the device that the kernel names is quarantined with the reason; the others go on."""
    node = Path(node_of(daemon, 5))
    node.unlink()
    os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    simulate(daemon, "remove", "15")  # news, upon which the daemon looks at all of them
    eventually(lambda: daemon.states()[5] == "quarantined")
    assert "is device 1:3, the kernel says" in daemon.cli("ls", "5").stdout
    refused = daemon.cli("acquire", "--chips", "5", "--ttl", "1m", "--no-wait")
    assert refused.returncode == 75
    assert "withheld: 5 (" in refused.stderr
    assert daemon.call("Acquire", count=1, ttl=60)["chips"] == [4]


class Silent:
    """The chips of a simulated host, without any news of them."""

    def __init__(self, host: SimulatedHost) -> None:
        self.directories = host.directories
        self.silence = os.eventfd(0, os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return a descriptor that is never readable."""
        return self.silence

    def drain(self) -> bool:
        """Never called."""
        raise NotImplementedError


def test_the_periodic_look_finds_what_no_news_told(run_dir: Path) -> None:
    """Chips that vanish or appear without any news are noticed by the periodic look."""
    kind = catalog.look_up("trn1.2xlarge")
    host = SimulatedHost(run_dir / "sim", Model(kind.name, kind.chips, kind.cores, kind.chip, kind.connected))
    silent = Silent(host)
    seen: list[list[int]] = []

    async def follow() -> None:
        sysfs = Sysfs(host.sys, host.dev, stand_ins=not host.real_nodes)
        discovery = Discovery(silent, sysfs, kind, period=0.02)
        following = asyncio.create_task(discovery.follow(lambda chips: seen.append(sorted(chips))))
        async with asyncio.timeout(PATIENCE):
            for change, expected in ((None, [0]), (host.remove, []), (host.add, [0])):
                if change is not None:
                    change(0)
                seen.clear()
                while expected not in seen:  # noqa: ASYNC110 - what is tested is that nobody tells
                    await asyncio.sleep(0.01)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    try:
        asyncio.run(follow())
    finally:
        os.close(silent.silence)
        os.close(host.fileno())
        host._block[1].close()
        host.remove_all()
