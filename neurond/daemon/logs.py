"""The daemon's log on stderr: JSON lines, or columns with colour on a terminal."""

import logging
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from typing import Any, TextIO, cast

import structlog


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
