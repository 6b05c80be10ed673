"""neurond beside what people would use instead, and beside the limit, with the same load. Each only if installed."""

import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from neurond.bench.load import Address, Round, Talk
from neurond.bench.report import Report
from neurond.bench.servers import Daemon, echo, etcd, redis
from neurond.bench.subjects import Loads, middles, rates, report_rounds
from neurond.bench.talks import Echoes, EtcdLocks, Leases, RedisLocks
from neurond.bench.turns import Plan, in_turn

SECTION = "peers"
CONNECTIONS = (1, 32)
US, THEM = "neurond", ("echo", "Redis", "Redis with its append-only file", "etcd")


def seconds(plan: Plan) -> float:
    """Return about how long this takes."""
    return 13 * (plan.rounds + 1) * plan.seconds * 1.1 + 5


def measure(plan: Plan, report: Report, place: Path) -> None:
    """Measure them. 64 chips are there so that all clients can hold one each, as with keys of their own."""
    report.progress("peers: the same load on the bare echo server, Redis, etcd")
    with ExitStack() as undo:
        daemon = undo.enter_context(Daemon(place / "peers", 64))
        loads = Loads(plan, undo)
        servers: dict[str, tuple[Callable[[], Talk], tuple[Address, int]]] = {}
        servers["echo"] = (Echoes, undo.enter_context(echo(place)))
        if shutil.which("redis-server"):
            servers["Redis"] = (RedisLocks, undo.enter_context(redis(place, append_only=False)))
            servers[THEM[2]] = (RedisLocks, undo.enter_context(redis(place, append_only=True)))
        else:
            report.leave_out("Redis", "there is no redis-server")
        if shutil.which("etcd"):
            servers["etcd"] = (EtcdLocks, undo.enter_context(etcd(place)))
        else:
            report.leave_out("etcd", "it is not installed")
        for count in CONNECTIONS:
            loads.add(_name(US, count), str(daemon.socket), daemon.pid, Leases(), count)
            for name, (talk, (address, pid)) in servers.items():
                loads.add(_name(name, count), address, pid, talk(), count)
        found = loads.run()
        pairs = _one_by_one(plan, report, place, daemon)
    report_rounds(report, SECTION, found)
    _compare(report, found)
    for name, values in pairs.items():
        report.add(SECTION, name, "locks/s", values)
    for name in (name for name in pairs if name != US):
        report.compare(SECTION, f"neurond against {name}, one client", pairs[US], pairs[name])
    _check_load(report, found)


def _name(server: str, count: int) -> str:
    return f"{server}, {count} connection{'s' * (count > 1)}"


def _compare(report: Report, found: Mapping[str, Sequence[Round]]) -> None:
    ours, alone = found[_name(US, 32)], found[_name(US, 1)]
    bounds = {"echo": (0.6, 0.75), THEM[2]: (0.7, 1.0)}
    for name in THEM:
        theirs = found.get(_name(name, 32))
        if theirs is not None:
            must, aim = bounds.get(name, (None, None))
            what = f"requests/s at 32 connections, against {name}"
            report.compare(SECTION, what, rates(ours), rates(theirs), must=must, aim=aim)
            what = f"server's processor time for a request, against {name}"
            report.compare(SECTION, what, _costs(ours), _costs(theirs), upward=False)
            must, aim = (1.5, 1.2) if name == "Redis" else (None, None)
            single = middles(found[_name(name, 1)])
            what = f"p50 at one connection, against {name}"
            report.compare(SECTION, what, middles(alone), single, must=must, aim=aim, upward=False)


def _costs(rounds: Sequence[Round]) -> list[float]:
    return [one.cost for one in rounds]


def _check_load(report: Report, found: Mapping[str, Sequence[Round]]) -> None:
    """Say what the load itself could do, so that it can be seen that it was not what was measured."""
    rounds = found[_name(US, 32)], found["echo, 32 connections"]
    costs = [sum(one.load_cpu for one in some) / sum(one.requests for one in some) for some in rounds]
    most = 1 / max(costs)
    reached = max(rates(rounds[0]))
    report.add(SECTION, "the load itself, by its processor time", "requests/s", [1 / one for one in costs])
    report.notes.append(
        f"the load takes {max(costs) * 1e6:.1f} us of its own core for a request, so it could send {most:,.0f}/s: "
        f"{most / reached:.1f} times what neurond reached at its best"
    )


def _one_by_one(plan: Plan, report: Report, place: Path, daemon: Daemon) -> dict[str, list[float]]:
    """Measure locks a second of one client that uses no socket, beside neurond's own client."""
    report.progress("peers: flock, filelock")
    lock = place / "lock"
    client = daemon.client()

    def lease() -> None:
        client.call("Release", lease=client.call("Acquire", count=1)["lease"])

    subjects: dict[str, Callable[[], object]] = {US: lease}
    if shutil.which("flock"):
        subjects["flock(1)"] = lambda: subprocess.run(["flock", lock, "true"], check=True)
    else:
        report.leave_out("flock(1)", "it is not installed")
    if find_spec("filelock"):
        one = import_module("filelock").FileLock(lock)

        def take() -> None:
            one.acquire()
            one.release()

        subjects["filelock"] = take
    else:
        report.leave_out("filelock", "it is not installed")
    try:
        return in_turn(plan.rounds, {name: _rate_of(cycle, plan.seconds) for name, cycle in subjects.items()})
    finally:
        client.close()


def _rate_of(cycle: Callable[[], object], length: float) -> Callable[[], float]:
    def rate() -> float:
        begun, count = time.perf_counter(), 0
        while (took := time.perf_counter() - begun) < length or not count:
            cycle()
            count += 1
        return count / took

    return rate
