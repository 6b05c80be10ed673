"""What a daemon finds when it starts: leases of the living are there, those of the dead are gone."""

import json
import os
import subprocess
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.daemon.support import holding, node_of
from tests.harness import NEUROND, PATIENCE, Daemon, eventually


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    """Give a process that lives until the end of the test."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def chips_of(daemon: Daemon) -> list[list[int]]:
    """Return the chips of all leases."""
    return [lease["chips"] for lease in daemon.leases()]


def test_leases_of_the_living_survive_a_kill(daemon: Daemon, sleeper: "subprocess.Popen[bytes]") -> None:
    """After kill -9, the first answer has the leases of a living process and of a time limit, with the same ids."""
    first = daemon.call("Acquire", count=4, pid=sleeper.pid, name="training")
    second = daemon.call("Acquire", count=1, ttl=600)
    before = daemon.leases()
    daemon.kill()
    daemon.start()
    after = daemon.leases()
    assert [lease["lease"] for lease in after] == [first["lease"], second["lease"]]
    assert after[0] == before[0]
    third = daemon.call("Acquire", count=8, pid=sleeper.pid)
    assert not set(third["chips"]) & {*first["chips"], *second["chips"]}
    assert third["lease"] not in {first["lease"], second["lease"]}


def test_a_survivor_is_still_followed(daemon: Daemon) -> None:
    """The end of a process that lived through a restart of the daemon frees its chips."""
    with subprocess.Popen(["sleep", "600"]) as process:
        daemon.call("Acquire", count=16, pid=process.pid)
        daemon.kill()
        daemon.start()
        assert set(daemon.states().values()) == {"leased"}
        process.kill()
    eventually(daemon.all_free)


def test_leases_of_the_dead_are_gone_at_the_first_answer(daemon: Daemon) -> None:
    """Leases whose process, time limit or connection ended meanwhile are gone, with a line each in the log."""
    process = subprocess.Popen(["sleep", "600"])
    connection = daemon.client()
    ended = [
        daemon.call("Acquire", count=4, pid=process.pid)["lease"],
        daemon.call("Acquire", count=1, ttl=0.2)["lease"],
        connection.call("Acquire", count=1)["lease"],
    ]
    daemon.kill()
    process.kill()
    process.wait()
    connection.close()
    with subprocess.Popen(["sleep", "0.3"]):
        pass
    daemon.start()
    assert daemon.all_free()
    reasons = {line["lease"]: line["reason"] for line in daemon.logged("lease.draining")}
    assert set(ended) <= set(reasons)
    assert reasons[ended[0]] == f"process {process.pid} ended while neurond was away"


def test_a_waiting_request_ends_with_the_daemon(daemon: Daemon, sleeper: "subprocess.Popen[bytes]") -> None:
    """A request that waits is told when the daemon dies (69), and is not served by the next daemon."""
    daemon.call("Acquire", all=True, pid=sleeper.pid)
    waiter = daemon.spawn("run", "-n", "1", "--", "true")
    eventually(lambda: [lease for lease in daemon.leases() if lease["state"] == "queued"])
    daemon.kill()
    assert waiter.wait(PATIENCE) == 69
    waiter.communicate()
    daemon.start()
    assert [lease["state"] for lease in daemon.leases()] == ["active"]


def test_stopping_ends_no_lease(daemon: Daemon, sleeper: "subprocess.Popen[bytes]") -> None:
    """SIGTERM ends the daemon with 0, and every lease that can live on does."""
    daemon.call("Acquire", count=4, pid=sleeper.pid)
    assert daemon.stop() == 0
    daemon.start()
    assert chips_of(daemon) == [[0, 1, 2, 3]]


@pytest.mark.root
def test_a_lease_is_draining_still_after_a_restart(daemon: Daemon) -> None:
    """Chips that a child of the holder still has open stay withheld over a restart, until it closes them."""
    lease = daemon.call("Acquire", chips=[0], ttl=600)["lease"]
    with holding(node_of(daemon, 0)):
        assert daemon.call("Release", lease=lease) == {"state": "draining"}
        daemon.kill()
        daemon.start()
        assert daemon.states()[0] == "draining"
    eventually(daemon.all_free)


def test_a_second_daemon_is_refused(daemon: Daemon) -> None:
    """A second daemon on the same directory is refused with the pid of the first, which goes on."""
    command = [*NEUROND, "serve", *daemon.arguments]
    second = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert second.returncode == 1
    assert f"neurond is already running in {daemon.directory} (pid {daemon.pid})" in second.stderr
    assert daemon.all_free()


def test_another_boot_voids_every_lease(daemon: Daemon, sleeper: "subprocess.Popen[bytes]") -> None:
    """A journal with another boot id gives no lease, and names each that is dropped."""
    lease = daemon.call("Acquire", count=4, pid=sleeper.pid)["lease"]
    daemon.kill()
    journal = daemon.directory / "journal"
    header, _, rest = journal.read_bytes().partition(b"\n")
    content = json.loads(header[9:]) | {"boot": "another"}
    body = json.dumps(content).encode()
    journal.write_bytes(b"%08x %s\n" % (zlib.crc32(body), body) + rest)
    daemon.start()
    assert daemon.all_free()
    assert [line["lease"] for line in daemon.logged("lease.dropped")] == [lease]


def damage(content: bytes) -> bytes:
    """Overwrite a piece in the middle of a line in the middle of a journal."""
    middle = content.index(b"\n", len(content) // 2) + 20
    return content[:middle] + b"#####" + content[middle + 5 :]


@pytest.mark.parametrize(
    "spoil",
    [lambda _: b"", lambda _: b"not a journal\n", lambda _: os.urandom(500), damage],
    ids=["empty", "foreign", "binary", "damaged"],
)
def test_an_unusable_journal_is_kept_aside(
    daemon: Daemon, spoil: Callable[[bytes], bytes], sleeper: "subprocess.Popen[bytes]"
) -> None:
    """A journal that can't be used as it stands is kept aside, and the daemon starts; the log says so."""
    daemon.call("Acquire", count=1, pid=sleeper.pid)
    daemon.kill()
    journal = daemon.directory / "journal"
    spoiled = spoil(journal.read_bytes())
    journal.write_bytes(spoiled)
    daemon.start()
    assert len(daemon.states()) == 16
    kept = Path(daemon.logged("journal.kept_aside")[0]["path"])
    assert kept.read_bytes() == spoiled
    daemon.call("Acquire", count=4, pid=sleeper.pid)


