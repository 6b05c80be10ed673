"""Things that are compared are measured in turn, round by round, so that noise hits all alike."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to measure: rounds of so many seconds each."""

    quick: bool
    rounds: int
    seconds: float


QUICK = Plan(quick=True, rounds=3, seconds=0.15)
FULL = Plan(quick=False, rounds=9, seconds=1.0)


def in_turn(rounds: int, subjects: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """Run each of these once to warm it up, then all of them in turn, `rounds` times; return what they returned."""
    for measure in subjects.values():
        measure()
    found: dict[str, list[T]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, measure in subjects.items():
            found[name].append(measure())
    return found
