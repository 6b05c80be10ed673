"""The socket: whatever a client sends, it gets a proper answer, and nobody else is harmed."""

import asyncio
import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neurond import wire
from neurond.client import NeurondError
from neurond.daemon.server import Handler, Server
from tests.daemon.support import Raw, frame
from tests.harness import PATIENCE, Daemon, eventually, short_directory

Connect = Callable[[], Raw]

BAD_MESSAGE = "io.neurond.BadMessage"
INVALID_PARAMETER = "org.varlink.service.InvalidParameter"
METHOD_NOT_FOUND = "org.varlink.service.MethodNotFound"
INTERFACE_NOT_FOUND = "org.varlink.service.InterfaceNotFound"

WRONG = {
    "nothing": (b"\0", BAD_MESSAGE),
    "malformed JSON": (b'{"method": \0', BAD_MESSAGE),
    "text after the JSON": (b'{"method": "io.neurond.Describe"} x\0', BAD_MESSAGE),
    "invalid UTF-8": (b'{"method": "io.neurond.\xff\xfe"}\0', BAD_MESSAGE),
    "half of a surrogate pair": (
        b'{"method": "io.neurond.Release", "parameters": {"lease": "\\ud800"}}\0',
        BAD_MESSAGE,
    ),
    "deep nesting": (b'{"more":' + b"[" * 100_000 + b"]" * 100_000 + b"}\0", INVALID_PARAMETER),
    "deep nesting in a field to skip": (b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}\0", BAD_MESSAGE),
    "deep nesting that never ends": (b'{"x":' * 100_000 + b"\0", BAD_MESSAGE),
    "deep nesting in parameters": (
        b'{"method": "io.neurond.Release", "parameters": ' + b'{"lease":' * 100_000 + b"1" + b"}" * 100_001 + b"\0",
        BAD_MESSAGE,
    ),
    "an array": (b"[]\0", INVALID_PARAMETER),
    "null": (b"null\0", INVALID_PARAMETER),
    "no method": (b'{"parameters": {}}\0', INVALID_PARAMETER),
    "a method that is a number": (b'{"method": 7}\0', INVALID_PARAMETER),
    "a flag that is a string": (b'{"method": "io.neurond.Describe", "more": "yes"}\0', INVALID_PARAMETER),
    "parameters that are a list": (frame("io.neurond.Release", [1]), INVALID_PARAMETER),
    "a parameter of the wrong type": (frame("io.neurond.Acquire", {"count": "two"}), INVALID_PARAMETER),
    "a number with a fraction for chips": (frame("io.neurond.Acquire", {"count": 1.5}), INVALID_PARAMETER),
    "a number beyond all floats": (
        b'{"method": "io.neurond.Acquire", "parameters": {"count": 1, "ttl": 1e999}}\0',
        INVALID_PARAMETER,
    ),
    "a missing parameter": (frame("io.neurond.Release"), INVALID_PARAMETER),
    "an unknown parameter": (frame("io.neurond.Acquire", {"count": 1, "gently": True}), INVALID_PARAMETER),
    "a parameter for a method without": (frame("io.neurond.Describe", {"x": 1}), INVALID_PARAMETER),
    "no interface to describe": (frame("org.varlink.service.GetInterfaceDescription"), INVALID_PARAMETER),
    "an unknown method": (frame("io.neurond.Lease"), METHOD_NOT_FOUND),
    "an unknown method of the service": (frame("org.varlink.service.Get"), METHOD_NOT_FOUND),
    "an unknown interface": (frame("io.neuron.Describe"), INTERFACE_NOT_FOUND),
    "a method without an interface": (frame("Describe"), INTERFACE_NOT_FOUND),
    "an empty method": (frame(""), INTERFACE_NOT_FOUND),
    "an unknown interface to describe": (
        frame("org.varlink.service.GetInterfaceDescription", {"interface": "com.example"}),
        INTERFACE_NOT_FOUND,
    ),
}


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    """Give one daemon to all wrong messages: what one of them breaks, the next one sees."""
    with short_directory() as directory:
        daemon = Daemon(directory / "shared")
        try:
            yield daemon.start()
        finally:
            daemon.close()


