"""The daemon is killed at every point that it passes and at random: no lease is forgotten, no chip given twice or lost.

What is true is what clients were told and what the kernel says of the chips' nodes; the daemon is not believed.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from neurond.client import Client, NeurondError, Unreachable
from neurond.daemon.points import POINTS
from tests.daemon.support import node_of
from tests.harness import PATIENCE, Daemon, eventually
from tests.host.support import tmpfs

pytestmark = pytest.mark.root

LONG = os.environ.get("NEUROND_TEST_LONG") == "1"
OWN_POINTS = [point for point in POINTS if not point.startswith("container.")]
OFTEN = {"journal.before-write", "journal.after-write", "reply.before-send"}
"""Points that every call passes; each time is tried in the long form only."""
CLIENTS = 12
KILLS = 500 if LONG else 50


def start_to_die(daemon: Daemon, point: str) -> bool:
    """Start a daemon that will be killed at a point; tell whether it got ready before."""
    daemon.env = {"NEUROND_CRASH_AT": point}
    try:
        daemon.start()
    except AssertionError:
        assert daemon.process is not None
        assert daemon.process.poll() == -signal.SIGKILL
        return False
    finally:
        daemon.env = {}
    return True


class Story:
    """What clients do one after the other, and what they know: `holds` has the chips of each lease they count on.

    `told` are all lease ids that anybody was ever told.
    """

    def __init__(self, daemon: Daemon, told: set[str]) -> None:
        self.daemon = daemon
        self.told = told
        self.holds: dict[str, list[int]] = {}
        self._timed: list[str] = []
        self._unanswered: dict[str, Any] | None = None
        self._stack = ExitStack()
        self._nodes = [node_of(daemon, chip) for chip in range(16)]

    # -- what clients do ----------------------------------------------------------------------------------------------

    def process(self, *chips: int) -> "subprocess.Popen[bytes]":
        """Start a process that has these chips open."""
        held = [os.open(self._nodes[chip], os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK) for chip in chips]
        process = subprocess.Popen(["sleep", "600"], pass_fds=held)
        for node in held:
            os.close(node)
        self._stack.callback(kill, process)
        return process

    def connect(self) -> Client:
        """Connect to the daemon."""
        return self._stack.enter_context(self.daemon.client())

    def acquire(self, *chips: int, client: Client | None = None, **binding: Any) -> str:
        """Lease these chips; a request with a time limit has a key, so that it can be asked again."""
        wish = {"chips": list(chips)} | binding
        if "ttl" in wish:
            wish["key"] = f"key {len(self.told)}"
        self._unanswered = wish
        reply = client.call("Acquire", **wish) if client else self.daemon.call("Acquire", **wish)
        self._unanswered = None
        if "ttl" in wish:
            self._timed.append(reply["lease"])
            assert self.daemon.call("Acquire", **wish)["lease"] == reply["lease"]
        return self.note(reply)

    def note(self, reply: dict[str, Any]) -> str:
        """Take note of a grant, whose id is new."""
        lease: str = reply["lease"]
        assert lease not in self.told, "an id is used again"
        self.told.add(lease)
        self.holds[lease] = reply["chips"]
        return lease

    def release(self, lease: str) -> None:
        """Release a lease: from the asking on, nobody counts on it."""
        del self.holds[lease]
        self.daemon.call("Release", lease=lease)

    def wait_for_end(self, lease: str) -> None:
        """Wait until a lease is over."""
        self.holds.pop(lease, None)
        eventually(lambda: lease not in {row["lease"] for row in self.daemon.leases()})

    def before(self) -> None:
        """Lease what the next daemon will find: of a process that lives, of one that does not, of a connection."""
        leaver, connection = self.process(), self.connect()
        self.acquire(0, 1, 2, 3, pid=self.process().pid)
        gone = [self.acquire(4, pid=leaver.pid), self.acquire(5, client=connection)]
        self.daemon.kill()
        kill(leaver)
        for lease in gone:
            del self.holds[lease]

    def go(self) -> bool:
        """Go through every kind of binding, and every way to end it; tell whether the daemon lived to the end."""
        try:
            first = self.acquire(8, 9, 10, 11, pid=self.process().pid)
            self.acquire(6, ttl=600)
            self._connection_that_closes()
            self._hand_over()
            self._wait_in_line(first)
            self._drain()
            self._adopt()
        except Unreachable:
            return False
        return True

    def _connection_that_closes(self) -> None:
        connection = self.connect()
        lease = self.acquire(7, client=connection)
        del self.holds[lease]  # it does not outlive the daemon
        connection.close()
        self.wait_for_end(lease)

    def _hand_over(self) -> None:
        lease, process = self.acquire(12, ttl=600), self.process()
        self.daemon.call("Renew", lease=lease, ttl=700)
        self.daemon.call("Bind", lease=lease, pid=process.pid)
        kill(process)
        self.wait_for_end(lease)

    def _wait_in_line(self, holder: str) -> None:
        wish = {"chips": [8, 9, 10, 11], "pid": self.process().pid, "wait": PATIENCE}
        replies = self.connect().stream("Acquire", **wish)
        assert next(replies)["waiting"]
        rows = {row["lease"]: row["pid"] for row in self.daemon.leases()}
        del self.holds[holder]
        os.kill(rows[holder], signal.SIGKILL)
        self.note(next(replies))

    def _drain(self) -> None:
        lease, user = self.acquire(13, ttl=600), self.process(13)
        self.release(lease)
        kill(user)
        self.wait_for_end(lease)

    def _adopt(self) -> None:
        user = self.process(14)
        self.note(self.daemon.call("Adopt", pid=user.pid))

    # -- what is true afterwards --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that every lease that somebody counts on is there, and that nobody else gets its chips."""
        leases = {row["lease"]: (row["state"], row["chips"]) for row in self.daemon.leases()}
        assert {lease: leases.get(lease) for lease in self.holds} == {
            lease: ("active", chips) for lease, chips in self.holds.items()
        }
        held = {chip for chips in self.holds.values() for chip in chips}
        for chip in range(16):
            with suppress(NeurondError):
                lease = self.daemon.call("Acquire", chips=[chip], ttl=600)["lease"]
                assert chip not in held, f"chip {chip} is given twice"
                assert lease not in self.told, "an id is used again"
                self.told.add(lease)
                self.daemon.call("Release", lease=lease)

    def end(self) -> None:
        """End all clients: every chip is free then, and nothing is out of order."""
        if self._unanswered is not None and "key" in self._unanswered:
            with suppress(NeurondError):  # somebody else may have the chip
                self._timed.append(self.daemon.call("Acquire", **self._unanswered)["lease"])
        for lease in self._timed:
            with suppress(NeurondError):  # it may be over
                self.daemon.call("Release", lease=lease)
        self._stack.close()
        eventually(self.daemon.all_free)
        assert len(self.daemon.states()) == 16
        assert self.daemon.call("Check") == {"findings": []}


