"""Chips that go and come while they are leased, waited for or looked at: a whole driver upgrade, and broken nodes."""

import os
import random
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from neurond.client import Client, NeurondError
from tests.daemon import support
from tests.daemon.support import NEURON, Raw, as_nobody, holding, node_of, wait_in_line
from tests.daemon.test_abuse import fds, followed, rss
from tests.harness import Daemon, eventually

Connect = Callable[[], Raw]

pytestmark = pytest.mark.root

ROUNDS, LONGEST = 10_000, 8.0
OTHER_MAJOR = 241
LOOK = 15
"""The chip that is pulled and plugged where a test wants the daemon to look at all of them."""


@pytest.fixture
def shared(run_dir: Path) -> Iterator[Daemon]:
    """Give a daemon on a host with a group neuron, and whose socket anyone may open."""
    with support.with_group_neuron(run_dir) as daemon:
        daemon.socket.chmod(0o666)
        run_dir.chmod(0o755)
        yield daemon


def pull(daemon: Daemon, *chips: int) -> None:
    """Pull these chips, and wait until the daemon has seen it."""
    for chip in chips:
        daemon.call("Simulate", chip=chip, action="remove")
    eventually(lambda: all(daemon.states().get(chip, "lost") == "lost" for chip in chips))


def plug(daemon: Daemon, *chips: int, major: int | None = None) -> None:
    """Plug these chips, and wait until the daemon has seen it."""
    for chip in chips:
        daemon.call("Simulate", chip=chip, action="add", major=major)
    eventually(lambda: all(daemon.states().get(chip, "lost") != "lost" for chip in chips))


def look(daemon: Daemon) -> None:
    """Have the daemon look at all chips, as news from udev would."""
    pull(daemon, LOOK)
    plug(daemon, LOOK)


def chip(daemon: Daemon, index: int) -> dict[str, Any]:
    """Return what is listed of a chip."""
    listed = daemon.call("ListChips")["chips"]
    return next(each for each in listed if each["neuron_device"] == index)


def held_by_daemon(daemon: Daemon) -> set[tuple[int, int]]:
    """Return the numbers of the devices that the daemon itself has open."""
    held = set()
    for entry in Path(f"/proc/{daemon.pid}/fd").iterdir():
        with suppress(OSError):
            status = entry.stat()
            if stat.S_ISCHR(status.st_mode):
                held.add((os.major(status.st_rdev), os.minor(status.st_rdev)))
    return held


def numbers(daemon: Daemon) -> set[tuple[int, int]]:
    """Return the numbers of all chips."""
    split = [each["device"].split(":") for each in daemon.call("ListChips")["chips"]]
    return {(int(major), int(minor)) for major, minor in split}


def is_refused(daemon: Daemon, index: int) -> bool:
    """Tell whether a chip is refused to somebody who asks for it now."""
    try:
        lease = daemon.call("Acquire", chips=[index], ttl=60)["lease"]
    except NeurondError as error:
        return error.kind in {"NoCapacity", "NoSuchChip"}
    daemon.call("Release", lease=lease)
    return False


# -- the whole driver -----------------------------------------------------------------------------------------------


def test_a_driver_upgrade_without_leases(daemon: Daemon) -> None:
    """All chips go and come back under another major: the daemon holds none of them open, and all are free again."""
    with followed(daemon):
        assert not held_by_daemon(daemon) & numbers(daemon)
        pull(daemon, *range(16))
        assert daemon.states() == {}
        plug(daemon, *range(16), major=OTHER_MAJOR)
        eventually(lambda: set(daemon.states().values()) == {"free"})
        assert numbers(daemon) == {(OTHER_MAJOR, index) for index in range(16)}
        assert not held_by_daemon(daemon) & numbers(daemon)
        assert daemon.call("Acquire", all=True)["chips"] == list(range(16))


def test_a_leased_chip_comes_back_under_other_numbers(daemon: Daemon, connect: Connect) -> None:
    """A leased chip that vanishes and returns under other numbers is its holder's, and free when the lease ends."""
    holder = connect()
    with followed(daemon):
        holder.ask("Acquire", chips=[2])
        pull(daemon, 2)
        assert is_refused(daemon, 2)
        plug(daemon, 2, major=OTHER_MAJOR)
        assert (chip(daemon, 2)["state"], chip(daemon, 2)["device"]) == ("leased", f"{OTHER_MAJOR}:2")
        assert is_refused(daemon, 2)
        holder.close()
        eventually(daemon.all_free)
        assert not is_refused(daemon, 2)