@pytest.mark.parametrize(("sent", "error"), WRONG.values(), ids=WRONG)
def test_a_wrong_message_gets_its_error_and_harms_nobody(shared: Daemon, sent: bytes, error: str) -> None:
    """A message that makes no sense is answered with the varlink error for it; that connection and others go on."""
    eventually(shared.all_free)
    with Raw(shared) as wrong, Raw(shared) as other:
        held = other.ask("Acquire", count=1)["lease"]
        wrong.socket.sendall(sent)
        name, said = wrong.error()
        assert name == error
        assert said.isprintable()
        assert wrong.ask("Describe")["pid"] == other.ask("Describe")["pid"] == shared.pid
        assert [lease["lease"] for lease in other.ask("ListLeases")["leases"]] == [held]


@pytest.mark.parametrize("method", ["io.neurond.ListLeases", "org.varlink.service.GetInfo"])
def test_parameters_may_be_null_or_missing(connect: Connect, method: str) -> None:
    """A call whose parameters are null, or that has none, is one with empty parameters."""
    connection = connect()
    for text in (f'{{"method": "{method}", "parameters": null}}', f'{{"method": "{method}"}}'):
        connection.socket.sendall(text.encode() + b"\0")
        assert connection.expect()


def test_an_optional_parameter_may_be_null(connect: Connect) -> None:
    """What is optional in the interface may be null as well as missing."""
    nulls = dict.fromkeys(("chips", "all", "pid", "ttl", "name", "wait", "missing_ok", "env"))
    assert connect().ask("Acquire", count=1, **nulls)["chips"] == [0]


@pytest.mark.parametrize("ended", [True, False], ids=["ended by NUL", "endless"])
def test_a_message_that_is_too_long_closes_its_connection(connect: Connect, *, ended: bool) -> None:
    """More than 1 MiB in one message is refused with a sentence that has the limit, and the connection is closed."""
    greedy, other = connect(), connect()
    sent = b'{"method": "' + b"x" * (wire.MAX_MESSAGE + 1) + (b'"}\0' if ended else b"")

    def send() -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            greedy.socket.sendall(sent)

    sender = threading.Thread(target=send)
    sender.start()
    name, said = greedy.error()
    assert name == BAD_MESSAGE
    assert str(wire.MAX_MESSAGE) in said
    assert greedy.reply() is None
    sender.join()
    assert other.ask("Describe")


@pytest.mark.parametrize("calls", [3, 100, 1000])
def test_replies_that_are_due_come_before_the_end(connect: Connect, calls: int) -> None:
    """A client whose message is too long gets all replies to its earlier calls first, then the error, then the close.

    With many calls the replies are more than the socket takes, as the client does not read before it has sent all.
    """
    greedy = connect()
    call = frame("org.varlink.service.GetInterfaceDescription", {"interface": wire.INTERFACE})

    def send() -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            greedy.socket.sendall(call * calls + b"x" * (wire.MAX_MESSAGE + 1))

    sender = threading.Thread(target=send)
    sender.start()
    sender.join(0.2)  # as much as goes in without reading
    for _ in range(calls):
        assert len(greedy.expect()["description"]) > 1000
    assert greedy.error()[0] == BAD_MESSAGE
    assert greedy.reply() is None
    sender.join()


