"""Waiting for chips: one line, first come first served, and every way in which a wait ends."""

import re
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.daemon.support import ME, Raw, ending, process, wait_in_line
from tests.harness import PATIENCE, Daemon, eventually

Connect = Callable[[], Raw]


def queued(daemon: Daemon) -> list[str]:
    """Return the ids of the requests that wait, first come first."""
    return [lease["lease"] for lease in daemon.leases() if lease["state"] == "queued"]


def fill(connect: Connect) -> tuple[Raw, str]:
    """Lease all chips; return the connection that holds them, and the lease."""
    holder = connect()
    return holder, holder.ask("Acquire", all=True, name="holder")["lease"]


def test_first_come_first_served(daemon: Daemon, connect: Connect) -> None:
    """Requests are served in the order in which they came, whatever their size."""
    holder, lease = fill(connect)
    waiters = [connect() for _ in range(4)]
    ids = [wait_in_line(waiter, count=8)[0] for waiter in waiters]
    assert queued(daemon) == ids
    holder.ask("Release", lease=lease)
    assert [waiters[n].expect()["lease"] for n in range(2)] == ids[:2]
    assert queued(daemon) == ids[2:]
    waiters[1].close()
    assert waiters[2].expect()["lease"] == ids[2]
    assert queued(daemon) == ids[3:]


def test_a_small_request_does_not_overtake(daemon: Daemon, connect: Connect) -> None:
    """A request that could be served waits behind an earlier one that can't be yet, and is told so."""
    holder, late = connect(), connect()
    eight = holder.ask("Acquire", count=8)["lease"]
    first = connect()
    ahead, _ = wait_in_line(first, all=True)
    behind, why = wait_in_line(late, count=1)
    assert f"request {ahead}" in why
    assert "waits ahead for all chips" in why
    late_comer = connect()
    late_comer.send("Acquire", count=1)
    name, said = late_comer.error()
    assert name == "io.neurond.NoCapacity"
    assert ahead in said
    assert queued(daemon) == [ahead, behind]
    holder.ask("Release", lease=eight)
    assert len(first.expect()["chips"]) == 16
    first.close()
    assert late.expect()["chips"] == [0]


def test_who_waits_for_one_chip_holds_up_nobody_else(daemon: Daemon, connect: Connect) -> None:
    """While a command waits for chip 3, others get other chips, and nobody who comes later gets chip 3 before it."""
    holder = connect()
    held = holder.ask("Acquire", chips=[3])["lease"]
    with ending(daemon.spawn("run", "--chips", "3", "--", "sh", "-c", "echo $NEUROND_CHIPS; cat", stdin=-1)) as first:
        eventually(lambda: queued(daemon))
        (ahead,) = queued(daemon)
        for count, chips in (("1", "0"), ("4", "4,5,6,7"), ("8", "8,9,10,11,12,13,14,15")):
            done = daemon.cli("run", "-n", count, "--no-wait", "--", "sh", "-c", "echo $NEUROND_CHIPS")
            assert (done.returncode, done.stdout.strip()) == (0, chips)
        late = connect()
        behind, _ = wait_in_line(late, chips=[0, 1, 2, 3])
        assert queued(daemon) == [ahead, behind]
        holder.ask("Release", lease=held)
        assert first.stdout is not None
        assert first.stdout.readline() == "3\n"
        refused = daemon.cli("run", "--chips", "3", "--no-wait", "--", "true")
        assert refused.returncode == 75
        assert queued(daemon) == [behind]
        first.communicate("", timeout=PATIENCE)
        assert late.expect()["chips"] == [0, 1, 2, 3]


def test_a_free_chip_that_somebody_waits_for_is_not_given_away(connect: Connect) -> None:
    """Chips that an earlier request waits for are kept for it while they are free, and others are still given out."""
    holder, first, late = connect(), connect(), connect()
    holder.ask("Acquire", chips=[3])
    ahead, _ = wait_in_line(first, chips=[0, 1, 2, 3])
    late.send("Acquire", chips=[2])
    name, said = late.error()
    assert name == "io.neurond.NoCapacity"
    assert ahead in said
    assert late.ask("Acquire", count=1)["chips"] == [4]