def kill(process: "subprocess.Popen[bytes]") -> None:
    """End a process, if it has not ended by then."""
    process.kill()
    process.wait()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("point", OWN_POINTS)
def test_a_crash_at_any_point_forgets_no_lease_and_no_chip(daemon: Daemon, point: str) -> None:
    """Killed each time that it gets to a point, the daemon comes back with every lease that was acknowledged."""
    told: set[str] = set()
    step = 3 if point in OFTEN and not LONG else 1
    crashes, times, lived = 0, 1, False
    while not lived:
        story = Story(daemon, told)
        story.before()
        lived = start_to_die(daemon, f"{point}:{times}") and story.go()
        assert daemon.process is not None
        if lived:
            daemon.kill()
        assert daemon.process.wait(PATIENCE) == -signal.SIGKILL
        daemon.start()
        story.check()
        story.end()
        crashes += not lived
        times += step
    print(f"{crashes} crashes at {point}, {len(told)} leases")
    assert crashes >= 1, "the story never gets there"
    done = daemon.cli("check")
    assert (done.returncode, done.stdout) == (0, "")


def test_a_crash_while_a_damaged_journal_is_replaced(daemon: Daemon) -> None:
    """What can be read of a damaged journal is not lost if the daemon dies before it has written a new one."""
    with subprocess.Popen(["sleep", "600"]) as process:
        lease = daemon.call("Acquire", count=4, pid=process.pid)
        daemon.call("Release", lease=daemon.call("Acquire", count=1, ttl=600)["lease"])
        daemon.kill()
        journal = daemon.directory / "journal"
        *lines, granted, ended, end = journal.read_bytes().split(b"\n")
        journal.write_bytes(b"\n".join([*lines, b"#" + granted, ended, end]))
        assert not start_to_die(daemon, "start.recovered")
        daemon.start()
        found = [(row["lease"], row["chips"]) for row in daemon.leases()]
        kill(process)
    assert found == [(lease["lease"], lease["chips"])]


