"""Clients that others wrote: the PyPI packages varlink and asyncvarlink, on the interface as the daemon serves it."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal, TypedDict

import pytest
import varlink
from asyncvarlink import (
    TypedVarlinkErrorReply,
    VarlinkClientProtocol,
    VarlinkInterface,
    connect_unix_varlink,
    varlinkmethod,
)
from asyncvarlink.serviceinterface import VarlinkServiceInterface

from neurond import __version__, wire
from tests.daemon.support import Raw
from tests.harness import PATIENCE, Daemon, eventually

METHODS = re.compile(r"^method (\w+)", re.MULTILINE)
ERRORS = re.compile(r"^error (\w+)", re.MULTILINE)


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command line of the package varlink."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "varlink.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def call(daemon: Daemon, method: str, **parameters: Any) -> dict[str, Any]:
    """Call a method with the command line of the package varlink."""
    done = command("call", f"unix:{daemon.socket}/io.neurond.{method}", json.dumps(parameters))
    assert done.returncode == 0, done.stderr
    reply: dict[str, Any] = json.loads(done.stdout)
    return reply


def described(daemon: Daemon) -> str:
    """Return the interface description that the daemon serves."""
    return command("help", f"unix:{daemon.socket}/io.neurond").stdout


# -- varlink ----------------------------------------------------------------------------------------------------------


def test_varlink_shows_the_service(daemon: Daemon) -> None:
    """`varlink info` names vendor, version and interfaces."""
    shown = command("info", f"unix:{daemon.socket}")
    assert shown.returncode == 0, shown.stderr
    assert __version__ in shown.stdout
    assert shown.stdout.split("Interfaces:")[1].split() == ["org.varlink.service", "io.neurond"]


def test_varlink_parses_the_interface(daemon: Daemon) -> None:
    """`varlink help` gives a description that the package's own parser reads, with all methods and errors in it."""
    text = described(daemon)
    interface = varlink.Interface(text)
    assert interface.name == "io.neurond"
    assert METHODS.findall(text) == list(wire.METHODS)
    assert ERRORS.findall(text) == [error.kind for error in wire.ERRORS]
    for name in wire.METHODS:
        assert interface.get_method(name).name == name


def test_the_service_interface_is_described_too(daemon: Daemon) -> None:
    """The interface org.varlink.service is served as well, and parsed."""
    text = command("help", f"unix:{daemon.socket}/org.varlink.service").stdout
    assert varlink.Interface(text).get_method("GetInfo")


def test_varlink_leases_and_releases(daemon: Daemon) -> None:
    """The command line of the package varlink lists chips, leases them for a time, and releases them."""
    assert len(call(daemon, "ListChips")["chips"]) == 16
    acquired = call(daemon, "Acquire", count=4, ttl=60, name="by varlink")
    assert acquired["chips"] == [0, 1, 2, 3]
    assert daemon.leases()[0]["name"] == "by varlink"
    assert call(daemon, "Release", lease=acquired["lease"])["state"] in {"draining", "ended"}
    eventually(daemon.all_free)


def test_varlink_understands_an_error(daemon: Daemon) -> None:
    """The package varlink reports an error of ours by its name and sentence."""
    refused = command("call", f"unix:{daemon.socket}/io.neurond.Acquire", '{"count": 3, "ttl": 60}')
    assert "io.neurond.InvalidRequest" in refused.stderr
    assert "1 and 4" in refused.stderr


# -- every error is in the description --------------------------------------------------------------------------------


def provoke(daemon: Daemon, method: str, **parameters: Any) -> str:
    """Make a call that fails, and return the error."""
    with Raw(daemon) as connection:
        connection.send(method, **parameters)
        return connection.error()[0]


def fill_and_provoke(daemon: Daemon, **parameters: Any) -> str:
    """Lease all chips, ask for one more, and return the error."""
    daemon.call("Acquire", all=True, ttl=60)
    return provoke(daemon, "Acquire", count=1, **parameters)


def provoke_bad_message(daemon: Daemon) -> str:
    """Send what is no JSON, and return the error."""
    with Raw(daemon) as connection:
        connection.socket.sendall(b"{\0")
        return connection.error()[0]


PROVOKED: dict[str, Callable[[Daemon], str]] = {
    "InvalidRequest": lambda daemon: provoke(daemon, "Acquire", count=3),
    "NoSuchChip": lambda daemon: provoke(daemon, "Acquire", chips=[77]),
    "NoSuchLease": lambda daemon: provoke(daemon, "Release", lease="none-1"),
    "NoCapacity": fill_and_provoke,
    "WaitTimedOut": lambda daemon: fill_and_provoke(daemon, wait=0.01),
    "BadMessage": provoke_bad_message,
    "EngineFailed": lambda daemon: provoke(daemon, "ListContainers"),
    "Lagged": lambda daemon: provoke(daemon, "Watch", since=10**9, more=True),
}