class OnSocket(asyncio.Transport):
    """One end of a pair of sockets, written to at once."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__({"socket": end})
        self._end = end

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._end.sendall(data)

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        self._end.close()


def test_replies_of_the_same_turn_come_before_the_end() -> None:
    """Replies that wait for the journal when a message turns out too long are sent before the error."""

    class Greeting:
        def handlers(self) -> dict[str, Handler]:
            return {"Describe": lambda call, _: call.reply(wire.Done())}

    async def work() -> list[str | None]:
        theirs, ours = socket.socketpair()
        connection = Server([Greeting()], lambda: None, dict).connection()
        connection.connection_made(OnSocket(ours))
        connection.data_received(frame("io.neurond.Describe") * 3 + b"x" * (wire.MAX_MESSAGE + 1))
        await asyncio.sleep(0.01)
        with theirs, theirs.makefile("rb") as file:
            return [json.loads(reply).get("error") for reply in file.read().split(b"\0")[:-1]]

    assert asyncio.run(work()) == [None, None, None, BAD_MESSAGE]


def test_a_long_message_that_is_not_too_long_is_taken(connect: Connect) -> None:
    """A message of just under 1 MiB is read whole."""
    connection = connect()
    connection.send("Release", lease="x" * (wire.MAX_MESSAGE - 100))
    assert connection.error()[0] == "io.neurond.NoSuchLease"


def test_calls_sent_ahead_are_bounded(connect: Connect) -> None:
    """A client that waits for chips may send calls ahead, but not without limit: it is dropped, and its request too."""
    holder, greedy = connect(), connect()
    holder.ask("Acquire", all=True)
    greedy.send("Acquire", count=1, wait=600)
    eventually(lambda: len(holder.ask("ListLeases")["leases"]) == 2)
    call = frame("io.neurond.Describe")
    greedy.socket.sendall(call * (wire.MAX_MESSAGE // len(call) + 2))
    assert greedy.error()[0] == BAD_MESSAGE
    assert greedy.reply() is None
    eventually(lambda: len(holder.ask("ListLeases")["leases"]) == 1)


def test_pipelined_calls_are_answered_in_order(connect: Connect) -> None:
    """Many calls in one send are answered one by one, in their order, wrong ones among them."""
    connection = connect()
    names = [f"no-{number}" for number in range(500)]
    connection.socket.sendall(b"".join(frame("io.neurond.Release", {"lease": name}) for name in names))
    for name in names:
        assert repr(name) in connection.error()[1]


def test_a_call_waits_for_the_one_before_it(connect: Connect) -> None:
    """A call that is sent while an earlier one of the same client waits is answered after that one."""
    holder, waiter = connect(), connect()
    lease = holder.ask("Acquire", all=True)["lease"]
    waiter.send("Acquire", count=1, wait=600)
    waiter.send("Describe")
    eventually(lambda: len(holder.ask("ListLeases")["leases"]) == 2)
    holder.ask("Release", lease=lease)
    assert waiter.expect()["chips"] == [0]
    assert "version" in waiter.expect()


def test_a_message_in_single_bytes_is_put_together(connect: Connect) -> None:
    """A message may arrive byte by byte, and two of them may share a packet."""
    connection = connect()
    for byte in frame("io.neurond.Acquire", {"count": 1}):
        connection.socket.sendall(bytes([byte]))
    assert connection.expect()["chips"] == [0]
    first, second = frame("io.neurond.Describe"), frame("io.neurond.ListLeases")
    connection.socket.sendall(first + second[:7])
    assert "pid" in connection.expect()
    connection.socket.sendall(second[7:])
    assert len(connection.expect()["leases"]) == 1


def test_a_oneway_call_gets_no_reply(connect: Connect) -> None:
    """A call with `oneway` is done but not answered, neither with a result nor with an error."""
    connection = connect()
    connection.send("Acquire", oneway=True, count=1)
    connection.send("Release", oneway=True, lease="never-1")
    connection.socket.sendall(b'{"method": "io.neurond.None", "oneway": true}\0')
    connection.send("ListLeases")
    assert [lease["chips"] for lease in connection.expect()["leases"]] == [[0]]


def test_a_client_that_leaves_without_its_answer_harms_nobody(daemon: Daemon, connect: Connect) -> None:
    """A client may go in the middle of a message, before its reply, or while it is streamed to."""
    other = connect()
    for sent in (b'{"meth', frame("io.neurond.ListChips") * 50, frame("io.neurond.Watch", {"since": 1}, more=True)):
        leaver = connect()
        leaver.socket.sendall(sent)
        leaver.close()
    assert other.ask("Acquire", count=1)["chips"] == [0]
    assert not daemon.logged("server.handler_failed")


def test_a_client_that_has_said_all_gets_its_reply(daemon: Daemon, connect: Connect) -> None:
    """A connection that a client has shut down for sending is answered, then ends with what was bound to it."""
    leaver = connect()
    leaver.send("Acquire", count=1)
    leaver.socket.shutdown(socket.SHUT_WR)
    assert leaver.expect()["chips"] == [0]
    assert leaver.reply() is None
    eventually(daemon.all_free)


def test_replies_never_interleave(daemon: Daemon, connect: Connect) -> None:
    """Large replies to many clients at once, and events to watchers, all arrive whole and with their own content."""
    watcher = connect()
    watcher.send("Watch", more=True)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with Raw(daemon) as connection:
                calls = b"".join(
                    frame("io.neurond.ListChips") + frame("io.neurond.Release", {"lease": f"{number}-{n}"})
                    for n in range(20)
                )
                connection.socket.sendall(calls)
                for n in range(20):
                    assert len(connection.expect()["chips"]) == 16
                    assert repr(f"{number}-{n}") in connection.error()[1]
                connection.ask("Acquire", count=1, name=f"worker {number}")
        except BaseException as failure:  # noqa: BLE001 - it is raised again below
            failures.append(failure)

    threads = [threading.Thread(target=work, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    numbers = [watcher.expect()["event"]["seq"] for _ in range(8)]
    assert numbers == list(range(numbers[0], numbers[0] + 8))


def test_a_watcher_needs_more(connect: Connect) -> None:
    """Watch without `more` is refused, as one reply would be of no use."""
    connection = connect()
    connection.send("Watch")
    assert connection.error()[0] == "io.neurond.InvalidRequest"


def test_events_that_are_not_kept_are_refused(connect: Connect) -> None:
    """A watcher that asks for events of the future is told which events there are."""
    connection = connect()
    connection.send("Watch", more=True, since=10**9)
    name, said = connection.error()
    assert name == "io.neurond.Lagged"
    assert "1000000000" in said


METHODS = [f"io.neurond.{name}" for name in wire.METHODS if name not in {"Simulate", "Watch"}]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
FIELDS = sorted({field for method in wire.METHODS.values() for field in method.parameters.__struct_fields__})
CALLS = st.fixed_dictionaries(
    {"method": st.sampled_from([*METHODS, "org.varlink.service.GetInfo"]) | VALUES},
    optional={
        "parameters": st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4) | VALUES,
        "more": VALUES,
        "oneway": VALUES,
    },
)


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """Make a call that may be right, that has wrong values, that is cut or changed, or bytes that are no call."""
    whole = json.dumps(draw(CALLS | VALUES)).encode()
    kind = draw(st.sampled_from(["whole", "cut", "changed", "bytes"]))
    if kind == "bytes":
        return draw(st.binary(max_size=200))
    at = draw(st.integers(0, len(whole)))
    if kind == "cut":
        return whole[:at]
    return whole if kind == "whole" else whole[:at] + draw(st.binary(min_size=1, max_size=3)) + whole[at + 1 :]


def test_random_messages_harm_nobody(daemon: Daemon, connect: Connect) -> None:
    """Whatever one client sends, the daemon lives, logs no failure of its own, and serves another client."""
    other = connect()

    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.lists(frames(), min_size=1, max_size=4))
    def send(messages: list[bytes]) -> None:
        with Raw(daemon) as fuzzer:
            fuzzer.socket.sendall(b"\0".join(messages) + b"\0")
            fuzzer.socket.shutdown(socket.SHUT_WR)
            while (reply := fuzzer.reply()) is not None:
                check_form(reply)
        assert other.ask("Describe")["pid"] == daemon.pid

    send()
    assert not daemon.logged("server.handler_failed")
    for lease in daemon.leases():  # random calls may lease chips with a time limit
        daemon.call("Release", lease=lease["lease"])
    eventually(daemon.all_free)


def check_form(reply: dict[str, Any]) -> None:
    """Check that this is a varlink reply."""
    assert reply.keys() <= {"parameters", "continues", "error"}
    assert isinstance(reply["parameters"], dict)
    assert reply.get("error", "io.neurond.").startswith(("io.neurond.", "org.varlink.service."))


def test_a_noisy_client_does_not_starve_others(connect: Connect) -> None:
    """While a client sends one wrong message after the other, another leases and releases as always."""
    noisy, other = connect(), connect()
    wrong = [sent for sent, _ in WRONG.values() if len(sent) < 1000]
    random.Random(1).shuffle(wrong)
    for _ in range(20):
        noisy.socket.sendall(b"".join(wrong))
        lease = other.ask("Acquire", count=4, wait=PATIENCE)["lease"]
        other.ask("Release", lease=lease)
        for _ in wrong:
            noisy.error()


@pytest.mark.parametrize("field", ["devices", "volumes", "mounts", "env"])
def test_a_text_with_nul_is_refused_by_its_field(daemon: Daemon, field: str) -> None:
    """What can be no path and no variable is refused as such, and is no failure of neurond's."""
    with pytest.raises(NeurondError, match=f"^{field}: .* has a NUL in it") as refused:
        daemon.call("CheckContainer", image="app", count=1, **{field: ["/dev/\0:/x=1"]})
    assert refused.value.kind == "InvalidRequest"