def test_the_first_reply_says_why(connect: Connect) -> None:
    """With `more`, the first reply says what is asked, what is free and who holds the rest since when."""
    _, lease = fill(connect)
    waiter = connect()
    waiter.send("Acquire", more=True, count=4, wait=60)
    reply = waiter.reply()
    assert reply is not None
    assert reply["continues"] is True
    why = reply["parameters"]["waiting"]
    assert "4 chips asked, 0 free" in why
    assert re.search(rf"0-15 by {ME} \(lease {lease}, holder, since \d\d:\d\d\)", why)


def test_without_more_there_is_one_reply(daemon: Daemon, connect: Connect) -> None:
    """Without `more` a request that waits is answered once, with the lease."""
    holder, lease = fill(connect)
    waiter = connect()
    waiter.send("Acquire", count=1, wait=60)
    eventually(lambda: queued(daemon))
    holder.ask("Release", lease=lease)
    reply = waiter.reply()
    assert reply is not None
    assert "continues" not in reply
    assert reply["parameters"]["waiting"] is None


def test_the_wait_runs_out(daemon: Daemon, connect: Connect) -> None:
    """A request that waited for as long as it said gets WaitTimedOut with the time, the reason and the holders."""
    _, lease = fill(connect)
    waiter = connect()
    wait_in_line(waiter, count=1, wait=0.2)
    began = time.monotonic()
    reply = waiter.reply()
    assert time.monotonic() - began < PATIENCE / 2
    assert reply is not None
    assert reply["error"] == "io.neurond.WaitTimedOut"
    assert reply["parameters"]["message"].startswith("waited 0.2 s: 1 chip asked, 0 free")
    assert reply["parameters"]["holders"] == [lease]
    assert queued(daemon) == []


@pytest.mark.parametrize("verb", ["run", "acquire"])
def test_the_wait_runs_out_on_the_command_line(daemon: Daemon, connect: Connect, verb: str) -> None:
    """On the command line a wait that runs out is exit code 75, and stderr says why it was in vain."""
    fill(connect)
    command = ("true",) if verb == "run" else ()
    done = daemon.cli(verb, "-n", "1", "-w", "200ms", *command)
    assert done.returncode == 75
    assert done.stdout == ""
    waiting, waited = done.stderr.splitlines()
    assert waiting.startswith("neurond: waiting: 1 chip asked, 0 free")
    assert waited.startswith("neurond: waited 0.2 s: 1 chip asked, 0 free")
    assert queued(daemon) == []


def test_a_client_that_goes_leaves_the_line(daemon: Daemon, connect: Connect) -> None:
    """The request of a client that closes its connection is gone, and those behind it are served."""
    holder, lease = fill(connect)
    leaver, other = connect(), connect()
    wait_in_line(leaver, all=True, ttl=600)
    behind, _ = wait_in_line(other, count=1)
    leaver.close()
    eventually(lambda: queued(daemon) == [behind])
    holder.ask("Release", lease=lease)
    assert other.expect()["chips"] == [0]


def test_a_command_that_is_killed_leaves_the_line(daemon: Daemon, connect: Connect) -> None:
    """`neurond run` that is killed while it waits holds nothing and waits no more."""
    holder, lease = fill(connect)
    with ending(daemon.spawn("run", "-n", "1", "--", "sleep", "600")) as waiting:
        eventually(lambda: queued(daemon))
        waiting.kill()
    eventually(lambda: not queued(daemon))
    holder.ask("Release", lease=lease)
    eventually(daemon.all_free)


def test_the_release_wakes_the_waiter(daemon: Daemon, connect: Connect) -> None:
    """A command that waits goes on when the chips are released, without asking again and again."""
    holder, lease = fill(connect)
    with ending(daemon.spawn("run", "--all", "--", "sh", "-c", "echo $NEUROND_CHIPS")) as waiting:
        eventually(lambda: queued(daemon))
        holder.ask("Release", lease=lease)
        out, err = waiting.communicate(timeout=PATIENCE)
    assert out.strip() == ",".join(map(str, range(16)))
    assert "(--no-wait fails at once)" in err
    assert waiting.returncode == 0