def test_a_journal_of_a_newer_version_is_kept_aside(daemon: Daemon) -> None:
    """A journal that a newer neurond wrote is not overwritten."""
    daemon.kill()
    body = b'{"journal":99,"boot":"x","seq":0}'
    newer = b"%08x %s\n" % (zlib.crc32(body), body)
    (daemon.directory / "journal").write_bytes(newer)
    daemon.start()
    assert Path(daemon.logged("journal.kept_aside")[0]["path"]).read_bytes() == newer
    assert "format 99" in daemon.logged("journal.found")[0]["note"]


def test_a_torn_tail_is_cut(daemon: Daemon, sleeper: "subprocess.Popen[bytes]") -> None:
    """A last record that was cut short is dropped, and every lease before it is there."""
    daemon.call("Acquire", count=4, pid=sleeper.pid)
    daemon.kill()
    with (daemon.directory / "journal").open("ab") as journal:
        journal.write(b'0badc0de {"seq":99,"ev')
    daemon.start()
    assert chips_of(daemon) == [[0, 1, 2, 3]]
    assert daemon.logged("journal.found")[0]["verdict"] == "torn"


def test_many_restarts_lose_nothing(daemon: Daemon, sleeper: "subprocess.Popen[bytes]") -> None:
    """Ten restarts in a row, by kill -9, keep a lease as it is, and ids are never used again."""
    seen = {daemon.call("Acquire", count=4, pid=sleeper.pid)["lease"]}
    for _ in range(10):
        daemon.kill()
        daemon.start()
        lease = daemon.call("Acquire", count=1, ttl=600)["lease"]
        assert lease not in seen
        seen.add(lease)
        daemon.call("Release", lease=lease)
        eventually(lambda: chips_of(daemon) == [[0, 1, 2, 3]])


def test_the_journal_is_compacted(daemon: Daemon) -> None:
    """Twenty thousand records and more are replaced by a snapshot; the file stays small and whole."""
    with daemon.client() as client:
        for _ in range(7000):
            lease = client.call("Acquire", count=1, ttl=60)["lease"]
            client.call("Release", lease=lease)
    size = (daemon.directory / "journal").stat().st_size
    daemon.kill()
    daemon.start()
    assert size < 6_000_000
    assert not daemon.logged("journal.found")
    eventually(daemon.all_free)
