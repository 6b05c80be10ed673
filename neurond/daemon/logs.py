"""The daemon's log on stderr: JSON lines, or columns with colour on a terminal; and what it says of an event."""

import logging
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from typing import Any, TextIO, cast

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


def configure_logs(level: str, *, json: bool | None) -> None:
    """Set up structlog: `level` as in "info"; `json` None means JSON unless stderr is a terminal."""
    as_json = not sys.stderr.isatty() if json is None else json
    renderer: Any = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.dict_tracebacks if as_json else structlog.dev.set_exc_info,
            _first_things_first,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _Stderr())),
        cache_logger_on_first_use=True,
    )


class _Stderr:
    """Standard error, whose failure (a full disk, a reader that is gone) must not stop what is being logged."""

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.flush()


def _first_things_first(logger: Any, method: str, line: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Put time, level and event before the other fields."""
    del logger, method
    return {key: line[key] for key in ("timestamp", "level", "event")} | dict(line)


def fields_of(event: Event) -> dict[str, object]:  # noqa: PLR0911 - a case per event
    """Return what the log says of an event."""
    match event:
        case LeaseGranted(lease) | LeaseQueued(lease):
            said = {"lease": lease.id, "owner": lease.owner.name, "binding": lease.binding.kind, "name": lease.name}
            return said | ({"chips": list(lease.chips)} if lease.chips else {"asked": str(lease.want.count or "set")})
        case LeaseEnded(lease_id, reason) | LeaseDraining(lease_id, reason):
            return {"lease": lease_id, "reason": reason}
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