def test_a_request_can_be_withdrawn(daemon: Daemon, connect: Connect) -> None:
    """`release` of a request that waits withdraws it: its client gets an error, the others move up."""
    fill(connect)
    waiter, other = connect(), connect()
    request, _ = wait_in_line(waiter, count=1)
    behind, _ = wait_in_line(other, count=1)
    assert daemon.cli("release", request).returncode == 0
    name, said = waiter.error()
    assert name == "io.neurond.NoCapacity"
    assert said == f"request {request} is over: released by {ME}"
    assert queued(daemon) == [behind]


def test_the_death_of_the_process_ends_the_wait(daemon: Daemon, connect: Connect) -> None:
    """A request for a process (--hold-pid) that dies meanwhile ends with an error that says so."""
    fill(connect)
    with process() as held, ending(daemon.spawn("acquire", "-n", "1", "--hold-pid", str(held.pid))) as waiting:
        eventually(lambda: queued(daemon))
        held.kill()
        _, err = waiting.communicate(timeout=PATIENCE)
    assert waiting.returncode == 75
    assert f"process {held.pid} ended" in err
    assert queued(daemon) == []


def test_a_time_limit_counts_from_the_grant(daemon: Daemon, connect: Connect) -> None:
    """A lease that was waited for longer than its time limit lasts as long as the limit says, from the grant on."""
    holder, lease = fill(connect)
    waiter = connect()
    request, _ = wait_in_line(waiter, count=1, ttl=0.5)
    began = time.monotonic()
    eventually(lambda: time.monotonic() - began > 0.6)
    assert queued(daemon) == [request]
    holder.ask("Release", lease=lease)
    waiter.expect()
    granted = time.monotonic()
    eventually(daemon.all_free)
    assert time.monotonic() - granted > 0.4


def test_a_waiter_for_a_missing_chip_gets_it_when_it_is_plugged(daemon: Daemon, connect: Connect) -> None:
    """With `missing_ok` a request waits for a chip that is not there, and holds up nobody meanwhile."""
    daemon.call("Simulate", chip=5, action="remove")
    eventually(lambda: 5 not in daemon.states())
    waiter, other = connect(), connect()
    _, why = wait_in_line(waiter, chips=[5], missing_ok=True)
    assert "5 (not on the host now)" in why
    other.ask("Acquire", count=1)
    daemon.call("Simulate", chip=5, action="add")
    assert waiter.expect()["chips"] == [5]


def test_a_count_waits_for_missing_chips(daemon: Daemon) -> None:
    """`run -n 16 -w` waits where only 14 chips are there, and is served when the last one is plugged."""
    for chip in (0, 15):
        daemon.call("Simulate", chip=chip, action="remove")
    eventually(lambda: len(daemon.states()) == 14)
    with ending(daemon.spawn("run", "-n", "16", "-w", "60s", "true", stderr=subprocess.DEVNULL)) as waiting:
        eventually(lambda: queued(daemon))
        for chip in (0, 15):
            daemon.call("Simulate", chip=chip, action="add")
        assert waiting.wait(PATIENCE) == 0


@pytest.mark.parametrize(
    ("parameters", "error", "said"),
    [
        ({"chips": [5]}, "NoSuchChip", "no chip 5 on this host (have 0-4,6-15)"),
        ({"count": 16}, "NoCapacity", "16 chips asked, 15 on the host, 15 free"),
    ],
    ids=["by number", "by count"],
)
def test_missing_chips_are_not_waited_for_unasked(
    daemon: Daemon, connect: Connect, parameters: dict[str, Any], error: str, said: str
) -> None:
    """Without `missing_ok` a request that only a missing chip could serve is refused at once, though it would wait."""
    daemon.call("Simulate", chip=5, action="remove")
    eventually(lambda: 5 not in daemon.states())
    waiter = connect()
    waiter.send("Acquire", wait=600, **parameters)
    name, sentence = waiter.error()
    assert name == f"io.neurond.{error}"
    assert said in sentence
    assert daemon.leases() == []
