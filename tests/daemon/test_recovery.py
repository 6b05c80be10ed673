"""What a daemon finds when it starts: leases of the living are there, those of the dead are gone."""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from neurond.client import Client, NeurondError, Unreachable
from tests.daemon.support import holding, node_of, process
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


@pytest.mark.root
def test_a_pid_that_is_used_again_holds_nothing(daemon: Daemon) -> None:
    """Whoever has the pid of a holder that died while the daemon was away holds nothing, and is left in peace."""
    with process() as holder:
        lease = daemon.call("Acquire", all=True, pid=holder.pid)["lease"]
        daemon.kill()
    newcomer = process_with_pid(holder.pid)
    daemon.start()
    assert daemon.all_free()
    assert [line["lease"] for line in daemon.logged("lease.draining")] == [lease]
    with pytest.raises(NeurondError, match="no lease"):
        daemon.call("Release", lease=lease)
    assert newcomer.poll() is None
    newcomer.kill()
    newcomer.wait()


def process_with_pid(pid: int) -> "subprocess.Popen[bytes]":
    """Start a process with a pid that was somebody else's before."""
    for _ in range(200):
        time.sleep(0.02)  # so that it starts at another tick
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        started = subprocess.Popen(["sleep", "600"])
        if started.pid == pid:
            return started
        started.kill()
        started.wait()
    pytest.fail("the kernel did not give the pid again")


def test_a_client_that_asks_all_the_time_gets_no_chip_of_others(
    daemon: Daemon, sleeper: "subprocess.Popen[bytes]"
) -> None:
    """Who asks from before the start of the next daemon on is told of the holders at its very first answer."""
    lease = daemon.call("Acquire", all=True, pid=sleeper.pid)["lease"]
    answers: list[str] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            try:
                with Client(daemon.address) as client:
                    answers.append(str(client.call("Acquire", count=1)))
            except Unreachable:
                time.sleep(0.002)
            except NeurondError as error:
                answers.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            daemon.kill()
            answers.clear()
            daemon.start()
            eventually(lambda: len(answers) >= 20)
            assert [answer for answer in answers if lease not in answer] == []
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_chips_that_went_while_the_daemon_was_away(daemon: Daemon, sleeper: "subprocess.Popen[bytes]") -> None:
    """A chip that went meanwhile is lost to its lease, which keeps it when it is back; the others are as they were."""
    first = daemon.call("Acquire", chips=[0, 1, 2, 3], pid=sleeper.pid)["lease"]
    second = daemon.call("Acquire", chips=[4, 5, 6, 7], ttl=600)["lease"]
    daemon.kill()
    simulated = daemon.directory / "sim"
    for chip in (2, 9):
        (simulated / f"sys/class/neuron_device/neuron{chip}").unlink()
        shutil.rmtree(simulated / f"sys/devices/virtual/neuron_device/neuron{chip}")
        (simulated / f"dev/neuron{chip}").unlink()
    daemon.start()
    assert {row["lease"]: (row["state"], row["chips"], row["lost"]) for row in daemon.leases()} == {
        first: ("active", [0, 1, 2, 3], [2]),
        second: ("active", [4, 5, 6, 7], []),
    }
    states = dict.fromkeys(range(16), "free") | dict.fromkeys(range(8), "leased") | {2: "lost"}
    del states[9]
    assert daemon.states() == states
    daemon.call("Simulate", chip=2, action="add")
    eventually(lambda: daemon.states()[2] == "leased")
    with pytest.raises(NeurondError, match=first):
        daemon.call("Acquire", chips=[2])


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


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "stopped"])
def test_a_second_daemon_is_refused(daemon: Daemon, *, busy: bool) -> None:
    """A second daemon on the same directory is refused with the pid of the first, which goes on, however slow it is."""
    command = [*NEUROND, "serve", *daemon.arguments]
    if busy:
        os.kill(daemon.pid, signal.SIGSTOP)
    try:
        second = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
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
