"""Writes what has happened to the journal, once a turn of the loop, before anybody is told.

While the journal can't be written nothing is granted, and what was promised in the turn that found out is taken back.
"""

import asyncio
import time
from collections.abc import Callable

import structlog

from neurond import wire
from neurond.daemon.points import reach
from neurond.host.journal import Journal, JournalError, encode_event
from neurond.ledger.errors import Refused
from neurond.ledger.events import Event, LeaseBound, LeaseDraining, LeaseEnded, LeaseGranted, LeaseRevived
from neurond.ledger.ledger import Ledger

log = structlog.get_logger()

COMPACT_AFTER = 20_000
"""Records after which the journal is replaced by a snapshot."""
RETRY = 0.5
CHANGES = (LeaseBound, LeaseDraining, LeaseRevived, LeaseEnded)

Tell = Callable[[list[tuple[float, Event]], list[bytes]], None]


class Recording:
    """The way from the ledger's events to the journal, and to those who want to know of them.

    `tell` gets the events of a turn, with their times and as they are encoded. `recovered` is called when the journal
    can be written again.
    """

    def __init__(self, ledger: Ledger, journal: Journal, seq: int, tell: Tell, recovered: Callable[[], None]) -> None:
        self._seq = seq
        self._ledger = ledger
        self._journal = journal
        self._tell = tell
        self._recovered = recovered
        self._news: list[tuple[float, Event]] = []
        self._of_turn: list[tuple[float, Event]] = []  # what has been encoded since the last commit
        self._promised: list[tuple[str, asyncio.Future[None]]] = []
        self._compact_after = COMPACT_AFTER
        self._retrying = False
        self._loop = asyncio.get_running_loop()

    def must_work(self) -> None:
        """Raise JournalFull if nothing can be recorded now, so that nothing is begun that could not be kept."""
        if self._ledger.paused:
            raise wire.JournalFull(self._ledger.paused)

    def add(self, now: float, event: Event) -> None:
        """Take an event, to be written at the end of this turn."""
        self._news.append((now, event))

    def commit(self, revoke: Callable[[str], None]) -> dict[str, Refused]:
        """Write the journal; return the leases whose news of this turn could not be written, with the error.

        Those that were granted in this turn are revoked then; what else changed holds, but is not promised.
        """
        broken: dict[str, Refused] = {}
        try:
            self._write()
        except JournalError as error:
            self._pause(error)
            lost = f"{self._ledger.paused}; this holds now, but would be forgotten if neurond crashed"
            broken = {event.id: wire.JournalFull(lost) for _, event in self._of_turn if isinstance(event, CHANGES)}
            granted = [event.lease.id for _, event in self._of_turn if isinstance(event, LeaseGranted)]
            broken |= dict.fromkeys(granted, wire.JournalFull(self._ledger.paused))
            for lease_id in granted:
                revoke(lease_id)
        self._of_turn.clear()
        promised, self._promised = self._promised, []
        for lease_id, future in promised:
            if not future.done():
                future.set_exception(broken[lease_id]) if lease_id in broken else future.set_result(None)
        return broken

    async def recorded(self, lease_id: str) -> None:
        """Wait until what this turn did to a lease is in the journal. Raises JournalFull if it could not be written."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._promised.append((lease_id, future))
        await future

    def _write(self) -> None:
        reach("journal.before-write")
        self._take_news()
        if not self._journal.is_open:
            self._write_snapshot()
        self._journal.flush()
        reach("journal.after-write")
        if self._journal.records > self._compact_after:
            self._compact_after = COMPACT_AFTER
            try:
                self._write_snapshot()
            except JournalError as error:
                self._compact_after = self._journal.records + COMPACT_AFTER
                log.warning("journal.not_compacted", error=str(error), follows="appending to the old file")

    def _take_news(self) -> None:
        """Take what has happened since the last time, and encode it once for all who get it."""
        news, self._news = self._news, []
        if not news:
            return
        self._of_turn += news
        encoded = [encode_event(seq, at, event) for seq, (at, event) in enumerate(news, start=self._seq + 1)]
        self._seq += len(news)
        if self._journal.is_open:  # else the snapshot that it will begin with has this too
            self._journal.append(encoded)
        self._tell(news, encoded)

    def _write_snapshot(self) -> None:
        now = time.time()
        self._journal.start(self._seq, [(now, event) for event in self._ledger.snapshot()])

    def _pause(self, error: JournalError) -> None:
        if not self._ledger.paused:
            log.error("journal.failed", error=str(error), follows="nothing is granted until it can be written")
        self._ledger.paused = f"nothing can be granted or changed: {error}; leases that exist are untouched"
        if not self._retrying:
            self._retrying = True
            self._loop.call_later(RETRY, self._retry)

    def _retry(self) -> None:
        self._retrying = False
        try:
            self._write()
        except JournalError as error:
            self._pause(error)
        else:
            log.info("journal.recovered")
            self._recovered()
