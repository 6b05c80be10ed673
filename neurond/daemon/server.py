"""The socket: varlink calls in, replies out. No rule of the ledger is here.

One protocol object a connection, no task and no future a request. What a turn of the loop answers goes out together at
its end, after the journal has what the replies promise.
"""

import asyncio
import socket
import struct
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, Union, cast

import msgspec
import structlog

from neurond import __version__, wire
from neurond.daemon.points import reach
from neurond.ledger.errors import Refused
from neurond.settings.table import Settings

log = structlog.get_logger()

SERVICE = "org.varlink.service"
SO_PEERGROUPS = 59
MOST_FILES = 1 << 20
OWN_FILES = 128
"""Descriptors for everything but clients: pidfds of leases, watches, /proc, the engine."""
CALLS_A_TURN = 16
"""How many calls of one client are answered before the others get their turn."""

SERVICE_DESCRIPTION = """# The Varlink service interface: https://varlink.org/Service
interface org.varlink.service

method GetInfo() -> (vendor: string, product: string, version: string, url: string, interfaces: []string)
method GetInterfaceDescription(interface: string) -> (description: string)

error InterfaceNotFound (interface: string)
error MethodNotFound (method: string)
error MethodNotImplemented (method: string)
error InvalidParameter (parameter: string)
"""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, by the kernel's word at the time of the connect."""

    pid: int
    uid: int
    groups: frozenset[int]


class Envelope(msgspec.Struct):
    """A varlink call around its parameters."""

    method: str
    parameters: msgspec.Raw = msgspec.Raw(b"{}")
    more: bool | None = False
    oneway: bool | None = False
    upgrade: bool | None = False


class ServiceError(Exception):
    """An error of org.varlink.service, with its one parameter."""

    def __init__(self, error: str, parameter: str, value: str) -> None:
        super().__init__(f"{error}: {value}")
        self.reply = {"error": f"{SERVICE}.{error}", "parameters": {parameter: value}}


Answer = wire.Message | Coroutine[Any, Any, wire.Message | None] | None
Handler = Callable[["Call", Any], Answer]


class Answering(Protocol):
    """Answers some of the calls."""

    def handlers(self) -> "dict[str, Handler]":
        """Return the functions that answer, by the method's name."""
        ...


_envelope = msgspec.json.Decoder(Envelope)
_parameters = {name: msgspec.json.Decoder(method.parameters) for name, method in wire.METHODS.items()}
_encode = msgspec.json.Encoder().encode