@pytest.mark.parametrize(("error", "provoked"), PROVOKED.items(), ids=PROVOKED)
def test_an_error_is_in_the_description(daemon: Daemon, error: str, provoked: Callable[[Daemon], str]) -> None:
    """Each error that the daemon sends is one that its description names."""
    assert provoked(daemon) == f"io.neurond.{error}"
    assert error in ERRORS.findall(described(daemon))


# -- asyncvarlink -----------------------------------------------------------------------------------------------------


class Holder(TypedDict, total=False):
    pid: int
    user: str
    command: str
    container: str
    container_id: str


class NeuronProcess(TypedDict):
    pid: int
    command: str
    neuron_runtime_version: str


class ChipView(TypedDict):
    neuron_device: int
    state: str
    lease: str | None
    owner: str | None
    since: float | None
    name: str | None
    holders: list[Holder]
    problem: str | None
    enforcement: str | None
    foreign: list[Holder]
    node: str
    device: str
    bdf: str | None
    cpu_affinity: str | None
    numa_node: str | None
    connected_to: list[int] | None
    connected_from: str
    nc_count: int | None
    cores_from: str
    logical_neuroncore_config: int | None
    memory_size: int | None
    neuroncore_ids: list[int]
    serial_number: str | None
    device_name: str | None
    neuron_processes: list[NeuronProcess]


class Chips(TypedDict):
    instance_type: str
    shape: str
    chips: list[ChipView]
    note: str | None


class Acquired(TypedDict):
    lease: str
    chips: list[int]
    env: dict[str, str] | None
    waiting: str | None
    nodes: dict[str, str] | None
    cdi: str | None
    labels: dict[str, str] | None


class NoCapacity(TypedVarlinkErrorReply, interface="io.neurond"):
    class Parameters:  # noqa: D106 - how asyncvarlink wants it
        message: str
        holders: list[str]


class Neurond(VarlinkInterface, name="io.neurond"):
    """Some methods, as the description gives them."""

    errors = (NoCapacity,)

    @varlinkmethod
    def ListChips(self) -> Chips:  # noqa: N802 - varlink's own spelling
        raise NotImplementedError

    @varlinkmethod
    def Acquire(  # noqa: N802
        self,
        *,
        count: int | None = None,
        chips: list[int] | None = None,
        all: bool | None = None,  # noqa: A002
        pid: int | None = None,
        ttl: float | None = None,
        name: str | None = None,
        wait: float | None = None,
        missing_ok: bool | None = None,
        env: bool | None = None,
        key: str | None = None,
        enforce: bool | None = None,
        container: Literal["run", "create"] | None = None,
    ) -> Acquired:
        raise NotImplementedError

    @varlinkmethod(return_parameter="state")
    def Release(  # noqa: N802
        self, *, lease: str, force: bool | None = None, reason: str | None = None
    ) -> str:
        raise NotImplementedError


@asynccontextmanager
async def connected(daemon: Daemon) -> AsyncIterator[VarlinkClientProtocol]:
    """Connect with asyncvarlink."""
    transport, protocol = await connect_unix_varlink(VarlinkClientProtocol, str(daemon.socket))
    try:
        yield protocol
    finally:
        transport.close()
        await asyncio.sleep(0)


def test_asyncvarlink_writes_the_same_interface(daemon: Daemon) -> None:
    """What asyncvarlink makes of typed stubs is, method by method and type by type, what the daemon serves."""

    async def ask() -> str:
        async with connected(daemon) as protocol:
            service = protocol.make_proxy(VarlinkServiceInterface)
            reply = await service.GetInterfaceDescription(interface="io.neurond")
            return str(reply["description"])

    served = asyncio.run(ask()).splitlines()
    for line in Neurond.render_interface_description(comments=False).splitlines():
        method, _, reply = line.partition(" -> ")
        if line.startswith("method ListChips"):  # asyncvarlink has no named types and writes them out
            assert method == "method ListChips()"
            assert any(line.startswith("method ListChips() -> (instance_type: string") for line in served)
        elif line:
            assert line in served, (method, reply)


def test_asyncvarlink_leases_and_releases(daemon: Daemon) -> None:
    """The package asyncvarlink, which is strict about types, lists chips, leases some and releases them."""

    async def work() -> None:
        async with connected(daemon) as protocol:
            neurond = protocol.make_proxy(Neurond)
            listed: Chips = await neurond.ListChips()
            assert {chip["state"] for chip in listed["chips"]} == {"free"}
            acquired: Acquired = await neurond.Acquire(count=8, env=True)
            assert acquired["env"] is not None
            assert acquired["env"]["NEUROND_CHIPS"] == "0,1,2,3,4,5,6,7"
            listed = await neurond.ListChips()
            assert [chip["lease"] for chip in listed["chips"][:8]] == [acquired["lease"]] * 8
            with pytest.raises(NoCapacity) as refused:
                await neurond.Acquire(count=16)
            assert refused.value.parameters == {
                "message": refused.value.parameters["message"],
                "holders": [acquired["lease"]],
            }
            await neurond.Release(lease=acquired["lease"])

    asyncio.run(work())
    eventually(daemon.all_free)