def test_a_driver_upgrade_under_a_lease(daemon: Daemon, connect: Connect) -> None:
    """A lease that lives through a driver upgrade is lost meanwhile, then right; nobody else gets its chips before."""
    holder, other = connect(), connect()
    with followed(daemon):
        lease = holder.ask("Acquire", chips=[0, 1, 2, 3])["lease"]
        pull(daemon, *range(16))
        assert daemon.states() == dict.fromkeys(range(4), "lost")
        assert daemon.leases()[0]["lost"] == [0, 1, 2, 3]
        plug(daemon, *reversed(range(16)), major=OTHER_MAJOR)
        wanted = dict.fromkeys(range(4), "leased") | dict.fromkeys(range(4, 16), "free")
        eventually(lambda: daemon.states() == wanted)
        assert {each["device"] for each in daemon.call("ListChips")["chips"][:4]} == {
            f"{OTHER_MAJOR}:{index}" for index in range(4)
        }
        assert all(is_refused(daemon, index) for index in range(4))
        assert other.ask("Acquire", chips=list(range(4, 8)))["chips"] == [4, 5, 6, 7]
        assert daemon.leases()[0]["lease"] == lease
        holder.close()
        eventually(lambda: set(list(daemon.states().values())[:4]) == {"free"})
        assert daemon.call("Acquire", chips=[0, 1, 2, 3])["chips"] == [0, 1, 2, 3]


def test_a_chip_that_is_still_open_comes_back_under_other_numbers(daemon: Daemon) -> None:
    """A leased chip that is open, vanishes and returns under other numbers is given to nobody while it is open."""
    with followed(daemon):
        lease = daemon.call("Acquire", chips=[2], ttl=600)["lease"]
        with holding(node_of(daemon, 2)):
            pull(daemon, 2)
            assert is_refused(daemon, 2)
            plug(daemon, 2, major=OTHER_MAJOR)
            assert (chip(daemon, 2)["state"], chip(daemon, 2)["device"]) == ("leased", f"{OTHER_MAJOR}:2")
            daemon.call("Release", lease=lease)
            daemon.call("Check")
            assert is_refused(daemon, 2)
        eventually(daemon.all_free)
        assert not is_refused(daemon, 2)


# -- late, and without end ------------------------------------------------------------------------------------------


def test_chips_that_arrive_out_of_order_serve_a_row_when_it_is_whole(daemon: Daemon, connect: Connect) -> None:
    """Chips that come one by one, out of order, serve a waiting request for four when the last of a row is there."""
    with followed(daemon):
        pull(daemon, *range(16))
        waiter = connect()
        request, _ = wait_in_line(waiter, count=4, missing_ok=True)
        order = [9, 2, 5, 14, 0, 11, 3, 7, 8]  # of no row all four
        for index in order:
            plug(daemon, index)
            assert [(row["lease"], row["state"]) for row in daemon.leases()] == [(request, "queued")]
        plug(daemon, 10)
        assert waiter.expect()["chips"] == [8, 9, 10, 11]
        plug(daemon, *sorted(set(range(16)) - {10, *order}))
        assert daemon.call("Acquire", count=8)["chips"] == [0, 1, 2, 3, 4, 5, 6, 7]


def test_chips_pulled_and_plugged_thousands_of_times(daemon: Daemon, connect: Connect) -> None:
    """After thousands of pulls and plugs the daemon has the right chips, and neither descriptors nor memory more."""
    holder = connect()
    holder.ask("Acquire", chips=[8, 9, 10, 11])

    def storm(client: Client, seconds: float, rounds: int) -> int:
        began, done = time.monotonic(), 0
        while done < rounds and time.monotonic() - began < seconds:
            index = choices.randrange(16)
            client.call("Simulate", chip=index, action="remove")
            client.call("Simulate", chip=index, action="add", major=choices.choice([None, OTHER_MAJOR]))
            done += 1
        for index in range(16):
            client.call("Simulate", chip=index, action="remove")
            client.call("Simulate", chip=index, action="add")
        eventually(lambda: len(daemon.states()) == 16 and len({major for major, _ in numbers(daemon)}) == 1)
        return done

    choices = random.Random(1)
    with daemon.client() as client:
        storm(client, 3.0, 500)  # what is kept of the last events is there now
        descriptors, memory = fds(daemon.pid), rss(daemon.pid)
        done = storm(client, LONGEST, ROUNDS)
        growth = rss(daemon.pid) - memory
        print(f"{done} times pulled and plugged: RSS grew by {growth:.1f} MiB from {memory:.1f}")
        assert fds(daemon.pid) <= descriptors + 2  # a look at /proc may be under way
        assert growth < 50
    wanted = dict.fromkeys(range(16), "free") | dict.fromkeys(range(8, 12), "leased")
    eventually(lambda: daemon.states() == wanted)
    holder.close()
    eventually(daemon.all_free)
    assert not daemon.call("Check")["findings"]


