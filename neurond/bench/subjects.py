"""Servers under load as subjects of a comparison, and what is reported of them."""

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from neurond.bench.load import Address, Load, Round, Talk
from neurond.bench.report import Report
from neurond.bench.turns import Plan, in_turn


class Loads:
    """Loads by name; all connections are kept open from one round to the next."""

    def __init__(self, plan: Plan, undo: ExitStack) -> None:
        self._plan = plan
        self._undo = undo
        self._loads: dict[str, Load] = {}

    def add(self, name: str, address: Address, pid: int, talk: Talk, connections: int) -> None:
        """Add one."""
        load = Load(address, connections, talk, pid)
        self._undo.callback(load.close)
        self._loads[name] = load

    def run(self) -> dict[str, list[Round]]:
        """Run all in turn."""
        rounds = {name: partial(load.run, self._plan.seconds) for name, load in self._loads.items()}
        return in_turn(self._plan.rounds, rounds)


def rates(rounds: Sequence[Round]) -> list[float]:
    """Return the requests a second of each round."""
    return [one.rate for one in rounds]


def middles(rounds: Sequence[Round]) -> list[float]:
    """Return the median latency of each round, in seconds."""
    return [one.quantile(0.5) for one in rounds]


def report_rounds(report: Report, section: str, found: Mapping[str, Sequence[Round]]) -> None:
    """Report rate, latencies and processor time of each subject."""
    for name, rounds in found.items():
        total = sum(one.requests for one in rounds)
        wall = sum(one.seconds for one in rounds)
        report.add(
            section,
            name,
            "requests/s",
            rates(rounds),
            **{
                f"{label} us": statistics.median(one.quantile(share) for one in rounds) * 1e6
                for label, share in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999))
            },
            **{
                "cpu us": sum(one.server_cpu for one in rounds) / total * 1e6,
                "load's cpu us": sum(one.load_cpu for one in rounds) / total * 1e6,
                "server busy %": sum(one.server_cpu for one in rounds) / wall * 100,
                "kept from its core %": sum(one.server_waited for one in rounds) / wall * 100,
            },
        )