def _call_of(name: str, parameters: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return the type of a whole call of this method."""
    fields: list[tuple[str, Any, Any]] = [("more", bool | None, False), ("oneway", bool | None, False)]
    tag = f"{wire.INTERFACE}.{name}"
    return msgspec.defstruct(name, [("parameters", parameters), *fields], tag_field="method", tag=tag)


_calls = {name: _call_of(name, method.parameters) for name, method in wire.METHODS.items()}
_UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_decode_call: Callable[[bytes], Any] = msgspec.json.Decoder(Union[tuple(_calls.values())]).decode  # noqa: UP007


class Call(msgspec.Struct, eq=False):
    """One call of one client, from its arrival to its last reply.

    A handler returns the reply, raises Refused, or keeps the call and answers later. `on_gone` is called if the client
    goes away before that. `promises` names the lease of which the reply says something that the journal must have
    before. (A struct, as one is made for each request, and that takes a fifth of the time of a plain class.)
    """

    connection: "Connection"
    more: bool = False
    oneway: bool = False
    promises: str | None = None
    on_gone: Callable[[], None] | None = None
    task: "asyncio.Task[None] | None" = None

    @property
    def peer(self) -> Peer:
        """Who calls."""
        return self.connection.peer

    def reply(self, message: wire.Message, *, last: bool = True) -> None:
        """Send a reply, which the handler did not return."""
        head = b'{"parameters":' if last else b'{"continues":true,"parameters":'
        self.connection.send(self, head + _encode(message) + b"}\0", last=last)

    def fail(self, error: Refused) -> None:
        """Send an error as the last reply."""
        self.connection.send(self, _failure(error), last=True)

    def fail_raw(self, reply: object) -> None:
        """Send an error of the varlink service itself."""
        self.connection.send(self, _encode(reply) + b"\0", last=True)

    async def writable(self) -> bool:
        """Wait until the client has read enough for more to be sent; False if it is gone."""
        await self.connection.may_write.wait()
        return not self.connection.gone

    def unread(self) -> int:
        """Return how many bytes wait for the client to read them."""
        return self.connection.unread()


def _nowhere(_: bytes) -> None:
    """Write to a connection that is gone."""


def _failure(error: Refused) -> bytes:
    return _encode({"error": f"{wire.INTERFACE}.{error.kind}", "parameters": error.parameters()}) + b"\0"


class Server:
    """All connections. `commit` writes the journal, and returns the leases whose news could not be written.

    `files` is how many descriptors may be open here.

    What was read in one turn of the loop is answered together, at the beginning of the next: `begin` is called before,
    `commit` after it, then the replies leave.
    """

    def __init__(
        self,
        answering: Iterable[Answering],
        begin: Callable[[], None],
        commit: Callable[[], dict[str, Refused]],
        files: int = MOST_FILES,
    ) -> None:
        self.files = files
        self.limit(Settings())
        self.handlers = {name: handler for one in answering for name, handler in one.handlers().items()}
        self.handler_of = {_calls[name]: handler for name, handler in self.handlers.items()}
        self.on_disconnect: list[Callable[[Connection], None]] = []
        self.connections: set[Connection] = set()
        self.users: Counter[int] = Counter()
        """How many connections each uid has."""
        self._begin = begin
        self._commit = commit
        self._ready: list[Connection] = []
        self._outgoing: list[tuple[Connection, bytes, str | None]] = []
        self._leaving: list[Connection] = []
        self._turn_due = False
        self.loop = asyncio.get_running_loop()

    def limit(self, settings: Settings) -> None:
        """Have no more clients than this from now on; those who are there stay."""
        self.most = min(settings.most_connections, max(self.files // 4, self.files - OWN_FILES))
        self.most_of_a_user = settings.most_connections_per_user

    def connection(self) -> "Connection":
        """Make the protocol of a new connection."""
        return Connection(self)

    def flush_soon(self) -> None:
        """Have the journal written and replies sent when this turn of the loop is over."""
        if not self._turn_due:
            self._turn_due = True
            self.loop.call_soon(self._turn)

    def answer_soon(self, connection: "Connection") -> None:
        """Have the calls of a connection answered when all others have been read that are there to be read."""
        self._ready.append(connection)
        if not self._turn_due:
            self.flush_soon()

    def send(self, connection: "Connection", data: bytes, promises: str | None = None) -> None:
        """Send these bytes at the end of this turn."""
        self._outgoing.append((connection, data, promises))
        if not self._turn_due:
            self.flush_soon()

    def send_last(self, connection: "Connection", data: bytes) -> None:
        """Send these bytes at the end of this turn, then close the connection."""
        self.send(connection, data)
        self._leaving.append(connection)

    def _turn(self) -> None:
        ready, self._ready = self._ready, []
        try:
            if ready:
                self._begin()
            for connection in ready:
                connection.answer()
        finally:
            self._turn_due = False
            if self._ready:  # who has more to ask than its share of this turn
                self.flush_soon()
        broken = self._commit()
        reach("reply.before-send")
        outgoing, self._outgoing = self._outgoing, []
        for connection, data, promises in outgoing:
            connection.write(_failure(broken[promises]) if broken and promises in broken else data)
        leaving, self._leaving = self._leaving, []
        for connection in leaving:
            connection.close()


class Connection(asyncio.Protocol):
    """One client. Its calls are answered one after the other, in their order."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.peer = Peer(0, -1, frozenset())
        self.gone = False
        self.refused = False
        """Whether the client hears no more than what is on its way."""
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.write: Callable[[bytes], None] = _nowhere
        """Writes to the socket now."""
        self._transport: asyncio.Transport | None = None
        self._unread = b""
        self._current: Call | None = None
        self._due = False
        self._reading = True

    # -- asyncio ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the peer's credentials from the kernel."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is not derived from it
        self.write = self._transport.write
        sock = transport.get_extra_info("socket")
        pid, uid, gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        groups = b""
        with suppress(OSError):  # ERANGE for a user of over 256 groups, who is then taken to be in the first only
            groups = sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, 4 * 256)
        self.peer = Peer(pid, uid, frozenset({gid, *struct.unpack(f"{len(groups) // 4}I", groups)}))
        self.server.connections.add(self)
        self.server.users[uid] += 1
        if len(self.server.connections) > self.server.most:
            self._refuse(f"{self.server.most} clients are connected, which is the limit: try again later")
        elif self.server.users[uid] > self.server.most_of_a_user and uid != 0:
            self._refuse(
                f"{self.server.most_of_a_user} clients of one user are connected, which is the limit: close some"
            )

    def data_received(self, data: bytes) -> None:
        """Take in whole messages, each ended by NUL."""
        if self.refused:
            return
        self._unread += data
        if not self._due:
            self._due = True
            self.server.answer_soon(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel what the client waits for, and tell whose leases were bound to the connection."""
        del exc
        self.gone = True
        self.write = _nowhere
        self._unread = b""
        if self in self.server.connections:
            self.server.connections.discard(self)
            self.server.users[self.peer.uid] -= 1
        self.may_write.set()
        call, self._current = self._current, None
        if call is not None and call.on_gone is not None:
            call.on_gone()
        for told in self.server.on_disconnect:
            told(self)

    def pause_writing(self) -> None:
        """Note that the client does not read as fast as we write: no further call of its is read until it does."""
        self.may_write.clear()
        self._read(on=False)

    def resume_writing(self) -> None:
        """Note that the client has read enough."""
        self.may_write.set()
        self._answer_soon()

    def _refuse(self, sentence: str) -> None:
        """Say why this connection is over, after what is on its way, and close it."""
        self.refused = True
        self._unread = b""
        self.server.send_last(self, _failure(wire.BadMessage(sentence)))

    # -- replies ----------------------------------------------------------------------------------------------------

    def send(self, call: Call, data: bytes, *, last: bool) -> None:
        """Queue a reply for the end of this turn; after the last one, the next call of the client gets its turn."""
        if self.gone or call is not self._current:
            return
        if not call.oneway:
            self.server.send(self, data, call.promises)
        if last:
            self._current = None
            if self._unread:
                self._answer_soon()

    def unread(self) -> int:
        """Return how many bytes wait for the client to read them."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def close(self) -> None:
        """Send what is pending, then close."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    # -- calls ------------------------------------------------------------------------------------------------------

    def _answer_soon(self) -> None:
        if not self._due:
            self._due = True
            self.server.answer_soon(self)

    def _read(self, *, on: bool) -> None:
        if on != self._reading and self._transport is not None and not self._transport.is_closing():
            self._reading = on
            self._transport.resume_reading() if on else self._transport.pause_reading()

    def answer(self) -> None:
        """Answer the calls that have been read, as many as are this client's share of a turn."""
        self._due = False
        data = self._unread
        if self._current is None and self._reading and 0 < data.find(b"\0") + 1 == len(data) <= wire.MAX_MESSAGE:
            self._unread = b""  # one whole call, as nearly always
            self._dispatch(data[:-1])
            return
        for _ in range(CALLS_A_TURN):
            if self._current is not None or self.gone or self.refused or not self.may_write.is_set():
                break
            message, nul, rest = self._unread.partition(b"\0")
            if not nul or len(message) > wire.MAX_MESSAGE:
                break
            self._unread = rest
            self._dispatch(message)
        else:
            self._read(on=False)
            self._answer_soon()
            return
        self._read(on=self.may_write.is_set())
        # A client may send ahead while a call of its own is under way, but not without bound.
        if len(self._unread) > wire.MAX_MESSAGE and not self.gone and self.may_write.is_set():
            self._refuse(f"a message or calls sent ahead are longer than {wire.MAX_MESSAGE} bytes; closing")

    def _dispatch(self, message: bytes) -> None:
        """Have one call answered."""
        call = self._current = Call(self)
        try:
            try:
                asked = _decode_call(message)
            except _UNDECODABLE:
                result = self._handle_other(call, message)
            else:
                if asked.more or asked.oneway:
                    call.more, call.oneway = bool(asked.more), bool(asked.oneway)
                result = self.server.handler_of[type(asked)](call, asked.parameters)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets an answer
            _answer_error(call, message, error)
        else:
            if isinstance(result, wire.Message):
                self._current = None
                if not call.oneway:
                    self.server.send(self, b'{"parameters":' + _encode(result) + b"}\0", call.promises)
            elif result is not None:
                call.task = self.server.loop.create_task(_finish(call, result))

    def _handle_other(self, call: Call, message: bytes) -> Answer:
        """Take a call apart: one of varlink's own, one without parameters, or one with something wrong in it."""
        envelope = _envelope.decode(message)
        call.more, call.oneway = bool(envelope.more), bool(envelope.oneway)
        interface, _, name = envelope.method.rpartition(".")
        parameters = b"{}" if bytes(envelope.parameters) == b"null" else envelope.parameters
        if interface == wire.INTERFACE and name in self.server.handlers:
            return self.server.handlers[name](call, _parameters[name].decode(parameters))
        return _service(interface, name, parameters)


async def _finish(call: Call, work: Coroutine[Any, Any, wire.Message | None]) -> None:
    try:
        message = await work
    except Refused as error:
        call.fail(error)
    except asyncio.CancelledError:
        with suppress(Exception):
            call.fail(wire.BadMessage("neurond stops"))
        raise
    except Exception:
        log.exception("server.handler_failed")
        call.fail(wire.BadMessage("neurond failed on this call: its log has the details"))
    else:
        if message is not None:
            call.reply(message)


def _answer_error(call: Call, message: bytes, error: Exception) -> None:
    match error:
        case Refused():
            call.fail(error)
        case ServiceError():
            call.fail_raw(error.reply)
        case msgspec.ValidationError():
            call.fail_raw(ServiceError("InvalidParameter", "parameter", str(error)).reply)
        case msgspec.DecodeError() | UnicodeDecodeError() | RecursionError():
            call.fail(wire.BadMessage(f"not a varlink call: {error}"))
        case _:
            log.error("server.handler_failed", exc_info=error, call=message[:100].decode(errors="replace"))
            call.fail(wire.BadMessage("neurond failed on this call: its log has the details"))


class _Described(msgspec.Struct):
    interface: str


class _Info(wire.Message, omit_defaults=False):
    vendor: str
    product: str
    version: str
    url: str
    interfaces: list[str]


class _Description(wire.Message):
    description: str


def _service(interface: str, name: str, parameters: msgspec.Raw | bytes) -> wire.Message:
    """Answer the calls that every varlink service answers."""
    if interface == SERVICE and name == "GetInfo":
        return _Info(wire.VENDOR, wire.PRODUCT, __version__, wire.URL, [SERVICE, wire.INTERFACE])
    if interface == SERVICE and name == "GetInterfaceDescription":
        wanted = msgspec.json.decode(parameters, type=_Described).interface
        if wanted == wire.INTERFACE:
            return _Description(wire.interface_description())
        if wanted == SERVICE:
            return _Description(SERVICE_DESCRIPTION)
        raise ServiceError("InterfaceNotFound", "interface", wanted)
    if interface not in {SERVICE, wire.INTERFACE}:
        raise ServiceError("InterfaceNotFound", "interface", interface)
    raise ServiceError("MethodNotFound", "method", f"{interface}.{name}")
