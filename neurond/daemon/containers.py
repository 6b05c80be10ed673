"""Containers on leased chips: launching them, following them, and what is left of them after a crash.

A launch has two phases: the image first, while no chip is held; then the lease with the journalled intent to create a
container of a known name, create, start, and the lease bound to the container's id. A failure at any point removes what
was made and ends the lease. News from the engine means "look again": every look compares all our containers with all
leases.
"""

import asyncio
import base64
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from neurond import wire
from neurond.daemon import views
from neurond.daemon.broker import Broker, Waiter, checked_name, seconds, want_of
from neurond.daemon.server import Call, Handler, Peer
from neurond.host import processes
from neurond.host.docker import LABEL, Container, Engine, EngineError, EngineUnreachable, Output, Spec, parse_ulimit
from neurond.ledger.cores import contradiction
from neurond.ledger.errors import InvalidRequest, NoSuchLease, NotAllowed, Refused
from neurond.ledger.leases import ByContainer, Lease, Want

log = structlog.get_logger()

T = TypeVar("T")

OWNER_LABEL, CHIPS_LABEL, REMOVE_LABEL = "io.neurond.owner", "io.neurond.chips", "io.neurond.remove"
PERIOD = 5.0
"""Seconds between two looks at the containers without news, and between two attempts to reach the engine."""
RECONNECT = 1.0
LAST_OUTPUT = 10.0
"""Seconds that the output of a container may take to arrive after it has ended."""
SHORTEST_ID = 6
NOT_EXECUTABLE, NOT_FOUND, FAILED = 126, 127, 125


@dataclass(slots=True)
class Launch:
    """A container that is being launched or followed by a client; `exited` gets its exit code."""

    exited: "asyncio.Future[int | None]"
    started: bool = False


