"""The wall clock may be set at any time: how old a lease is, it does not say."""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from neurond.daemon.broker import Broker, Rules
from neurond.daemon.usage import Found
from neurond.host import processes
from neurond.host.journal import Journal
from neurond.ledger.events import LeaseGranted
from neurond.ledger.leases import ByTime, Lease, Want
from neurond.ledger.ledger import Ledger
from tests.ledger.hosts import ALICE, SHELL, host

BEFORE, AFTER = -3600.0, 3600.0
"""Seconds by which the wall clock was stepped since a lease was granted."""
AGE = 600.0
"""How old the lease of these tests is, in seconds."""


@contextmanager
def broker_of(ledger: Ledger, directory: Path) -> Iterator[Broker]:
    """Give a broker with a journal of its own, on the loop that runs."""
    journal = Journal(directory, processes.boot_id())
    rules = Rules(lnc=1, gid=None, engine_gid=None, uid=os.geteuid(), note=lambda: None)
    broker = Broker(ledger, journal, rules, 0)
    try:
        yield broker
    finally:
        broker.usage.opens._inotify.close()
        journal.close()


def lease_of(step: float) -> Lease:
    """Return a lease that is AGE old, since whose grant the wall clock was stepped by this."""
    granted = time.time() - AGE
    want = Want(chips=(0,))
    return Lease("k3mq-7", "active", ALICE, want, SHELL, granted + step, (0,), up=processes.boottime() - AGE)


@pytest.mark.parametrize("step", [BEFORE, 0.0, AFTER])
@pytest.mark.parametrize(("older", "keeps"), [(-AGE / 2, True), (AGE, False)], ids=["younger", "older"])
def test_a_process_that_can_not_be_looked_into(tmp_path: Path, step: float, older: float, *, keeps: bool) -> None:
    """Whether it may be left over from a lease at its end is told by who is older, whatever the wall clock says."""
    ledger = host("trn1.32xlarge")
    ledger.replay([LeaseGranted(lease_of(step))])

    async def work() -> None:
        with broker_of(ledger, tmp_path) as broker:
            broker.binding_ended("k3mq-7", "its process ended")
            assert ledger.get("k3mq-7").state == "draining"
            for _ in range(3):
                await asyncio.sleep(0.001)
                broker.take_usage(Found({}, {4711: AGE + older}, began=asyncio.get_running_loop().time()))
            assert ("k3mq-7" in ledger.leases) == keeps
            if keeps:
                (user,) = broker.left_over("k3mq-7")
                assert user.pid == 4711

    asyncio.run(work())


@pytest.mark.parametrize("step", [BEFORE, AFTER])
def test_whether_a_lease_was_short(tmp_path: Path, step: float) -> None:
    """Only a lease that really was short ends without a look at who has its chips open."""
    ledger = host("trn1.32xlarge")
    long = lease_of(step)
    short = replace(long, id="k3mq-8", chips=(1,), want=Want(chips=(1,)), up=processes.boottime())
    ledger.replay([LeaseGranted(long), LeaseGranted(short)])

    async def work() -> None:
        with broker_of(ledger, tmp_path) as broker:
            for lease in (long, short):
                broker.binding_ended(lease.id, "its process ended")
            assert list(ledger.leases) == [long.id]

    asyncio.run(work())


def test_a_grant_carries_the_time_since_boot() -> None:
    """A lease knows its grant by the clock that nobody sets: for one that waited, the end of the wait."""
    uptime = [100.0]
    ledger = Ledger(host("trn1.32xlarge").topology, "trn1.32xlarge", lambda: uptime[0])
    ledger.open("k3mq")
    ledger.look(host("trn1.32xlarge").chips, 0)
    now = 1_750_000_000.0
    first, _ = ledger.acquire(Want(every=True), ALICE, SHELL, now=now)
    second, _ = ledger.acquire(Want(count=1), ALICE, SHELL, now=now, wait=True)
    uptime[0] = 200.0
    ledger.end(first.id, "over", now - 3600)
    assert (first.up, second.up, ledger.get(second.id).up) == (100.0, 100.0, 200.0)
    uptime[0] = 300.0
    adopted, _ = ledger.adopt(ALICE, SHELL, (5,), now=now - 7200)
    assert adopted.up == 300.0


@pytest.mark.parametrize("step", [BEFORE, AFTER])
def test_a_time_limit_is_kept(tmp_path: Path, step: float) -> None:
    """A time limit ends when the time since the grant is over, however the wall clock was set meanwhile."""
    ledger = host("trn1.32xlarge")
    over = replace(lease_of(step), binding=ByTime(processes.boottime() + 0.05))
    lasting = replace(over, id="k3mq-8", chips=(1,), want=Want(chips=(1,)), binding=ByTime(processes.boottime() + 60))
    ledger.replay([LeaseGranted(over), LeaseGranted(lasting)])

    async def work() -> None:
        with broker_of(ledger, tmp_path) as broker:
            await broker.start([])
            await asyncio.sleep(0.2)
            assert [ledger.get(lease.id).state for lease in (over, lasting)] == ["draining", "active"]

    asyncio.run(work())
