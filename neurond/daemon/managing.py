"""Calls about containers that run or have run: list, stop, read their output, write to them, adopt one."""

import asyncio
import base64
import binascii
import socket
from contextlib import suppress
from typing import NamedTuple

from neurond import wire
from neurond.daemon import labels
from neurond.daemon.broker import Broker
from neurond.daemon.containers import Containers
from neurond.daemon.launching import Launching, failed
from neurond.daemon.openable import chips_in
from neurond.daemon.points import reach
from neurond.daemon.requests import Requests, owner_of, seconds
from neurond.daemon.server import Call, Connection, Handler, Peer
from neurond.daemon.threads import in_thread
from neurond.host import processes
from neurond.host.docker import Container, EngineError
from neurond.ledger.errors import InvalidRequest, NoSuchLease, NotAllowed
from neurond.ledger.leases import ByContainer, ByTask, Lease, OnContainers, container_ids

SHORTEST_ID = 6


class Input(NamedTuple):
    """The way to a container's standard input, and whose it is."""

    connection: Connection
    stdin: socket.socket


class Managing:
    """Answers the calls about containers, but for their launch."""

    def __init__(self, broker: Broker, requests: Requests, containers: Containers, launching: Launching) -> None:
        self.broker = broker
        self.requests = requests
        self.containers = containers
        self.engine = containers.engine
        self.launching = launching
        self._inputs: dict[str, Input] = {}

    def handlers(self) -> dict[str, Handler]:
        """Return the functions that answer calls, by the method's name."""
        return {
            "ListContainers": self._list,
            "StopContainer": self._stop,
            "ContainerLogs": self._logs,
            "WriteInput": self._write_input,
            "AdoptContainer": self._adopt,
        }

    async def _list(self, call: Call, request: wire.Nothing) -> wire.Containers:
        del call, request
        try:
            views = [self._view(container) for container in await self.containers.mine()]
            return wire.Containers(list(await asyncio.gather(*views)))
        except EngineError as error:
            raise failed(error) from None

    async def _view(self, container: Container) -> wire.ContainerView:
        lease = self._lease_of(container)
        found = None
        task = container.labels.get(labels.TASK) or None
        if container.status == "exited" or task is not None:
            with suppress(EngineError):  # one that can't be inspected is listed without its exit code
                found = await in_thread(self.engine.inspect, container.id)
        owner = labels.uid_of(container.labels)
        return wire.ContainerView(
            container.name,
            container.id,
            container.image,
            container.status,
            found.exit_code if found and not found.lives else None,
            lease.id if lease else None,
            _chips_of(container, lease),
            processes.user_name(owner) if owner is not None else None,
            (found.health or None) if found else None,
            task,
            container.labels[labels.LEASE] if task is not None else None,
            container.labels.get(labels.TASK_CONTAINER) or None,
        )

    def _lease_of(self, container: Container) -> Lease | None:
        leases = self.broker.ledger.leases
        bound = next((lease for lease in leases.values() if container.id in container_ids(lease.binding)), None)
        if bound is not None:
            return bound
        lease = leases.get(container.labels[labels.LEASE])  # one that is being started has no id yet in its lease
        if lease is None or not isinstance(lease.binding, OnContainers):
            return None
        return None if container_ids(lease.binding) else lease

    def _is_lease_of(self, wanted: str, container: Container) -> bool:
        """Tell whether this is the lease that a container has, or the one that it was started with."""
        lease = self._lease_of(container)
        if lease is not None and lease.id == wanted:
            return True
        return container.labels[labels.LEASE] == wanted and self.containers.strangers.is_our_own(container)

    async def _stop(self, call: Call, request: wire.ContainerStop) -> wire.Done:
        grace = None if request.timeout is None else int(seconds("timeout", request.timeout))
        try:
            container = await self._find(call.peer, request.container)
            await self.containers.stop(container.id, grace)
            reach("container.stopped")
        except EngineError as error:
            raise failed(error) from None
        self.containers.look_soon()
        return wire.Done()

    async def _logs(self, call: Call, request: wire.ContainerLogs) -> wire.Progress | None:
        if not call.more:
            raise InvalidRequest("ContainerLogs streams output: call it with more")
        try:
            container = await self._find(call.peer, request.container)
            follow = bool(request.follow)
            output = await in_thread(lambda: self.engine.logs(container.id, follow=follow, tail=request.tail))
            call.on_gone = output.close
            await in_thread(self.launching.pump, call, output)
        except EngineError as error:
            raise failed(error) from None
        return wire.Progress()

    async def _write_input(self, call: Call, request: wire.ContainerInput) -> wire.Done:
        """Pass on input. The reply comes when the engine has taken it, so that the client sends no faster."""
        try:
            data = base64.b64decode(request.data or "", validate=True)
        except (binascii.Error, ValueError):
            raise InvalidRequest("data is not base64") from None
        known = self._inputs.get(request.container)
        if known is None or known.connection is not call.connection:
            container = await self._find(call.peer, request.container)
            try:
                stdin = await in_thread(self.engine.input, container.id)
            except EngineError as error:
                raise failed(error) from None
            if call.connection.gone:
                stdin.close()  # which ends the input
                raise NoSuchLease("the client went away")
            known = self._inputs[request.container] = Input(call.connection, stdin)
        try:
            await in_thread(known.stdin.sendall, data)
        except OSError as error:  # it has ended, or has closed its standard input
            self._close_input(request.container)
            raise NoSuchLease(f"container {request.container} takes no more input: {error.strerror}") from None
        if request.eof:
            self._close_input(request.container)
        return wire.Done()

    def disconnected(self, connection: Connection) -> None:
        """End the input that a client sent which is gone."""
        for container in [name for name, known in self._inputs.items() if known.connection is connection]:
            self._close_input(container)

    def _close_input(self, container: str) -> None:
        known = self._inputs.pop(container, None)
        if known is None:
            return
        with suppress(OSError):
            known.stdin.shutdown(socket.SHUT_WR)
        known.stdin.close()

    async def _adopt(self, call: Call, request: wire.AdoptContainer) -> wire.Acquired:
        self.requests.may_start(call.peer)
        self.requests.may_lease(call.peer)
        if not request.container:
            raise InvalidRequest("adopt which container? It has no name")
        try:
            found = await in_thread(self.engine.inspect, request.container)
        except EngineError as error:
            raise failed(error) from None
        if found is None or not found.lives:
            raise NoSuchLease(f"no container {request.container!r} runs here")
        chips = tuple(chips_in(self.broker.ledger, found, self.containers.home))
        if not chips:
            raise InvalidRequest(f"container {found.name} was given no chip of this host")
        lease = self.broker.adopt(owner_of(call.peer), ByContainer(found.name, found.id), chips, found.name)
        await self.broker.recording.recorded(lease.id)
        await self.containers.try_to_look()
        return wire.Acquired(lease.id, list(lease.chips))

    async def _find(self, peer: Peer, wanted: str) -> Container:
        """Return one of our containers by name, id (or its beginning) or lease, if it is the peer's."""
        self.requests.may_start(peer)
        try:
            mine = await self.containers.mine()
        except EngineError as error:
            raise failed(error) from None
        found = [
            container
            for container in mine
            if wanted == container.name
            or self._is_lease_of(wanted, container)
            or (len(wanted) >= SHORTEST_ID and container.id.startswith(wanted))
        ]
        if len(found) != 1:
            what = "no container" if not found else f"{len(found)} containers"
            raise NoSuchLease(f"{what} {wanted!r} launched by neurond (neurond container ls lists them)")
        if peer.uid != 0 and labels.uid_of(found[0].labels) != peer.uid:
            raise NotAllowed(f"container {found[0].name} was launched by somebody else: only its owner or root may")
        return found[0]


def _chips_of(container: Container, lease: Lease | None) -> list[int]:
    """Return the chips that a container has of its lease; of a task's, each container may have some."""
    if lease is None:
        return []
    own = {int(chip) for chip in container.labels.get(labels.CHIPS, "").split(",") if chip.isdecimal()}
    return [index for index in lease.chips if index in own] if isinstance(lease.binding, ByTask) else list(lease.chips)
