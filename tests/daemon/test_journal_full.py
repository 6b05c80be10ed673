"""A journal that can't be written, as the runtime directory is full: nothing new is promised, nothing old is lost."""

import re
import resource
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest

from neurond.client import NeurondError
from tests.daemon.support import Raw, process, wait_in_line
from tests.harness import Daemon, eventually

pytestmark = pytest.mark.root

CANNOT = "the journal {journal} can't be written: No space left on device"


@pytest.fixture
def small(run_dir: Path) -> Iterator[Daemon]:
    """Give a daemon whose runtime directory is a small file system of its own."""
    daemon = Daemon(run_dir / "small")
    daemon.directory.mkdir()
    options = ["-t", "tmpfs", "-o", "size=1m,mode=755", "neurond-test", str(daemon.directory)]
    subprocess.run(["mount", *options], check=True)
    try:
        yield daemon.start()
    finally:
        daemon.close()
        subprocess.run(["umount", "--lazy", str(daemon.directory)], check=True)


def fill(daemon: Daemon, lease: str) -> None:
    """Fill the runtime directory, then renew this lease until the page that the journal ends in is full as well."""
    with (daemon.directory / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    with suppress(NeurondError):  # the last one says that it could not be recorded
        renew_for_ever(daemon, lease)


def renew_for_ever(daemon: Daemon, lease: str) -> NoReturn:
    """Renew a lease until that fails."""
    while True:
        daemon.call("Renew", lease=lease, ttl=600)


def make_room(daemon: Daemon) -> None:
    """Take the file away that fills the runtime directory."""
    (daemon.directory / "filler").unlink()


def problem(daemon: Daemon) -> str | None:
    """Return what the daemon says of its journal."""
    said: str | None = daemon.call("Describe")["journal_problem"]
    return said


def test_nothing_is_granted_that_is_not_recorded(small: Daemon) -> None:
    """New leases are refused with the journal and the reason, and hold nothing; what exists stays, and is shown."""
    kept = small.call("Acquire", chips=[4, 5, 6, 7], ttl=600, name="kept")["lease"]
    fill(small, kept)
    cannot = CANNOT.format(journal=small.directory / "journal")
    for arguments, code in ((("run", "-n", "1", "true"), 125), (("acquire", "-n", "1", "--ttl", "1m"), 1)):
        refused = small.cli(*arguments)
        assert refused.returncode == code
        assert refused.stdout == ""
        assert cannot in refused.stderr
    assert cannot in str(problem(small))
    assert kept in small.cli("ps", "-q").stdout.split()
    assert small.cli("ls", "4").stdout.splitlines()[1].split()[:3] == ["4", "leased", kept]
    assert cannot in small.cli("version").stderr
    eventually(lambda: [row["lease"] for row in small.leases()] == [kept])


def test_it_recovers_by_itself(small: Daemon) -> None:
    """Once there is room again the daemon grants again, without being told."""
    kept = small.call("Acquire", count=4, ttl=600)["lease"]
    fill(small, kept)
    assert small.cli("run", "-n", "1", "true").returncode == 125
    make_room(small)
    eventually(lambda: problem(small) is None)
    assert small.cli("run", "-n", "1", "true").returncode == 0
    eventually(lambda: [row["lease"] for row in small.leases()] == [kept])
    assert len(small.logged("journal.failed")) == 1
    assert len(small.logged("journal.recovered")) == 1


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_what_ended_meanwhile_is_recorded_later(small: Daemon, how: str) -> None:
    """Leases can end while the journal can't be written; once it can, their ends are in it, for the next daemon too."""
    kept = small.call("Acquire", count=4, ttl=600, name="kept")["lease"]
    with process() as held, small.client() as client:
        client.call("Acquire", count=4)
        small.call("Acquire", count=4, pid=held.pid)
        fill(small, kept)
        client.close()
        held.kill()
        eventually(lambda: [row["lease"] for row in small.leases()] == [kept])
    assert problem(small)
    make_room(small)
    eventually(lambda: problem(small) is None)
    (small.stop if how == "stopped" else small.kill)()
    small.start()
    assert not small.logged("journal.found")
    assert [row["lease"] for row in small.leases()] == [kept]
    assert [chip for chip, state in small.states().items() if state != "free"] == [0, 1, 2, 3]
    assert small.call("Acquire", count=8, ttl=600)["chips"] == list(range(8, 16))


def test_who_waits_is_served_after_the_recovery(small: Daemon) -> None:
    """A request that waited before goes on waiting while nothing can be granted, and is served when it can."""
    other = small.call("Acquire", chips=[8], ttl=600)["lease"]
    with Raw(small) as waiter, small.client() as holder:
        holder.call("Acquire", chips=list(range(8)))
        request, _ = wait_in_line(waiter, chips=list(range(8)))
        fill(small, other)
        holder.close()
        eventually(lambda: [row["state"] for row in small.leases()] == ["active", "queued"])
        make_room(small)
        granted = waiter.expect()
        assert (granted["lease"], granted["chips"]) == (request, list(range(8)))


def test_a_daemon_can_stop_while_its_journal_is_full(small: Daemon) -> None:
    """A daemon that is stopped while its journal can't be written keeps, for the next one, what was in it."""
    kept = small.call("Acquire", count=4, ttl=600, name="kept")["lease"]
    fill(small, kept)
    assert small.stop() == 0
    make_room(small)
    small.start()
    assert kept in [row["lease"] for row in small.leases()]


def test_what_cannot_be_recorded_is_not_promised(small: Daemon) -> None:
    """Renew, bind and release say that the journal can't be written, and change nothing while that is known."""
    kept = small.call("Acquire", count=4, ttl=600)["lease"]
    fill(small, kept)
    before = small.leases()
    cannot = re.escape(CANNOT.format(journal=small.directory / "journal"))
    for method, more in (("Renew", {"ttl": 5}), ("Bind", {"ttl": 5}), ("Release", {})):
        with pytest.raises(NeurondError, match=cannot) as refused:
            small.call(method, lease=kept, **more)
        assert refused.value.kind == "JournalFull"
    assert [row | {"until": None} for row in small.leases()] == [row | {"until": None} for row in before]
    assert abs(small.leases()[0]["until"] - before[0]["until"]) < 1
    make_room(small)
    eventually(lambda: problem(small) is None)
    small.call("Release", lease=kept)
    eventually(small.all_free)


def test_the_change_that_finds_the_disk_full_is_not_promised(small: Daemon) -> None:
    """The renewal that the journal has no room for fails, and says that a crash would undo it."""
    kept = small.call("Acquire", count=4, ttl=600)["lease"]
    with (small.directory / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    with pytest.raises(NeurondError, match="would be forgotten if neurond crashed"):
        renew_for_ever(small, kept)


def test_a_write_that_fails_in_the_middle(daemon: Daemon) -> None:
    """A write that fails half way, though there is room, promises nothing, loses nothing and leaves no half line."""
    kept = daemon.call("Acquire", chips=[4, 5, 6, 7], ttl=600)["lease"]
    journal = daemon.directory / "journal"
    size = journal.stat().st_size
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (size + 100, resource.RLIM_INFINITY))
    for _ in range(3):
        with pytest.raises(NeurondError, match="can't be written") as refused:
            daemon.call("Acquire", count=1, ttl=600)
        assert refused.value.kind == "JournalFull"
        assert journal.stat().st_size == size
        eventually(lambda: [row["lease"] for row in daemon.leases()] == [kept])
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    eventually(lambda: problem(daemon) is None)
    more = daemon.call("Acquire", count=1, ttl=600)["lease"]
    daemon.kill()
    daemon.start()
    assert [row["lease"] for row in daemon.leases()] == [kept, more]
    assert not daemon.logged("journal.found")
