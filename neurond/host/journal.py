"""The journal: every event of the ledger, in one append-only file in the runtime directory.

One line an event: the CRC-32 of the JSON in eight hex digits, a blank, the JSON. The first line is the header: format
version, boot id, and the sequence number before the first event. The file lives on tmpfs, where a reboot voids every
lease anyway, so nothing is synced; the boot id says the same where the directory is on a disk.
"""

import errno
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import msgspec

from neurond.ledger.events import KINDS, Event, LeaseGranted
from neurond.ledger.leases import BINDINGS, Binding, Lease

VERSION = 1
NAME = "journal"

Verdict = Literal["new", "whole", "torn", "other boot", "corrupt", "newer"]


@dataclass(frozen=True, slots=True)
class Record:
    """One event with its sequence number and the wall clock at which it happened."""

    seq: int
    at: float
    event: Event


@dataclass(slots=True)
class History:
    """What an earlier daemon left: the records that could be read, and how whole the file was.

    `seq` is the number of the last record, `note` a sentence for the log. A damaged file gives all the records that
    could be read.
    """

    verdict: Verdict
    records: list[Record] = field(default_factory=list)
    seq: int = 0
    note: str = ""


class JournalError(Exception):
    """The journal could not be written; nothing was lost, and the next attempt writes everything owed."""


_encode = msgspec.json.Encoder().encode

# msgspec takes four times as long for a dataclass as for a struct of its own, so leases are copied into one. What is as
# by default is left out.
_LEASE_FIELDS = [one.name for one in fields(Lease)]
_Lease = msgspec.defstruct(
    "_Lease",
    [(one.name, Any) if one.default is MISSING else (one.name, Any, one.default) for one in fields(Lease)],
    omit_defaults=True,
    gc=False,
)
_lease_values = attrgetter(*_LEASE_FIELDS)
_Granted = msgspec.defstruct("_Granted", [("lease", Any)], gc=False)
_Record = msgspec.defstruct("_Record", [("seq", int), ("at", float), ("event", str), ("data", Any)], gc=False)


def _binding(wanted: type, raw: Any) -> Any:
    if wanted is Binding:
        return msgspec.convert(raw, BINDINGS[raw["kind"]])
    raise NotImplementedError(wanted)


def _line(body: bytes) -> bytes:
    return b"%08x %s\n" % (crc32(body), body)


def _content(line: bytes) -> Any:
    """Return the JSON of one line; raises ValueError if the checksum or the form is wrong."""
    checksum, _, body = line.partition(b" ")
    if len(checksum) != 8 or int(checksum, 16) != crc32(body):
        raise ValueError("checksum")
    return msgspec.json.decode(body)


def _record(content: Any) -> Record:
    event = msgspec.convert(content["data"], KINDS[content["event"]], dec_hook=_binding)
    return Record(content["seq"], content["at"], event)


def encode_event(seq: int, at: float, event: Event) -> bytes:
    """Return one event as JSON, in the form that journal and watchers share."""
    data = _Granted(_Lease(*_lease_values(event.lease))) if isinstance(event, LeaseGranted) else event
    return _encode(_Record(seq, at, event.kind, data))


def read(path: Path, boot: str) -> History:
    """Read a journal without changing it; see History for what comes back."""
    try:
        *lines, tail = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return History("new")
    try:
        header = _content(lines[0])
        version, wrote, seq = header["journal"], header["boot"], header["seq"]
    except (IndexError, KeyError, TypeError, ValueError):
        return History("corrupt", note=f"{path} does not begin with a header of neurond's")
    if version != VERSION:
        return History("newer", note=f"{path} has format {version!r}, this neurond reads format {VERSION}")
    history = History("whole", seq=seq)
    damaged = [n for n, line in enumerate(lines[1:], start=2) if not _take(line, history)]
    if damaged:
        history.verdict = "corrupt"
        history.note = f"{path}: line {damaged[0]} of {len(lines)} is damaged or missing ({len(damaged)} in all)"
    elif tail and not _take(tail, history):
        history.verdict = "torn"
        history.note = f"{path}: the last record was cut short ({len(tail)} bytes dropped)"
    if wrote != boot:
        history.verdict = "other boot"
        history.note = f"{path} was written in another boot ({wrote})"
    return history


def _take(line: bytes, history: History) -> bool:
    """Add the record of one line; False if it is damaged or does not follow on the one before."""
    try:
        record = _record(_content(line))
    except (KeyError, TypeError, ValueError):
        return False
    follows = record.seq == history.seq + 1
    history.seq = record.seq
    history.records.append(record)
    return follows


def _write_all(fd: int, content: bytes) -> None:
    """Write in one call; a short write is what a file system does that has just become full."""
    if os.write(fd, content) != len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Journal:
    """The file that events are appended to. Use `start` to make one."""

    def __init__(self, directory: Path, boot: str) -> None:
        self.path = directory / NAME
        self.boot = boot
        self.failure: OSError | None = None
        """The error of the last write, while something is owed to the file."""
        self.records = 0
        """How many records the file has since it was last compacted."""
        self._fd = -1
        self._size = 0
        self._owed: list[bytes] = []

    @property
    def is_open(self) -> bool:
        """Whether there is a file to append to."""
        return self._fd >= 0

    def keep_aside(self) -> Path:
        """Keep a file that can't be used as it stands, so that somebody can look at it.

        It stays at its own place too until `start` replaces it: a crash in between must find it there.
        """
        aside = self.path.with_name(f"{NAME}.{time.strftime('%Y%m%dT%H%M%S')}.{time.time_ns() % 10**9:09}")
        os.link(self.path, aside)
        return aside

    def start(self, seq: int, snapshot: Iterable[tuple[float, Event]]) -> None:
        """Begin a new file with these events, in place of the old one, by rename.

        `seq` is the number of the last event of the snapshot. Raises JournalError; the old file then stays in use.
        """
        events = list(snapshot)
        before = seq - len(events)
        lines = [_line(_encode({"journal": VERSION, "boot": self.boot, "seq": before}))]
        lines += [_line(encode_event(before + n, at, event)) for n, (at, event) in enumerate(events, start=1)]
        content = b"".join(lines)
        fresh = self.path.with_name(NAME + ".new")
        fd = -1
        try:
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
            _write_all(fd, content)
            fresh.rename(self.path)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            with suppress(OSError):
                fresh.unlink()
            if not self.is_open:
                self.failure = error
            raise self._error(error) from error
        self.close()
        self._fd, self._size, self.records = fd, len(content), 0
        self._owed.clear()
        self.failure = None

    def append(self, encoded: Iterable[bytes]) -> None:
        """Owe these events, as `encode_event` gives them, to the file; `flush` writes them."""
        self._owed += map(_line, encoded)

    def flush(self) -> None:
        """Write all that is owed, in one write. Raises JournalError; then the file ends at the last whole record."""
        if not self._owed:
            return
        content = b"".join(self._owed)
        try:
            _write_all(self._fd, content)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._fd, self._size)
            self.failure = error
            raise self._error(error) from error
        self._size += len(content)
        self.records += len(self._owed)
        self._owed.clear()
        self.failure = None

    def close(self) -> None:
        """Close the file; what was owed and not flushed is dropped."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _error(self, error: OSError) -> JournalError:
        return JournalError(f"the journal {self.path} can't be written: {error.strerror}")
