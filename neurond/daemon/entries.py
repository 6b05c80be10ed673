"""Lines of the log as entries of the systemd journal: their fields, and getting them there without waiting for it."""

import asyncio
import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import msgspec

from neurond.daemon.messages import MESSAGES
from neurond.host.journald import Journald, Spill, encode
from neurond.ledger.words import ranges

Line = Mapping[str, Any]
"""A line of the log: timestamp, level and event, and then what it is about."""

PRIORITIES = {"debug": "7", "info": "6", "warning": "4", "error": "3", "critical": "2"}
PATIENCE = 1.0
"""Seconds that entries wait for a journal that is busy, before they go to stderr as lines."""
MOST_WAITING = 10_000
"""Entries that may wait."""
AGAIN = 0.01
"""Seconds until a busy journal is tried again."""
AFTER_COLON = ("problem", "reason", "error")
AFTER_SEMICOLON = ("note", "follows")
LONGEST_NAME = 64

_encode_line = msgspec.json.Encoder(enc_hook=str).encode


def fields_of_line(line: Line) -> Iterator[tuple[str, str]]:
    """Yield the fields of a line's entry: what a list has comes one by one, and chips always as NEUROND_CHIP."""
    event = line["event"]
    yield "MESSAGE", sentence_of(line)
    yield "PRIORITY", PRIORITIES.get(line["level"], "6")
    yield "SYSLOG_IDENTIFIER", "neurond"
    if event in MESSAGES:
        yield "MESSAGE_ID", MESSAGES[event].id
    for key, value in line.items():
        if key in {"timestamp", "level"} or value is None or value == "":
            continue
        if isinstance(value, list):
            name = "NEUROND_CHIP" if key == "chips" else _name(key)
            for one in value:
                yield name, str(one)
        elif isinstance(value, dict):
            for one, what in value.items():
                yield _name(key), f"{one} = {what}"
        else:
            yield _name(key), str(value)


def sentence_of(line: Line) -> str:
    """Say what a line says, for people."""
    event = line["event"]
    message = MESSAGES.get(event)
    sentence = message.sentence.format_map(_Words(line)) if message else event
    for mark, key in _appended(event):
        if line.get(key):
            sentence += f"{mark}{line[key]}"
    if line.get("exception"):
        sentence += f": {line['exception'].rstrip().rpartition(chr(10))[2]}"
    return sentence


@lru_cache(maxsize=256)
def _appended(event: str) -> list[tuple[str, str]]:
    """Return which fields are said after the sentence of an event, as they are not in it, and by which mark."""
    sentence = MESSAGES[event].sentence if event in MESSAGES else ""
    marks = [*((": ", key) for key in AFTER_COLON), *(("; ", key) for key in AFTER_SEMICOLON)]
    return [(mark, key) for mark, key in marks if f"{{{key}}}" not in sentence]


class _Words(dict[str, Any]):
    """The fields of a line as words of a sentence."""

    def __getitem__(self, key: str) -> str:
        value = self.get(key)
        if isinstance(value, list):
            return ranges(value) if key == "chips" else ", ".join(map(str, value)) or "none"
        if isinstance(value, dict):
            return ", ".join(f"{one} = {what}" for one, what in value.items()) or "nothing"
        return "unknown" if value is None or value == "" else str(value)


@lru_cache(maxsize=256)
def _name(key: str) -> str:
    return ("NEUROND_" + re.sub("[^A-Z0-9]", "_", key.upper()))[:LONGEST_NAME]


class ToJournal:
    """Sends lines to the journal in their order; those that it does not take go to stderr, as JSON.

    A journal that is busy gets them a little later, one that is gone or stays busy does not. Threads may log too.
    """

    def __init__(self, journal: Journald, spill: Spill) -> None:
        self._journal = journal
        self._spill = spill
        self._waiting: deque[tuple[float, bytes, Line]] = deque()
        self._lock = threading.RLock()
        self._called = False

    def put(self, line: Line) -> None:
        """Send a line, or keep it for a moment."""
        with self._lock:
            self._waiting.append((time.monotonic(), encode(fields_of_line(line)), line))
            if not self._called:  # else it is tried soon, and until then the journal is taken to be busy
                self._try()
            elif len(self._waiting) > MOST_WAITING:
                self._give_up()

    def finish(self) -> None:
        """Send all that waits, or write it to stderr: no more will be heard of us."""
        with self._lock:
            self._send_waiting()
            self._give_up()

    def _again(self) -> None:
        with self._lock:
            self._called = False
            self._try()

    def _try(self) -> None:
        busy = self._send_waiting()
        if busy and time.monotonic() - self._waiting[0][0] > PATIENCE:
            self._give_up()
        self._spill.flush()
        if self._spill.lost and not busy and not self._spill.owes:
            self._say_what_is_lost()
        if self._waiting or self._spill.owes:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:  # before or after the loop, or in a thread: nobody will call us
                self._give_up()
            else:
                self._called = True
                loop.call_later(AGAIN, self._again)

    def _say_what_is_lost(self) -> None:
        lost, self._spill.lost = self._spill.lost, 0
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = {"timestamp": now, "level": "error", "event": "log.lost", "lines": lost}
        self._waiting.append((time.monotonic(), encode(fields_of_line(line)), line))
        self._send_waiting()
        if self._spill.lost:  # this line too
            self._spill.lost = lost

    def _send_waiting(self) -> bool:
        """Send what waits; return whether the journal is busy. What it will never take goes to stderr."""
        while self._waiting:
            _, entry, line = self._waiting[0]
            try:
                self._journal.send(entry)
            except BlockingIOError:
                return True
            except OSError:
                self._write(line)
            self._waiting.popleft()
        return False

    def _give_up(self) -> None:
        """Write all that waits to stderr."""
        while self._waiting:
            self._write(self._waiting.popleft()[2])

    def _write(self, line: Line) -> None:
        self._spill.write(_encode_line(line) + b"\n")
        self._spill.flush()
