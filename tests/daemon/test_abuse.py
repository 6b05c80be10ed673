"""Clients by the thousand, clients that stop, stay silent, send without end or never read: the others are served."""

import json
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from neurond import wire
from neurond.settings.table import Settings
from tests.daemon.support import (
    ME,
    NEURON,
    NOBODY,
    NOGROUP,
    Raw,
    as_nobody,
    holding,
    process,
    wait_in_line,
    with_group_neuron,
)
from tests.harness import PATIENCE, Daemon, eventually

Connect = Callable[[], Raw]

MANY_FILES = 12_000
MOST_WAITING, MOST_CONNECTIONS = Settings().most_waiting, Settings().most_connections
LONG_NAME = "x" * 128
"""Makes events large, so that fewer of them fill a watcher's buffers."""

COMMON = """
import json, os, socket, sys
from contextlib import suppress

path, number, uid, gid = sys.argv[1], *map(int, sys.argv[2:5])
if os.getuid() == 0:
    os.setgroups([int(group) for group in sys.argv[5:]]), os.setgid(gid), os.setuid(uid)

def connect():
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return connection

def call(connection, method, more=False, **parameters):
    message = {"method": "io.neurond." + method, "parameters": parameters, "more": more}
    connection.sendall(json.dumps(message).encode() + bytes(1))

def replies(connection):
    unread = b""
    with suppress(ConnectionResetError):
        while data := connection.recv(1 << 16):
            *whole, unread = (unread + data).split(bytes(1))
            yield from map(json.loads, whole)

def say(what):
    print(json.dumps(what), flush=True)
"""
"""What the clients below share, which are processes of their own: they are many, stopped, or another user's."""

CROWD = """
crowd = [connect() for _ in range(number)]
served, refusals = 0, set()
for connection in crowd:
    with suppress(BrokenPipeError):
        call(connection, "Describe")
for connection in crowd:
    answers = replies(connection)
    answer = next(answers)
    if "error" in answer:
        refusals.add((answer["error"], answer["parameters"]["message"]))
        assert list(answers) == []
    else:
        served += 1
say([served, sorted(refusals)])
sys.stdin.read()
"""
"""Opens many connections, asks something on each, says how many were served and how the others were refused."""

LINE = """
streams = []
for _ in range(number):
    connection = connect()
    call(connection, "Acquire", more=True, all=True, wait=600)
    streams.append((connection, replies(connection)))
    assert next(streams[-1][1])["parameters"]["waiting"]
say("waiting")
for connection, answers in streams:
    say(next(answers)["parameters"]["lease"])
    sys.stdin.readline()
    connection.close()
"""
"""Stands in the line many times; says each grant, and gives it back when told to."""

STOPPED = """
half, waiter, watcher, holder = connect(), connect(), connect(), connect()
half.sendall(b'{"method": "io.neurond')
call(watcher, "Watch", more=True)
call(holder, "Acquire", chips=[0])
held = next(replies(holder))["parameters"]["lease"]
call(waiter, "Acquire", more=True, chips=[1], wait=600)
outcome = replies(waiter)
next(outcome)
say(held)
sys.stdin.readline()
half.sendall(b'.Describe"}' + bytes(1))
told = list()
for answer in replies(watcher):
    told.append(answer["parameters"]["event"]["seq"] if "continues" in answer else answer)
    if "continues" not in answer:
        break
say([next(replies(half))["parameters"]["pid"], next(outcome)["parameters"]["chips"], told])
sys.stdin.readline()
"""
"""Has half a request, a wait, a stream and a lease under way when it is stopped; says how they ended."""