class Containers:
    """All containers that neurond launched on this host."""

    def __init__(self, broker: Broker, engine: Engine, gid: int | None) -> None:
        self.broker = broker
        self.engine = engine
        self._gid = gid
        self._launches: dict[str, Launch] = {}
        self._reachable = True
        self._again = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def handlers(self) -> dict[str, Handler]:
        """Return the functions that answer calls, by the method's name."""
        return {
            "RunContainer": self._run,
            "ListContainers": self._list,
            "StopContainer": self._stop,
            "ContainerLogs": self._logs,
        }

    # -- following --------------------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Look whenever the engine has news, and every so often. Runs until cancelled."""
        threading.Thread(target=self._listen, name="docker-events", daemon=True).start()
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._again.wait(), PERIOD)
            self._again.clear()
            try:
                await self.look()
            except EngineError as error:
                self._note_failure(error)
            else:
                self._reachable = True

    def _note_failure(self, error: EngineError) -> None:
        """Say once that the engine can't be asked: a warning only where that matters."""
        if self._reachable:
            leases = self.broker.ledger.leases.values()
            if any(isinstance(lease.binding, ByContainer) for lease in leases):
                log.warning("engine.failed", error=str(error), follows="keeping the chips of containers leased")
            else:
                log.info("engine.absent", error=str(error))
        self._reachable = False

    async def look(self) -> None:
        """Compare all our containers with all leases. Raises EngineError, at the first that can't be asked about."""
        for lease in tuple(self.broker.ledger.leases.values()):
            launch = self._launches.get(lease.id)
            followed = launch is None or launch.started
            if isinstance(lease.binding, ByContainer) and lease.state == "active" and followed:
                await self._compare(lease, lease.binding)
        for container in await in_thread(self.engine.containers):
            await self._tidy(container)

    async def _compare(self, lease: Lease, binding: ByContainer) -> None:
        found = await in_thread(self.engine.inspect, binding.id or container_name(lease))
        if found is not None and not binding.id:  # an intent that a crash interrupted
            found = found if found.labels.get(LABEL) == lease.id else None
            if found is not None and found.lives:
                self.broker.happened(self.broker.ledger.bind(lease.id, ByContainer(found.name, found.id)))
        reason = why_over(lease, found)
        if reason is None:
            return
        launch = self._launches.get(lease.id)
        if launch is not None and not launch.exited.done():
            launch.exited.set_result(found.exit_code if found is not None else None)
        self.broker.binding_ended(lease.id, reason)

    async def _tidy(self, container: Container) -> None:
        """Remove what nobody will miss: a container never started, or one that was to be removed when it ends."""
        lease_id = container.labels[LABEL]
        if lease_id in self._launches or container.lives:
            return
        lease = self.broker.ledger.leases.get(lease_id)
        if lease is not None and lease.state == "active":
            return
        ours = container.name == f"neurond-{lease_id}" and container.status == "created"
        if ours or container.labels.get(REMOVE_LABEL) == "yes":
            log.info("container.removed", container=container.name, lease=lease_id, status=container.status)
            with suppress(EngineError):
                await in_thread(self.engine.remove, container.id)

    def _listen(self) -> None:
        """Wait for news, for ever; the stream may end at any time without a word."""
        while not self._loop.is_closed():
            with suppress(EngineError):
                self.engine.events(self._news)
            self._news()  # the stream has ended: whatever happened meanwhile was missed
            time.sleep(RECONNECT)

    def _news(self) -> None:
        with suppress(RuntimeError):  # the loop is closed: neurond stops
            self._loop.call_soon_threadsafe(self._again.set)

    # -- launching --------------------------------------------------------------------------------------------------

    async def _run(self, call: Call, request: wire.ContainerRun) -> wire.Progress | None:
        self._may_start(call.peer)
        self.broker.may_lease(call.peer)
        want = want_of(request.count, request.chips, every=request.all, missing_ok=request.missing_ok)
        wait = seconds("wait", request.wait or 0)
        _check_options(request)
        try:
            await self._have_image(call, request.image)
            lease = await self._lease(call, want, request.name or "", wait)
        except EngineError as error:
            raise failed(error) from None
        launch = self._launches[lease.id] = Launch(self._loop.create_future())
        try:
            return await self._launch(call, request, lease, launch)
        finally:
            del self._launches[lease.id]
            self._again.set()

    async def _have_image(self, call: Call, image: str) -> None:
        """Pull the image if it is not there. No chip is held meanwhile."""
        if await in_thread(self.engine.has_image, image):
            return
        gone = threading.Event()
        call.on_gone = gone.set

        def tell(line: str) -> bool:
            self._loop.call_soon_threadsafe(tell_status, call, f"pulling {image}: {line}")
            return not gone.is_set()

        tell_status(call, f"pulling {image}")
        await in_thread(self.engine.pull, image, tell)
        call.on_gone = None
        if gone.is_set():
            raise NoSuchLease("the client went away during the pull")

    async def _lease(self, call: Call, want: Want, name: str, wait: float) -> Lease:
        """Lease the chips with the intent to create a container of this name (or one made of the lease's id)."""
        granted: asyncio.Future[Lease] = self._loop.create_future()

        def settle(outcome: Lease | Refused) -> None:
            if not granted.done():
                granted.set_result(outcome) if isinstance(outcome, Lease) else granted.set_exception(outcome)

        lease, reason = self.broker.ask(want, call.peer, ByContainer(name), name, wait, Waiter(settle, settle, None))
        if reason is not None:
            call.on_gone = lambda: self.broker.end(lease.id, "the client went away while it waited")
            tell_status(call, f"waiting: {reason}")
            lease = await granted
            call.on_gone = None
        await self.broker.recorded(lease.id)
        return lease

    async def _launch(
        self, call: Call, request: wire.ContainerRun, lease: Lease, launch: Launch
    ) -> wire.Progress | None:
        name = container_name(lease)
        created, output = "", None
        try:
            spec = self._spec(request, lease, name)
            created = await in_thread(self.engine.create, spec)
            if not request.detach:
                output = await in_thread(self.engine.attach, created)
            if call.connection.gone:
                raise EngineError("the client went away before the start")
            await in_thread(self.engine.start, created)
        except (EngineError, Refused) as error:
            if output is not None:
                output.close()
            if created:
                with suppress(EngineError):
                    await in_thread(self.engine.remove, created)
            self.broker.end(lease.id, f"its container could not be started: {error}")
            raise failed(error) if isinstance(error, EngineError) else error from None
        self.broker.happened(self.broker.ledger.bind(lease.id, ByContainer(name, created)))
        launch.started = True
        self._again.set()
        running = wire.Progress(lease=lease.id, chips=list(lease.chips), container=name, container_id=created)
        if output is None:
            return running
        call.reply(running, last=False)
        pump = asyncio.ensure_future(in_thread(self._pump, call, output))
        code = await launch.exited
        with suppress(TimeoutError):
            await asyncio.wait_for(pump, LAST_OUTPUT)
        output.close()
        return wire.Progress(exit_code=FAILED if code is None else code)

    def _spec(self, request: wire.ContainerRun, lease: Lease, name: str) -> Spec:
        ledger, lnc = self.broker.ledger, self.broker.rules.lnc
        env = views.environment(ledger, lease, lnc)
        visible = env.pop("NEURON_RT_VISIBLE_CORES", None)
        cores = views.lease_cores(ledger, lease, lnc)
        local = list(range(len(cores)))
        if visible and request.core_numbering in {"global", "local"}:
            numbered = cores if request.core_numbering == "global" else local
            env["NEURON_RT_VISIBLE_CORES"] = ",".join(map(str, numbered))
        for variable in request.env or ():
            variable_name, _, value = variable.partition("=")
            if variable_name == "NEURON_RT_VISIBLE_CORES" and cores:
                wrong = contradiction(value, cores)
                if wrong and contradiction(value, local):
                    raise InvalidRequest(wrong)
                env.pop("NEURON_RT_VISIBLE_CORES", None)
        labels = dict(label.partition("=")[::2] for label in request.labels or ())
        labels |= {LABEL: lease.id, OWNER_LABEL: str(lease.owner.uid), CHIPS_LABEL: env["NEUROND_CHIPS"]}
        if request.remove:
            labels[REMOVE_LABEL] = "yes"
        return Spec(
            name,
            request.image,
            request.command or (),
            {ledger.chips[index].node: f"/dev/neuron{index}" for index in lease.chips},
            [*(request.env or ()), *(f"{key}={value}" for key, value in env.items())],
            labels,
            request.volumes or (),
            request.ulimits or (),
            request.cap_add or (),
            request.workdir,
            request.user,
            request.shm_size,
            request.network,
            request.ipc,
            request.entrypoint,
        )

    def _pump(self, call: Call, output: Output) -> None:
        """Send the output of a container as it comes, as fast as the client reads it. Runs in a thread."""

        async def send(stream: str, data: bytes) -> bool:
            call.reply(wire.Progress(stream=stream, data=base64.b64encode(data).decode("ascii")), last=False)
            return await call.writable()

        for stream, data in output:
            if not asyncio.run_coroutine_threadsafe(send(stream, data), self._loop).result():
                output.close()
                return

    # -- other calls ------------------------------------------------------------------------------------------------

    async def _list(self, call: Call, request: wire.Nothing) -> wire.Containers:
        del call, request
        try:
            return wire.Containers([await self._view(c) for c in await in_thread(self.engine.containers)])
        except EngineError as error:
            raise failed(error) from None

    async def _view(self, container: Container) -> wire.ContainerView:
        lease = self.broker.ledger.leases.get(container.labels[LABEL])
        found = await in_thread(self.engine.inspect, container.id) if container.status == "exited" else None
        owner = container.labels.get(OWNER_LABEL, "")
        return wire.ContainerView(
            container.name,
            container.id,
            container.image,
            container.status,
            found.exit_code if found else None,
            lease.id if lease else None,
            list(lease.chips) if lease else [],
            processes.user_name(int(owner)) if owner.isdigit() else None,
        )

    async def _stop(self, call: Call, request: wire.ContainerStop) -> wire.Done:
        grace = int(seconds("timeout", 10 if request.timeout is None else request.timeout))
        try:
            container = await self._find(call.peer, request.container)
            await in_thread(self.engine.stop, container.id, grace)
        except EngineError as error:
            raise failed(error) from None
        self._again.set()
        return wire.Done()

    async def _logs(self, call: Call, request: wire.ContainerLogs) -> wire.Progress | None:
        if not call.more:
            raise InvalidRequest("ContainerLogs streams output: call it with more")
        try:
            container = await self._find(call.peer, request.container)
            follow = bool(request.follow)
            output = await in_thread(lambda: self.engine.logs(container.id, follow=follow, tail=request.tail))
            call.on_gone = output.close
            await in_thread(self._pump, call, output)
        except EngineError as error:
            raise failed(error) from None
        return wire.Progress()

    async def _find(self, peer: Peer, wanted: str) -> Container:
        """Return one of our containers by name, id (or its beginning) or lease, if it is the peer's."""
        self._may_start(peer)
        found = [
            container
            for container in await in_thread(self.engine.containers)
            if wanted in {container.name, container.labels[LABEL]}
            or (len(wanted) >= SHORTEST_ID and container.id.startswith(wanted))
        ]
        if len(found) != 1:
            what = "no container" if not found else f"{len(found)} containers"
            raise NoSuchLease(f"{what} {wanted!r} launched by neurond (neurond container ls lists them)")
        if peer.uid != 0 and found[0].labels.get(OWNER_LABEL) != str(peer.uid):
            raise NotAllowed(f"container {found[0].name} was launched by somebody else: only its owner or root may")
        return found[0]

    def _may_start(self, peer: Peer) -> None:
        if peer.uid in {0, self.broker.rules.uid} or (self._gid is not None and self._gid in peer.groups):
            return
        raise NotAllowed(
            f"{processes.user_name(peer.uid)} may not start containers: that takes the group docker, as it is "
            "as good as being root"
        )


