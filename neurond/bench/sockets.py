"""The daemon over its socket: closed loops of lease and release on so many connections."""

import resource
from contextlib import ExitStack
from pathlib import Path

from neurond.bench.report import Report
from neurond.bench.servers import Daemon
from neurond.bench.subjects import Loads, rates, report_rounds
from neurond.bench.talks import Leases
from neurond.bench.turns import Plan

SECTION = "socket"
WAITERS = 10_000
"""Requests that wait in the daemon, each on a connection of its own, as far as the limit of open files allows."""


def seconds(plan: Plan) -> float:
    """Return about how long this takes."""
    return 11 * (plan.rounds + 1) * plan.seconds * 1.1 + 5


def measure(plan: Plan, report: Report, place: Path) -> None:
    """Measure it. Where nobody is to wait there are as many chips as all clients can hold."""
    report.progress("socket: lease and release over the socket")
    with ExitStack() as undo:
        small, large, queued, crowded = (
            undo.enter_context(Daemon(place / name, chips))
            for name, chips in (("16", 16), ("64", 64), ("queued", 16), ("crowded", 16))
        )
        waiting = _waiters(plan)
        queued_rate = f"16 chips, 8 connections, {waiting:,} wait for another chip"
        loads = Loads(plan, undo)

        def add(name: str, daemon: Daemon, connections: int, count: int = 1, *, wait: bool = False) -> None:
            loads.add(name, str(daemon.socket), daemon.pid, Leases(count, wait=wait), connections)

        add("16 chips, 1 connection", small, 1)
        add("16 chips, 8 connections", small, 8)
        add("64 chips, 8 connections", large, 8)
        add("64 chips, 16 connections", large, 16)
        add("64 chips, 16 connections, 4 chips each", large, 16, 4)
        add("64 chips, 32 connections", large, 32)
        add("16 chips, 32 connections, some wait", small, 32, wait=True)
        add("16 chips, 256 connections, all wait", small, 256, wait=True)
        # Four chips are free, so that at 32 connections too nearly every request waits before it is served.
        holder = undo.enter_context(crowded.client())
        holder.call("Acquire", chips=list(range(8, 16)))
        holder.call("Acquire", chips=[4, 5, 6, 7])
        add("4 chips, 32 connections, all wait", crowded, 32, wait=True)
        add("4 chips, 256 connections, all wait", crowded, 256, wait=True)
        _queue(queued, waiting, undo)
        add(queued_rate, queued, 8)
        found = loads.run()
    report_rounds(report, SECTION, found)
    rate = {name: rates(rounds) for name, rounds in found.items()}
    one, four = rate["64 chips, 16 connections"], rate["64 chips, 16 connections, 4 chips each"]
    few, many = (rate[f"4 chips, {count} connections, all wait"] for count in (32, 256))
    alone = rate["16 chips, 8 connections"]
    compare = report.compare
    compare(SECTION, "4 contiguous chips against 1", four, one, must=0.9, aim=1.0)
    compare(SECTION, "64 chips against 16", rate["64 chips, 8 connections"], alone, must=0.85, aim=1.0)
    compare(SECTION, "256 connections against 32, where all wait", many, few, must=0.85, aim=1.0)
    few, many = rate["16 chips, 32 connections, some wait"], rate["16 chips, 256 connections, all wait"]
    compare(SECTION, "256 connections that all wait against 32 of which some do", many, few)
    compare(SECTION, f"{waiting:,} waiters against none", rate[queued_rate], alone, must=0.8, aim=1.0)


def _waiters(plan: Plan) -> int:
    """Return how many may wait: a descriptor each, here and in the daemon."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return min(WAITERS // 10 if plan.quick else WAITERS, max(hard - 2000, 100))


def _queue(daemon: Daemon, waiting: int, undo: ExitStack) -> None:
    """Have the last chip held, and waited for by many clients."""
    for _ in range(waiting + 1):
        replies = undo.enter_context(daemon.client()).stream("Acquire", chips=[15], wait=3600)
        next(replies)