def test_the_grant_that_fills_the_disk(run_dir: Path) -> None:
    """When the disk gets full, each lease that was acknowledged is there after a crash, and no other one."""
    with tmpfs(run_dir / "small", "size=1m,mode=755"):
        daemon = Daemon(run_dir / "small/0")
        daemon.log = run_dir / "log"  # not on the full disk
        try:
            daemon.start()
            filler = daemon.directory / "filler"
            with filler.open("wb", buffering=0) as file, suppress(OSError):
                while file.write(b"x" * 4096):
                    pass
            granted, refused = [], ""
            for chip in range(16):
                try:
                    granted.append(daemon.call("Acquire", chips=[chip], ttl=600, name="x" * 100)["lease"])
                except NeurondError as error:
                    refused = error.kind
                    break
            assert refused == "JournalFull"
            daemon.kill()
            filler.unlink()
            daemon.start()
            assert [row["lease"] for row in daemon.leases()] == granted
        finally:
            daemon.close()


@pytest.fixture
def quiet_daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    """Give a daemon that logs warnings only, as it will be busy."""
    return make_daemon("trn1.32xlarge", None, "--log-level", "warning")


@pytest.fixture
def fight(quiet_daemon: Daemon, tmp_path: Path) -> Iterator[Callable[[], "subprocess.Popen[bytes]"]]:
    """Give a function that starts a client; all are killed at the end."""
    started: list[subprocess.Popen[bytes]] = []
    nodes = Path(node_of(quiet_daemon, 0)).parent
    command = [sys.executable, "-m", "tests.daemon.crash_client", quiet_daemon.address, str(nodes), str(tmp_path)]

    def start() -> "subprocess.Popen[bytes]":
        started.append(subprocess.Popen(command))
        return started[-1]

    yield start
    for client in started:
        kill(client)


@pytest.mark.timeout(120 + 4 * KILLS)
@pytest.mark.parametrize("kills", [KILLS])
def test_random_crashes_under_load(
    quiet_daemon: Daemon, fight: Callable[[], "subprocess.Popen[bytes]"], tmp_path: Path, kills: int
) -> None:
    """Whenever it is killed, the daemon gives no chip to a second holder, forgets no lease and loses no chip."""
    daemon = quiet_daemon
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    clients = [fight() for _ in range(CLIENTS)]
    name = ""
    for kill_number in range(kills):
        assert daemon.process is not None
        if name:
            with suppress(subprocess.TimeoutExpired):  # some points are seldom passed
                daemon.process.wait(1)
        else:
            time.sleep(dice.uniform(0.02, 0.4))
        daemon.kill()
        for number, client in enumerate(clients):
            if dice.random() < 0.02:
                client.kill()
            if client.poll() is not None:
                assert client.returncode in {0, -signal.SIGKILL}
                clients[number] = fight()
        name = dice.choice(OWN_POINTS) if kill_number % 2 else ""
        if name:
            start_to_die(daemon, f"{name}:{dice.randint(1, 60 if name in OFTEN else 10)}")
        else:
            daemon.start()
    for client in clients:
        kill(client)
    daemon.kill()
    daemon.start()
    eventually(daemon.all_free)

    grants = (tmp_path / "grants").read_text().splitlines()
    requests = (tmp_path / "requests").stat().st_size
    print(f"{kills} kills, {len(grants)} grants, {requests} requests")
    violations = tmp_path / "violations"
    assert not violations.exists(), violations.read_text()
    assert len(set(grants)) == len(grants), "an id is used again"
    assert len(grants) > 2 * kills
    lease = daemon.call("Acquire", all=True, ttl=60)
    assert lease["chips"] == list(range(16))
    assert lease["lease"] not in grants
    assert daemon.call("Check") == {"findings": []}