async def in_thread(work: Callable[..., T], *arguments: object) -> T:
    """Run something that blocks in a thread of its own.

    Not in the loop's pool: an engine that hangs would use that up, and would keep neurond from stopping.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if not future.done():
            future.set_result(result) if error is None else future.set_exception(error)

    def run() -> None:
        result, problem = None, None
        try:
            result = work(*arguments)
        except Exception as error:  # noqa: BLE001 - handed to who waits
            problem = error
        with suppress(RuntimeError):  # the loop is closed: neurond stops
            loop.call_soon_threadsafe(settle, result, problem)

    threading.Thread(target=run, name=getattr(work, "__name__", "work"), daemon=True).start()
    return await future


def container_name(lease: Lease) -> str:
    """Return the name of a lease's container: the user's choice, or one made of the lease's id."""
    return (isinstance(lease.binding, ByContainer) and lease.binding.name) or f"neurond-{lease.id}"


def why_over(lease: Lease, found: Container | None) -> str | None:
    """Say why a lease is over whose container is as found now (None if there is none); None if it lives on."""
    if found is None:
        bound = isinstance(lease.binding, ByContainer) and lease.binding.id
        return "its container was removed" if bound else "its container was never created"
    if found.lives:
        return None
    if found.status == "created":
        return "its container was never started"
    return f"its container exited with {found.exit_code}"


