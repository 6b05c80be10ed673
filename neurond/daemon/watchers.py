"""Clients that follow the events, and the last events for those who come late."""

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec

from neurond import wire
from neurond.daemon.server import Call, Connection
from neurond.ledger.errors import InvalidRequest

KEPT_EVENTS = 10_000
MOST_UNREAD = 1 << 20
"""Bytes that a watcher may leave unread before it is dropped, with the number to go on from."""
AT_ONCE = 256
"""How many earlier events are sent at once; the next ones when the client has read them."""


class Watchers:
    """Streams events to those who watch; none is buffered beyond its socket."""

    def __init__(self, seq: int) -> None:
        self._events: deque[bytes] = deque(maxlen=KEPT_EVENTS)
        self._told: dict[Call, int] = {}
        self._seq = seq

    def happened(self, encoded: Sequence[bytes]) -> None:
        """Keep the next events, as `encode_event` gives them; `tell` sends them."""
        self._seq += len(encoded)
        self._events += encoded

    def watch(self, call: Call, request: wire.Watch) -> Coroutine[Any, Any, None] | None:
        """Answer the call Watch, for as long as the client likes."""
        if not call.more:
            raise InvalidRequest("Watch streams events: call it with more")
        oldest = self._seq - len(self._events) + 1
        if request.since == 0:  # all that is kept
            request.since = oldest
        if request.since is not None and not oldest <= request.since <= self._seq + 1:
            raise wire.Lagged(f"event {request.since} is not kept: the events {oldest} to {self._seq} are")
        if request.since is not None and self._seq - request.since > AT_ONCE:
            return self._catch_up(call, request.since - 1)
        self._tell(call, self._seq if request.since is None else request.since - 1)
        return None

    async def _catch_up(self, call: Call, told: int) -> None:
        """Send what has happened before in portions, as fast as the client reads them."""
        while self._seq - told > AT_ONCE:
            if not self._send(call, told, AT_ONCE):
                return
            told += AT_ONCE
            await asyncio.sleep(0)  # what was sent goes out at the end of the turn
            if not await call.writable():
                return
        self._tell(call, told)

    def tell(self) -> None:
        """Send what has happened since the last time; who reads too slowly is dropped."""
        for call, told in list(self._told.items()):
            self._tell(call, told)

    def disconnected(self, connection: Connection) -> None:
        """Take note that a client is gone."""
        for call in [call for call in self._told if call.connection is connection]:
            del self._told[call]

    def _tell(self, call: Call, told: int) -> None:
        if self._send(call, told, self._seq - told):
            self._told[call] = self._seq
        else:
            self._told.pop(call, None)

    def _send(self, call: Call, told: int, count: int) -> bool:
        """Send so many events after number `told`; False, and the call is over, if the client reads too slowly."""
        missing = self._seq - told
        if call.unread() > MOST_UNREAD or missing > len(self._events):
            call.fail(wire.Lagged(f"events are read too slowly: go on with since={told + 1}"))
            return False
        for number in range(missing, missing - count, -1):
            call.reply(wire.Watched(msgspec.Raw(self._events[-number])), last=False)
        return True
