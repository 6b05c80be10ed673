"""The daemon's log, and what it says of an event.

It is entries of the systemd journal where stderr is that, columns with colour on a terminal, and JSON lines elsewhere.
"""

import atexit
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

from neurond.daemon.entries import ToJournal
from neurond.host import journald
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
    """Set up structlog: `level` as in "info"; `form` is json, text, journal or auto, which looks at what stderr is."""
    flush_events()  # in the form that was in force
    if form == "auto":
        form = "text" if sys.stderr.isatty() else "journal" if journald.is_behind(sys.stderr.fileno()) else "json"
    least = logging.getLevelNamesMapping()[level.upper()]
    as_text: list[Any] = [structlog.dev.set_exc_info, _first_things_first, structlog.dev.ConsoleRenderer()]
    as_json: list[Any] = [
        structlog.processors.dict_tracebacks,
        _first_things_first,
        structlog.processors.JSONRenderer(),
    ]
    as_entry: list[Any] = [structlog.processors.format_exc_info, _first_things_first, _to_journal]
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *{"text": as_text, "json": as_json, "journal": as_entry}[form],
        ],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _stderr)),
        cache_logger_on_first_use=False,  # else a reload would change nothing for those that exist
    )
    _stderr.wanted = least <= logging.INFO
    _stderr.direct = form != "text" and least <= logging.INFO
    _stderr.journal = _journal() if form == "journal" else None


@lru_cache(maxsize=1)
def _journal() -> ToJournal:
    to_journal = ToJournal(journald.Journald(), journald.Spill(sys.stderr.fileno()))
    atexit.register(to_journal.finish)
    return to_journal


class _Stderr:
    """Standard error, whose failure (a full disk, a reader that is gone) must not stop what is being logged.

    `owed` are events, with their time, whose lines go out before the next other one. `direct` says that what happens to
    the ledger is logged that way, `wanted` that it is logged at all. `journal` takes the lines in its stead.
    """

    def __init__(self) -> None:
        self.owed: list[tuple[float, Event]] = []
        self.direct = False
        self.wanted = True
        self.journal: ToJournal | None = None

    def write(self, text: str) -> None:
        owed, self.owed = self.owed, []
        if self.journal is not None:
            for one in owed:
                self.journal.put(_said(one))
            owed = []
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


def _to_journal(logger: Any, method: str, line: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Send a line to the journal, after the events that come before it; nothing is left to be written."""
    del logger, method
    flush_events()
    if _stderr.journal is not None:
        _stderr.journal.put(line)
    raise structlog.DropEvent


def _line(owed: tuple[float, Event]) -> str:
    return _encode(_said(owed)).decode() + "\n"


def _said(owed: tuple[float, Event]) -> dict[str, object]:
    now, event = owed
    second = int(now)
    return {
        "timestamp": f"{_second(second)}.{int((now - second) * 1e6):06}Z",
        "level": "info",
        "event": event.kind,
        **fields_of(event),
    }


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
