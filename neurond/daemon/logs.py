"""The daemon's log on stderr: JSON lines, or columns with colour on a terminal; and what it says of an event."""

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, TextIO, cast

import msgspec
import structlog

from neurond.ledger.events import (
    ChipAdded,
    ChipChanged,
    ChipForeign,
    ChipRemoved,
    Event,
    LeaseBound,
    LeaseDraining,
    LeaseEnded,
    LeaseGranted,
    LeaseQueued,
    LeaseRevived,
    LeaseStuck,
)
from neurond.ledger.leases import Lease

log = structlog.get_logger()
_encode = msgspec.json.Encoder().encode

MOST_A_SECOND = 1000
"""Events of the ledger that are logged in a second; of the rest there is a count."""
News = Sequence[tuple[float, Event]]
"""Events with the wall clock at which they happened."""


def configure_logs(level: str, form: str) -> None:
    """Set up structlog: `level` as in "info"; `form` is json, text, or auto for text on a terminal, else JSON."""
    as_json = not sys.stderr.isatty() if form == "auto" else form == "json"
    least = logging.getLevelNamesMapping()[level.upper()]
    renderer: Any = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.dict_tracebacks if as_json else structlog.dev.set_exc_info,
            _first_things_first,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _stderr)),
        cache_logger_on_first_use=False,  # else a reload would change nothing for those that exist
    )
    _stderr.wanted = least <= logging.INFO
    _stderr.direct = as_json and least <= logging.INFO


class _Stderr:
    """Standard error, whose failure (a full disk, a reader that is gone) must not stop what is being logged.

    `owed` are events, with their time, whose lines go out before the next other one. `direct` says that what happens to
    the ledger is logged that way, `wanted` that it is logged at all.
    """

    def __init__(self) -> None:
        self.owed: list[tuple[float, Event]] = []
        self.direct = False
        self.wanted = True

    def write(self, text: str) -> None:
        owed, self.owed = self.owed, []
        lines = [*map(_line, owed), text]
        with suppress(OSError, ValueError):
            sys.stderr.write("".join(lines))

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.flush()


_stderr = _Stderr()


def log_events(news: News, call_later: Callable[[float, Callable[[], None]], object]) -> None:
    """Log what happened to the ledger, with its times, in the form of all other lines; soon, by `call_later`.

    There are two events and more for each lease, and structlog takes twenty times as long for one as this does. Beyond
    MOST_A_SECOND they are only counted: a loop of ten thousand leases a second must not fill the disk.
    """
    if not _stderr.wanted:
        return
    news, rest = _budget.take(news)
    if rest:
        if not _budget.passed_over:
            call_later(1, log_passed_over)
        _budget.passed_over.update(event.kind for _, event in rest)
    if not _stderr.direct:
        for _, event in news:
            log.info(event.kind, **fields_of(event))
    elif news:
        if not _stderr.owed:
            call_later(0, flush_events)
        _stderr.owed += news


def flush_events() -> None:
    """Write what `log_events` owes, in one write."""
    if _stderr.owed:
        _stderr.write("")


class _Budget:
    """How many events may still be logged in this second, and how many of each kind were not."""

    def __init__(self) -> None:
        self.passed_over: Counter[str] = Counter()
        self._second, self._left = 0, 0

    def take(self, news: News) -> tuple[News, News]:
        """Return those that may be logged, and the rest."""
        second = int(news[0][0])
        if second != self._second:
            self._second, self._left = second, MOST_A_SECOND
        left, self._left = self._left, max(self._left - len(news), 0)
        return (news, ()) if left >= len(news) else (news[:left], news[left:])


_budget = _Budget()


def log_passed_over() -> None:
    """Say how many events were not logged."""
    passed_over, _budget.passed_over = _budget.passed_over, Counter()
    log.info("events.not_logged", limit=f"{MOST_A_SECOND} a second", **passed_over)


def _line(owed: tuple[float, Event]) -> str:
    now, event = owed
    second = int(now)
    said = {
        "timestamp": f"{_second(second)}.{int((now - second) * 1e6):06}Z",
        "level": "info",
        "event": event.kind,
        **fields_of(event),
    }
    return _encode(said).decode() + "\n"


@lru_cache(maxsize=1)
def _second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def _first_things_first(logger: Any, method: str, line: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Put time, level and event before the other fields."""
    del logger, method
    return {key: line[key] for key in ("timestamp", "level", "event")} | dict(line)


def fields_of(event: Event) -> dict[str, object]:  # noqa: PLR0911 - a case per event
    """Return what the log says of an event."""
    match event:
        case LeaseGranted(lease):
            return {**_request(lease), "chips": list(lease.chips)}
        case LeaseEnded(lease_id, reason) | LeaseDraining(lease_id, reason):
            return {"lease": lease_id, "reason": reason}
        case LeaseQueued(lease):
            return {**_request(lease), "asked": str(lease.want.count or "set")}
        case LeaseStuck(lease_id, users):
            return {"lease": lease_id, "users": [str(user) for user in users]}
        case LeaseRevived(lease_id):
            return {"lease": lease_id}
        case LeaseBound(lease_id, binding):
            return {"lease": lease_id, "binding": binding.kind}
        case ChipAdded(chip) | ChipChanged(chip):
            return {"chip": chip.index, "device": f"{chip.major}:{chip.minor}", "problem": chip.problem}
        case ChipRemoved(index):
            return {"chip": index}
        case ChipForeign(index, users):
            return {"chip": index, "users": [str(user) for user in users]}
        case _:
            return {}


def _request(lease: Lease) -> dict[str, object]:
    return {"lease": lease.id, "owner": lease.owner.name, "binding": lease.binding.kind, "name": lease.name}
