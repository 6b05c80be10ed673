"""All sections, in their order."""

from collections.abc import Callable, Sequence

from neurond.bench import launch, ledger, peers, recovery, rest, sockets
from neurond.bench.report import Report
from neurond.bench.servers import LOAD_CORE, SERVER_CORE, directory, pin
from neurond.bench.turns import FULL, QUICK

SECTIONS = ("ledger", "socket", "peers", "launch", "recovery", "rest")


def run(
    sections: Sequence[str], *, quick: bool, talkative: bool, engine: str | None = None, image: str | None = None
) -> Report:
    """Measure these sections and return what was found; `engine` is a Docker Engine's address."""
    plan = QUICK if quick else FULL
    report = Report(quick=quick, talkative=talkative)
    needed = {
        "ledger": ledger.seconds(plan),
        "socket": sockets.seconds(plan),
        "peers": peers.seconds(plan),
        "launch": launch.seconds(plan, engine),
        "recovery": recovery.seconds(plan),
        "rest": rest.seconds(plan),
    }
    total = sum(needed[name] for name in sections)
    report.progress(f"this takes about {total:.0f} s" if quick else f"this takes about {total / 60:.0f} min")
    if SERVER_CORE == LOAD_CORE:
        report.notes.append("there is one core only: servers and load share it, and the figures say little")
    with directory() as place:
        pin(0, LOAD_CORE)
        work: dict[str, Callable[[], None]] = {
            "ledger": lambda: ledger.measure(plan, report),
            "socket": lambda: sockets.measure(plan, report, place),
            "peers": lambda: peers.measure(plan, report, place),
            "launch": lambda: launch.measure(plan, report, place, engine, image),
            "recovery": lambda: recovery.measure(plan, report, place),
            "rest": lambda: rest.measure(plan, report, place),
        }
        for name in sections:
            work[name]()
    report.progress("done")
    return report