def rss(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def fds(pid: int) -> int:
    """Return how many descriptors a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.fixture
def many_files() -> Iterator[None]:
    """Allow the test and the daemon that it starts as many descriptors as ten thousand clients take."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(MANY_FILES, before[0]), max(MANY_FILES, before[1])))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Follower:
    """Follows the events in a thread, and goes on from the cursor where it is dropped for being slow."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.numbers: list[int] = []
        self.dropped = 0
        self._connection = Raw(daemon)
        self._connection.send("Watch", more=True)
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        while (reply := self._connection.reply()) is not None:
            if "error" in reply:
                self.dropped += 1
                self._connection.send("Watch", more=True, since=cursor(reply))
            else:
                self.numbers.append(reply["parameters"]["event"]["seq"])

    def check(self) -> None:
        """Have one more event happen, follow until it is there, and check that none is missing."""
        seen = len(self.numbers)
        self.daemon.call("Acquire", count=1, wait=PATIENCE)
        eventually(lambda: len(self.numbers) > seen)
        assert self.numbers == list(range(self.numbers[0], self.numbers[0] + len(self.numbers)))
        print(f"a watcher saw {len(self.numbers)} events without a gap, dropped {self.dropped} times")

    def close(self) -> None:
        """Follow no more."""
        with suppress(OSError):  # the daemon may be gone
            self._connection.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()


@contextmanager
def followed(daemon: Daemon) -> Iterator[None]:
    """Check that a watcher sees all events of this block, without a gap."""
    follower = Follower(daemon)
    try:
        yield
        follower.check()
    finally:
        follower.close()


@contextmanager
def client(
    daemon: Daemon, script: str, number: int = 0, uid: int = 0, gid: int = 0
) -> Iterator["subprocess.Popen[str]"]:
    """Run one of the scripts above."""
    who = [str(uid), str(gid), str(NEURON)]
    with process(sys.executable, "-c", COMMON + script, str(daemon.socket), str(number), *who, stderr=None) as started:
        yield started


def said(started: "subprocess.Popen[str]") -> Any:
    """Return what a client says next."""
    assert started.stdout is not None
    return json.loads(started.stdout.readline())


def tell(started: "subprocess.Popen[str]") -> None:
    """Have a client go on."""
    assert started.stdin is not None
    started.stdin.write("\n")
    started.stdin.flush()


def cursor(reply: dict[str, Any]) -> int:
    """Return the number from which a dropped watcher can go on."""
    assert reply["error"] == "io.neurond.Lagged"
    sentence: str = reply["parameters"]["message"]
    assert sentence.startswith("events are read too slowly: go on with since=")
    return int(sentence.rpartition("=")[2])


def work(connection: Raw, times: int) -> float:
    """Lease and give back many times; return the slowest answer in seconds."""
    slowest = 0.0
    for _ in range(times):
        began = time.monotonic()
        lease = connection.ask("Acquire", count=1, name=LONG_NAME)["lease"]
        connection.ask("Release", lease=lease)
        slowest = max(slowest, time.monotonic() - began)
    return slowest


# -- many ---------------------------------------------------------------------------------------------------------


@pytest.mark.root
def test_ten_thousand_connections(many_files: None, make_daemon: Callable[..., Daemon]) -> None:
    """Of 10,000 clients as many as allowed are served, the others get an error and a close; one at work is served."""
    del many_files
    daemon = make_daemon()
    before = fds(daemon.pid)
    with Raw(daemon) as worker, followed(daemon):
        with client(daemon, CROWD, 5000) as first, client(daemon, CROWD, 5000) as second:
            slowest, crowds = 0.0, []
            for crowd in (first, second):
                answers: list[Any] = []
                reader = threading.Thread(target=lambda crowd=crowd, answers=answers: answers.append(said(crowd)))
                reader.start()
                while reader.is_alive():
                    slowest = max(slowest, work(worker, 1))
                crowds += answers
            with Raw(daemon) as late:
                refusal = late.error()
                assert late.reply() is None
        slowest = max(slowest, work(worker, 100))
        served = sum(count for count, _ in crowds)
        print(f"10,000 connections: {served} served, slowest answer to another client {1000 * slowest:.0f} ms")
        assert served == MOST_CONNECTIONS - 2
        assert refusal == (
            "io.neurond.BadMessage",
            f"{MOST_CONNECTIONS} clients are connected, which is the limit: try again later",
        )
        assert {tuple(each) for _, refusals in crowds for each in refusals} == {refusal}
        assert slowest < PATIENCE
    eventually(lambda: fds(daemon.pid) <= before)
    eventually(daemon.all_free)


@pytest.mark.root
def test_one_user_may_wait_so_often(many_files: None, run_dir: Path) -> None:
    """A user whose requests wait as often as allowed is refused with the number, while another user may still wait."""
    del many_files
    with with_group_neuron(run_dir) as daemon, ExitStack() as stack:
        run_dir.chmod(0o755)
        daemon.call("Acquire", all=True, ttl=600)
        for _ in range(MOST_WAITING):
            wait_in_line(stack.enter_context(Raw(daemon)), count=1)
        refused = daemon.cli("acquire", "-n", "1", "--ttl", "1m")
        assert refused.returncode == 75
        assert f"{MOST_WAITING} requests of {ME} wait already, which is the limit for one user" in refused.stderr
        other = as_nobody(daemon, "acquire", "-n", "1", "--ttl", "1m", "-w", "200ms", groups=[NEURON])
        assert other.returncode == 75
        assert "waited 0.2 s: 1 chip asked, 0 free" in other.stderr


@pytest.mark.root
def test_two_thousand_waiters_and_one_release(run_dir: Path) -> None:
    """One release serves the first of 2,000 requests and no other; the order stays, also when half of them die."""
    half = 1000
    with with_group_neuron(run_dir) as daemon:
        run_dir.chmod(0o755)
        held = daemon.call("Acquire", all=True, ttl=600)["lease"]
        with followed(daemon), client(daemon, LINE, half, NOBODY, NOGROUP) as ahead:
            with client(daemon, LINE, half) as leaver:  # whose requests are taken out from between the others'
                assert said(leaver) == "waiting"
            assert said(ahead) == "waiting"
            eventually(lambda: len(daemon.leases()) == 1 + half)
            with client(daemon, LINE, half) as behind:
                assert said(behind) == "waiting"
                rows = daemon.leases()
                assert [row["state"] for row in rows] == ["active", *["queued"] * 2 * half]
                order = [row["lease"] for row in rows[1:]]
                daemon.call("Release", lease=held)
                for number in range(3):
                    assert said(ahead) == order[number]
                    rows = daemon.leases()
                    assert [row["lease"] for row in rows] == order[number:]
                    assert [row["state"] for row in rows] == ["active", *["queued"] * (len(rows) - 1)]
                    assert {row["uid"] for row in rows[: half - number]} == {NOBODY}
                    tell(ahead)
                ahead.kill()
                assert said(behind) == order[half]
                assert [row["lease"] for row in daemon.leases()] == order[half:]
        eventually(daemon.all_free)


@pytest.mark.parametrize("how", ["closes", "is withdrawn"])
def test_a_waiter_that_goes_at_the_moment_of_its_grant(daemon: Daemon, connect: Connect, how: str) -> None:
    """A waiter that closes or is withdrawn as its chips are released leaves none of them behind, whoever is first."""
    holder, other = connect(), connect()
    with followed(daemon):
        for number in range(200):
            lease = holder.ask("Acquire", all=True, wait=PATIENCE)["lease"]
            waiter = connect()
            request, _ = wait_in_line(waiter, all=True)
            for step in ("release", "go") if number % 2 else ("go", "release"):
                if step == "release":
                    holder.send("Release", lease=lease)
                elif how == "closes":
                    waiter.close()
                else:
                    other.send("Release", lease=request)
            assert holder.expect()["state"] == "ended"
            if how == "is withdrawn":
                assert other.expect()["state"] == "ended"
                assert (waiter.reply() or {}).keys() & {"parameters", "error"}
                waiter.close()
            assert not [row for row in holder.ask("ListLeases")["leases"] if row["lease"] == lease]
    eventually(daemon.all_free)


# -- slow ---------------------------------------------------------------------------------------------------------


def test_a_watcher_that_does_not_read_is_dropped_with_a_cursor(daemon: Daemon, connect: Connect) -> None:
    """Watchers that do not read are dropped before they cost much memory, with the number from which to go on."""
    worker = connect()
    work(worker, 5000)  # the events that are kept for everybody are there now
    before = rss(daemon.pid)
    watchers = [connect() for _ in range(20)]
    for watcher in watchers:
        watcher.send("Watch", more=True)
    work(worker, 4000)
    growth = rss(daemon.pid) - before
    print(f"20 watchers that do not read: RSS grew by {growth:.1f} MiB, from {before:.1f}")
    assert growth < 120
    for watcher in watchers:
        numbers = []
        while "continues" in (reply := watcher.reply() or {}):
            numbers.append(reply["parameters"]["event"]["seq"])
        since = cursor(reply)
        assert numbers == list(range(numbers[0], since))
        watcher.send("Watch", more=True, since=since)
        assert watcher.expect()["event"]["seq"] == since


def test_watchers_that_go_on_from_long_ago(daemon: Daemon, connect: Connect) -> None:
    """Watchers that ask for thousands of earlier events cost little memory until they read, and then miss none."""
    worker = connect()
    work(worker, 5200)
    late = connect()
    late.send("Watch", more=True, since=10**9)
    _, sentence = late.error()
    last = int(sentence.removesuffix(" are").rpartition(" ")[2])
    before = rss(daemon.pid)
    watchers = [connect() for _ in range(50)]
    for watcher in watchers:
        watcher.send("Watch", more=True, since=last - 9000)
        assert watcher.expect()["event"]["seq"] == last - 9000
    growth = rss(daemon.pid) - before
    print(f"50 watchers that go on from long ago: RSS grew by {growth:.1f} MiB, from {before:.1f}")
    work(worker, 1)
    seen = last - 9000
    while seen < last + 2:
        reply = watchers[0].reply() or {}
        if "error" in reply:
            watchers[0].send("Watch", more=True, since=cursor(reply))
        else:
            seen += 1
            assert reply["parameters"]["event"]["seq"] == seen
    assert growth < 100


def test_endless_messages_on_many_connections(daemon: Daemon, connect: Connect) -> None:
    """Many messages without an end are all cut off at the limit, within bounded memory, while another is served."""
    worker, before = connect(), rss(daemon.pid)
    greedy = [connect() for _ in range(64)]
    chunk, slowest = b"x" * (1 << 16), 0.0
    with followed(daemon):
        for _ in range(wire.MAX_MESSAGE // len(chunk) + 1):
            for connection in greedy:
                with suppress(BrokenPipeError, ConnectionResetError):
                    connection.socket.sendall(chunk)
            slowest = max(slowest, work(worker, 1))
    growth = rss(daemon.pid) - before
    print(f"64 endless messages: RSS grew by {growth:.1f} MiB, slowest answer {1000 * slowest:.0f} ms")
    assert growth < 64 * 4
    for connection in greedy:
        name, sentence = connection.error()
        assert name == "io.neurond.BadMessage"
        assert str(wire.MAX_MESSAGE) in sentence
        assert connection.reply() is None


def test_a_stopped_client_keeps_what_it_has_and_holds_up_nobody(daemon: Daemon, connect: Connect) -> None:
    """A client stopped amid a request, a wait, a stream and a lease loses none of them, and the others are served."""
    worker, other = connect(), connect()
    blocking = other.ask("Acquire", chips=[1])["lease"]
    with followed(daemon), client(daemon, STOPPED) as stopped:
        held = said(stopped)
        stopped.send_signal(signal.SIGSTOP)
        eventually(lambda: "T (stopped)" in Path(f"/proc/{stopped.pid}/status").read_text())
        other.ask("Release", lease=blocking)
        slowest = work(worker, 4000)
        print(f"beside a stopped client: slowest answer {1000 * slowest:.0f} ms")
        assert [(row["state"], row["chips"], row["pid"]) for row in daemon.leases()] == [
            ("active", [0], stopped.pid),
            ("active", [1], stopped.pid),
        ]
        assert daemon.leases()[0]["lease"] == held
        stopped.send_signal(signal.SIGCONT)
        tell(stopped)
        pid, chips, told = said(stopped)
        assert (pid, chips) == (daemon.pid, [1])
        *numbers, last = told
        assert numbers == list(range(numbers[0], cursor(last)))
    eventually(daemon.all_free)


def test_silent_and_half_open_clients(daemon: Daemon, connect: Connect) -> None:
    """Silent clients are kept; one that is shut for sending is closed and leaves the line; nobody else notices."""
    worker = connect()
    worker.ask("Describe")
    before = fds(daemon.pid)
    silent, shut, waiting = [[connect() for _ in range(20)] for _ in range(3)]
    held = worker.ask("Acquire", chips=[0])["lease"]
    lease = silent[0].ask("Acquire", chips=[1])["lease"]
    for connection in waiting:
        wait_in_line(connection, chips=[0])
    with suppress(OSError):
        for connection in (*shut, *waiting):
            connection.socket.shutdown(socket.SHUT_WR)
    for connection in (*shut, *waiting):
        assert connection.reply() is None
    assert [row["lease"] for row in worker.ask("ListLeases")["leases"]] == [held, lease]
    work(worker, 1000)
    assert fds(daemon.pid) <= before + 20
    for connection in silent:
        assert connection.ask("Describe")["pid"] == daemon.pid
    assert lease in {row["lease"] for row in daemon.leases()}


# -- the daemon's own limit -----------------------------------------------------------------------------------------


@pytest.mark.root
def test_the_daemons_own_limit_of_descriptors(run_dir: Path) -> None:
    """At its own limit of descriptors the daemon refuses further clients, lives, sees opens, and leases afterwards."""
    daemon = Daemon(run_dir / "limited")
    daemon.prefix = ["prlimit", "--nofile=64:64"]
    try:
        daemon.start()
        with Raw(daemon) as worker, process() as job, ExitStack() as stack:
            worker.ask("Describe")
            for _ in range(100):
                crowd = stack.enter_context(Raw(daemon))
                with suppress(BrokenPipeError):
                    crowd.send("Describe")
                crowd.reply()
            node = str(daemon.directory / "sim/dev/neuron7")
            with holding(node):
                eventually(lambda: worker.ask("ListChips")["chips"][7]["state"] == "foreign")
            worker.ask("Acquire", count=1)
            worker.ask("Acquire", count=1, pid=job.pid)
            assert len(worker.ask("ListLeases")["leases"]) == 2
            stack.close()
            job.kill()
        eventually(daemon.all_free)
        assert daemon.call("Acquire", all=True)["chips"] == list(range(16))
        assert not daemon.logged("server.handler_failed")
    finally:
        daemon.close()