# -- nodes that are changed underneath ------------------------------------------------------------------------------


def test_the_level_in_force_follows_the_nodes(shared: Daemon) -> None:
    """When somebody changes a node's mode or owner, the level of a lease follows at the next look, with the reason."""
    acquired = as_nobody(shared, "acquire", "--chips", "3", "--ttl", "1h", groups=[NEURON])
    assert acquired.returncode == 0, acquired.stderr
    node = Path(node_of(shared, 3))

    def level() -> tuple[str, str]:
        look(shared)
        (row,) = shared.leases()
        return row["enforcement"], row["enforcement_why"]

    assert level() == ("advisory", f"{node} has mode 0666: everybody can open it")
    os.chown(node, 0, NEURON)
    node.chmod(0o660)
    eventually(lambda: level()[0] == "acl")
    listed = subprocess.run(["getfacl", "-cp", str(node)], capture_output=True, text=True, check=True).stdout
    assert "user:nobody:rw-" in listed
    node.chmod(0o664)
    eventually(lambda: level() == ("advisory", f"{node} has mode 0664: everybody can open it"))
    node.chmod(0o660)
    os.chown(node, NEURON, 0)
    eventually(lambda: level()[0] == "acl")


def with_file(node: Path) -> None:
    """Put a regular file in the node's place."""
    node.touch()


def with_link(node: Path) -> None:
    """Put a link to another chip's node there."""
    node.symlink_to("neuron0")


def with_nothing(node: Path) -> None:
    """Leave the node's place empty."""
    assert not node.exists()


BROKEN = pytest.mark.parametrize(
    ("replace", "why"),
    [
        (with_file, "is not a character device"),
        (with_link, "is not a character device"),
        (with_nothing, "no node "),
    ],
    ids=["file", "link", "nothing"],
)


@BROKEN
def test_a_broken_node_quarantines_its_chip_until_it_is_right(
    daemon: Daemon, replace: Callable[[Path], None], why: str
) -> None:
    """A chip whose node is broken is withheld with a reason, others are leased; put right, it recovers by itself."""
    node = Path(node_of(daemon, 5))
    status = node.stat()
    with followed(daemon):
        node.unlink()
        replace(node)
        look(daemon)
        eventually(lambda: daemon.states()[5] == "quarantined")
        assert why in chip(daemon, 5)["problem"]
        assert [finding["kind"] for finding in daemon.call("Check")["findings"]] == ["quarantined"]
        assert is_refused(daemon, 5)
        lease = daemon.call("Acquire", chips=[0, 1, 2, 3], ttl=60)["lease"]
        daemon.call("Release", lease=lease)
        node.unlink(missing_ok=True)
        os.mknod(node, status.st_mode, status.st_rdev)
        look(daemon)
        eventually(daemon.all_free)
        assert not is_refused(daemon, 5)


@BROKEN
def test_a_node_that_breaks_while_leased(
    daemon: Daemon, connect: Connect, replace: Callable[[Path], None], why: str
) -> None:
    """A chip whose node breaks while it is leased stays leased with the problem said, and is withheld afterwards."""
    holder = connect()
    node = Path(node_of(daemon, 5))
    status = node.stat()
    with followed(daemon):
        lease = holder.ask("Acquire", chips=[4, 5, 6, 7])["lease"]
        node.unlink()
        replace(node)
        look(daemon)
        eventually(lambda: why in (chip(daemon, 5)["problem"] or ""))
        assert chip(daemon, 5)["state"] == "leased"
        assert [(row["lease"], row["state"]) for row in daemon.leases()] == [(lease, "active")]
        holder.close()
        eventually(lambda: daemon.states()[5] == "quarantined")
        assert [daemon.states()[index] for index in (4, 6, 7)] == ["free"] * 3
        node.unlink(missing_ok=True)
        os.mknod(node, status.st_mode, status.st_rdev)
        look(daemon)
        eventually(daemon.all_free)