def failed(error: EngineError) -> wire.EngineFailed:
    """Return what a client is told, with the exit code that docker run would have."""
    words = str(error)
    code = FAILED
    if "executable file not found" in words or "no such file or directory" in words.lower():
        code = NOT_FOUND
    elif "permission denied" in words and not isinstance(error, EngineUnreachable):
        code = NOT_EXECUTABLE
    return wire.EngineFailed(words, code)


def tell_status(call: Call, line: str) -> None:
    """Tell a client that follows what is going on."""
    if call.more:
        call.reply(wire.Progress(status=line), last=False)


def _check_options(request: wire.ContainerRun) -> None:
    """Refuse what can be seen to be wrong before anything is pulled, leased or created."""
    checked_name(request.name or "")
    for variable in request.env or ():
        if variable.partition("=")[0] == "AWS_NEURON_VISIBLE_DEVICES":
            raise InvalidRequest(
                "AWS_NEURON_VISIBLE_DEVICES asks AWS's OCI hook for chips behind neurond's back: ask for them with -n "
                "or --chips, which maps the nodes themselves"
            )
        if "=" not in variable:
            raise InvalidRequest(f"-e {variable}: an environment variable is NAME=VALUE")
    for label in request.labels or ():
        if label.startswith("io.neurond."):
            raise InvalidRequest(f"--label {label}: labels that begin with io.neurond. are neurond's own")
    try:
        for text in request.ulimits or ():
            parse_ulimit(text)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
