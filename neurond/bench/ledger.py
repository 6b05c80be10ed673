"""The ledger in process: lease chips and end the lease, without a daemon around it."""

import time
from collections.abc import Callable, Iterable

from neurond.bench.report import Report
from neurond.bench.turns import Plan, in_turn
from neurond.catalog import look_up
from neurond.ledger.chips import Chip
from neurond.ledger.leases import ByConnection, Owner, Want
from neurond.ledger.ledger import Ledger

SECTION = "ledger"
OWNER, BINDING, NOW = Owner(1000, "someone"), ByConnection(4711), 1_750_000_000.0
AT_A_TIME = 20
"""Cycles between two looks at the clock."""
Cycle = Callable[[], None]


def seconds(plan: Plan) -> float:
    """Return about how long this takes."""
    return 13 * (plan.rounds + 1) * _round(plan) + 1


def measure(plan: Plan, report: Report) -> None:
    """Measure it."""
    report.progress("ledger: acquire and end, in process")
    one, four = Want(count=1), Want(count=4)
    cycles: dict[str, Cycle] = {
        "16 chips, 1 asked": _cycle(_host(16), one),
        "16 chips, 4 asked": _cycle(_host(16), four),
        "16 chips, fragmented, 1 asked": _cycle(_fragmented(16), one),
        "16 chips, fragmented, 4 asked": _cycle(_fragmented(16), four),
        "64 chips, 1 asked": _cycle(_host(64), one),
        "64 chips, 4 asked": _cycle(_host(64), four),
        "64 chips, fragmented, 1 asked": _cycle(_fragmented(64), one),
        "64 chips, fragmented, 4 asked": _cycle(_fragmented(64), four),
    }
    for waiting in (100, 10_000):
        cycles[f"16 chips, 1 asked, {waiting} wait for another"] = _cycle(_host(16, waiting), one)
    for waiting in (1, 100, 10_000):
        cycles[f"16 chips, all held, next of {waiting} served"] = _served(waiting)
    found = in_turn(plan.rounds, {name: _rate_of(cycle, _round(plan)) for name, cycle in cycles.items()})
    for name, rates in found.items():
        report.add(SECTION, name, "leases/s", rates)
    compare = report.compare
    base, queued = found["16 chips, 1 asked"], found["16 chips, 1 asked, 10000 wait for another"]
    compare(SECTION, "10,000 waiters against none", queued, base, must=0.8, aim=1.0)
    compare(SECTION, "64 chips against 16, 1 asked", found["64 chips, 1 asked"], base)
    compare(SECTION, "4 chips asked against 1", found["16 chips, 4 asked"], base)
    served = "16 chips, all held, next of "
    compare(SECTION, "next of 10,000 against next of 1", found[served + "10000 served"], found[served + "1 served"])


def _round(plan: Plan) -> float:
    return min(plan.seconds, 0.25)


def _rate_of(cycle: Cycle, length: float) -> Callable[[], float]:
    def rate() -> float:
        begun, count = time.perf_counter(), 0
        while (took := time.perf_counter() - begun) < length:
            for _ in range(AT_A_TIME):
                cycle()
            count += AT_A_TIME
        return count / took

    return rate


def _cycle(ledger: Ledger, want: Want) -> Cycle:
    def cycle() -> None:
        lease, _ = ledger.acquire(want, OWNER, BINDING, now=NOW)
        ledger.end(lease.id, "released", NOW)

    return cycle


def _host(chips: int, waiting: int = 0) -> Ledger:
    """Make a host; the last chip is held and waited for by so many."""
    ledger = Ledger(look_up(f"trn1.32xlarge*{chips // 16}").topology, "trn1.32xlarge")
    ledger.open("k3mq")
    ledger.look({index: Chip(index, f"/dev/neuron{index}", 240, index, cores=2) for index in range(chips)}, NOW)
    last = Want(chips=(chips - 1,))
    for _ in range(waiting + 1 if waiting else 0):
        ledger.acquire(last, OWNER, BINDING, now=NOW, wait=True)
    return ledger


def _fragmented(chips: int) -> Ledger:
    """Make a host on which two chips of each row are held, but for the last row."""
    ledger = _host(chips)
    _hold(ledger, (index for index in range(chips - 4) if index % 4 in {1, 2}))
    return ledger


def _hold(ledger: Ledger, chips: Iterable[int]) -> None:
    for index in chips:
        ledger.acquire(Want(chips=(index,)), OWNER, BINDING, now=NOW)


def _served(waiting: int) -> Cycle:
    """Make a host whose chips are all held: each one that is given back goes to the first who waits."""
    ledger = _host(16)
    _hold(ledger, range(16))
    for _ in range(waiting):
        ledger.acquire(Want(count=1), OWNER, BINDING, now=NOW, wait=True)

    def cycle() -> None:
        ledger.end(next(iter(ledger.leases)), "released", NOW)
        ledger.acquire(Want(count=1), OWNER, BINDING, now=NOW, wait=True)

    return cycle
