"""The settings in force: taken at the start, read again at a reload, and asked for by clients.

A reload changes all that it can or, if anything is wrong in the files, nothing. What takes a restart is said by name.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import structlog

from neurond import wire
from neurond.daemon.server import Call, Handler
from neurond.host import systemd
from neurond.settings.sources import Read, Sources
from neurond.settings.table import KEYS, Settings

log = structlog.get_logger()


class Configuring:
    """Knows what is in force and where from. `apply` gets the settings whenever they may have changed."""

    def __init__(self, sources: Sources, read: Read, pid: int) -> None:
        self.sources = sources
        self.settings = read.settings
        self.origins = read.origins
        self.files = read.files
        self.problems: list[str] = []
        """What the last reload found wrong."""
        self.pending: dict[str, tuple[Any, str]] = {}
        """What takes effect at the next start: values and origins by key."""
        self._pid = pid
        self.apply: Callable[[Settings], None] = lambda _: None

    def handlers(self) -> dict[str, Handler]:
        """Return the functions that answer calls, by the method's name."""
        return {"ListSettings": self._list}

    def reload(self) -> None:
        """Read everything again, tell systemd and the log what came of it."""
        systemd.notify(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")
        try:
            status = self._read_again()
        except Exception:  # a daemon that goes on with what it has is better than none
            log.exception("config.failed", follows="the settings from before stay in force")
            status = "the settings could not be read again; those from before stay in force"
        systemd.notify(f"READY=1\nSTATUS={status}")

    def _read_again(self) -> str:
        read = self.sources.read()
        self.problems = [str(finding) for finding in read.findings]
        if self.problems:
            for problem in self.problems:
                log.error("config.wrong", problem=problem, follows="the settings from before stay in force")
            return f"the settings from before stay in force: {self.problems[0]}"
        changed = {name: getattr(read.settings, name) for name in KEYS if self._differs(read, name)}
        now = {name: value for name, value in changed.items() if KEYS[name].reload}
        self.pending = {name: (value, read.origins[name]) for name, value in changed.items() if name not in now}
        self.origins |= {name: origin for name, origin in read.origins.items() if name not in self.pending}
        self.files = read.files
        self.settings = replace(self.settings, **now)
        self.apply(self.settings)
        said = {name: KEYS[name].kind.write(value) for name, value in now.items()}
        log.info("config.reloaded", files=self.files, changed=said)
        for name, (value, origin) in self.pending.items():
            log.warning(
                "config.pending",
                key=name,
                value=KEYS[name].kind.write(value),
                origin=origin,
                follows="it takes effect at the next start",
            )
        if self.pending:
            return f"reloaded; at the next start: {', '.join(self.pending)}"
        return "reloaded"

    def _differs(self, read: Read, name: str) -> bool:
        return bool(getattr(read.settings, name) != getattr(self.settings, name))

    def _list(self, call: Call, request: wire.Nothing) -> wire.Settings:
        del call, request
        return wire.Settings(self._pid, self.files, self.problems, [self._view(name) for name in KEYS])

    def _view(self, name: str) -> wire.Setting:
        following, origin = self.pending.get(name, (None, None))
        value = getattr(self.settings, name)
        return wire.Setting(name, _raw(value), self.origins[name], _raw(following), origin, KEYS[name].reload)


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
