"""Containers on leased chips: launching them, following them, and what is left of them after a crash.

A launch has two phases: the image first, while no chip is held; then the lease with the journalled intent to create a
container of a known name, create, start, and the lease bound to the container's id. A failure at any point removes what
was made and ends the lease. News from the engine means "look again": every look compares all our containers with all
leases.
"""

import asyncio
import base64
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from neurond import wire
from neurond.daemon import views
from neurond.daemon.broker import Broker, Waiter, Wish
from neurond.daemon.points import reach
from neurond.daemon.requests import Requests, checked_name, owner_of, seconds, want_of
from neurond.daemon.server import Call, Handler, Peer
from neurond.host import processes
from neurond.host.docker import LABEL, Container, Engine, EngineError, EngineUnreachable, Output, Spec, parse_ulimit
from neurond.ledger.chips import User
from neurond.ledger.cores import contradiction
from neurond.ledger.errors import InvalidRequest, NoSuchLease, NotAllowed, Refused
from neurond.ledger.leases import ByContainer, Lease, Want
from neurond.ledger.ledger import Ledger

log = structlog.get_logger()

T = TypeVar("T")

OWNER_LABEL, CHIPS_LABEL, REMOVE_LABEL = "io.neurond.owner", "io.neurond.chips", "io.neurond.remove"
NAME_LABEL = "io.neurond.name"
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

    def __init__(self, broker: Broker, requests: Requests, engine: Engine, gid: int | None) -> None:
        self.broker = broker
        self.requests = requests
        self.engine = engine
        self._gid = gid
        self._launches: dict[str, Launch] = {}
        self._known: dict[str, Container | None] = {}
        self._reachable = True
        self._looking = asyncio.Lock()
        self._again = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def handlers(self) -> dict[str, Handler]:
        """Return the functions that answer calls, by the method's name."""
        return {
            "RunContainer": self._run,
            "ListContainers": self._list,
            "StopContainer": self._stop,
            "ContainerLogs": self._logs,
            "AdoptContainer": self._adopt,
        }

    # -- following --------------------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Look at once, whenever the engine has news, and every so often. Runs until cancelled."""
        self._again.set()
        threading.Thread(target=self._listen, name="docker-events", daemon=True).start()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(PERIOD):
                    await self._again.wait()
            self._again.clear()
            await self.try_to_look()

    async def try_to_look(self) -> None:
        """Look, or take note that the engine can't be asked."""
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
        async with self._looking:
            for lease in tuple(self.broker.ledger.leases.values()):
                launch = self._launches.get(lease.id)
                followed = launch is None or launch.started
                if isinstance(lease.binding, ByContainer) and lease.state == "active" and followed:
                    await self._compare(lease, lease.binding)
            for container in await in_thread(self.engine.containers):
                await self._tidy(container)
            await self._find_strangers()

    async def _compare(self, lease: Lease, binding: ByContainer) -> None:
        found = await in_thread(self.engine.inspect, binding.id or container_name(lease))
        if self.broker.ledger.leases.get(lease.id) is not lease:
            return  # it is another one since we asked
        if found is not None and not binding.id:  # an intent that a crash interrupted
            found = found if found.labels.get(LABEL) == lease.id else None
            if found is not None and found.lives:
                self.broker.happened(self.broker.ledger.bind(lease.id, ByContainer(found.name, found.id)))
        reason = why_over(lease, found)
        if reason is None:
            return
        reach("container.ended")
        launch = self._launches.get(lease.id)
        if launch is not None and not launch.exited.done():
            launch.exited.set_result(found.exit_code if found is not None else None)
        self.broker.binding_ended(lease.id, reason)

    async def _find_strangers(self) -> None:
        """Tell the broker of running containers that were given chips and have no lease for them."""
        running = await in_thread(self.engine.running)
        now_known: dict[str, Container | None] = {}
        bound = {
            lease.binding.id for lease in self.broker.ledger.leases.values() if isinstance(lease.binding, ByContainer)
        }
        strangers: dict[int, tuple[User, ...]] = {}
        for container in running:
            known = self._known.get(container.id)
            if known is None or chips_in(self.broker.ledger, known):  # one with chips: it may have ended meanwhile
                known = await in_thread(self.engine.inspect, container.id)
            launch = self._launches.get(known.labels.get(LABEL, "")) if known is not None else None
            if known is None or not known.lives or (launch is not None and not launch.started):
                continue
            now_known[container.id] = known
            if container.id not in bound:
                user = User(known.pid, "container", known.name, known.id)
                for index in chips_in(self.broker.ledger, known):
                    strangers[index] = (*strangers.get(index, ()), user)
        self._known = now_known
        self.broker.take_containers(strangers)

    def privileged(self) -> list[Container]:
        """Return the running containers that may open every device there is, as of the last look."""
        return [container for container in self._known.values() if container is not None and container.privileged]

    async def _tidy(self, container: Container) -> None:
        """Remove what nobody will miss: a container never started, or one that was to be removed when it ends."""
        lease_id = container.labels[LABEL]
        if lease_id in self._launches or container.lives:
            return
        lease = self.broker.ledger.leases.get(lease_id)
        if lease is not None and lease.state == "active":
            return
        # Labels alone are no proof: docker commit copies them into an image.
        ours = container.labels.get(NAME_LABEL) == container.name
        if ours and (container.status == "created" or container.labels.get(REMOVE_LABEL) == "yes"):
            log.info("container.removed", container=container.name, lease=lease_id, status=container.status)
            with suppress(EngineError):
                await in_thread(self.engine.remove, container.id)
                reach("container.removed")

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
        self.requests.may_lease(call.peer)
        want = want_of(request.count, request.chips, every=request.all, missing_ok=request.missing_ok)
        wait = seconds("wait", request.wait or 0)
        _check_options(request)
        self.broker.ledger.check(want)
        try:
            await self._have_image(call, request.image)
            reach("container.pulled")
            lease = await self._lease(call, want, request.name or "", wait)
        except EngineError as error:
            raise failed(error) from None
        launch = self._launches[lease.id]
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

        await self.broker.known()
        if call.connection.gone:
            raise NoSuchLease("the client went away before its request")
        waiter = Waiter(settle, settle)
        lease, reason = self.broker.ask(Wish(want, owner_of(call.peer), ByContainer(name), name, wait), waiter)
        # From the first moment on, so that no look takes it for what a crash has left behind.
        self._launches[lease.id] = Launch(self._loop.create_future())
        try:
            if reason is not None:
                call.on_gone = lambda: self.broker.leave(lease.id, waiter, "the client went away while it waited")
                tell_status(call, f"waiting: {reason}")
                lease = await granted
                call.on_gone = None
            await self.broker.recorded(lease.id)
        except BaseException:
            del self._launches[lease.id]
            raise
        return lease

    async def _launch(
        self, call: Call, request: wire.ContainerRun, lease: Lease, launch: Launch
    ) -> wire.Progress | None:
        name = container_name(lease)
        created, started, output = "", False, None
        reach("container.leased")
        try:
            spec = self._spec(request, lease, name)
            created = await in_thread(self.engine.create, spec)
            reach("container.created")
            if not request.detach:
                output = await in_thread(self.engine.attach, created)
            if call.connection.gone:
                raise EngineError("the client went away before the start")
            started = True
            await in_thread(self.engine.start, created)
            reach("container.started")
            if call.connection.gone:  # it never learned of the container, so it could not stop it either
                raise EngineError("the client went away during the start")
        except (EngineError, Refused) as error:
            if output is not None:
                output.close()
            await self._undo(lease, ByContainer(name, created), error, started=started)
            raise failed(error) if isinstance(error, EngineError) else error from None
        self.broker.happened(self.broker.ledger.bind(lease.id, ByContainer(name, created)))
        launch.started = True
        await self.broker.recorded(lease.id)
        reach("container.bound")
        self._again.set()
        running = wire.Progress(lease=lease.id, chips=list(lease.chips), container=name, container_id=created)
        if output is None:
            return running
        call.reply(running, last=False)
        pump = asyncio.ensure_future(in_thread(self._pump, call, output))
        code = await launch.exited
        # What the client has not read yet is its own pace; only an engine that never ends the stream is cut off.
        while not (await asyncio.wait([pump], timeout=LAST_OUTPUT))[0] and not call.connection.may_write.is_set():
            pass
        output.close()
        if request.remove:  # as docker run --rm: gone when the command returns, so its name can be used again
            with suppress(EngineError):
                await in_thread(self.engine.remove, created)
        return wire.Progress(exit_code=FAILED if code is None else code)

    async def _undo(self, lease: Lease, binding: ByContainer, error: Exception, *, started: bool) -> None:
        """Remove what a launch that failed has made, and end its lease; in doubt its container keeps the chips."""
        reason = f"its container could not be started: {error}"
        try:
            if binding.id:
                await in_thread(self.engine.remove, binding.id)
        except EngineError:
            if started:  # it may run all the same
                self.broker.happened(self.broker.ledger.bind(lease.id, binding))
                return
        if started:
            self.broker.binding_ended(lease.id, reason)
            await self.broker.known()  # so that who hears of the failure finds the chips free
        else:
            self.broker.end(lease.id, reason)

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
        labels |= {
            LABEL: lease.id,
            NAME_LABEL: name,
            OWNER_LABEL: str(lease.owner.uid),
            CHIPS_LABEL: env["NEUROND_CHIPS"],
        }
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
        if lease and not (isinstance(lease.binding, ByContainer) and lease.binding.id in {"", container.id}):
            lease = None  # a copied label
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
            reach("container.stopped")
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

    async def _adopt(self, call: Call, request: wire.AdoptContainer) -> wire.Acquired:
        self._may_start(call.peer)
        self.requests.may_lease(call.peer)
        if not request.container:
            raise InvalidRequest("adopt which container? It has no name")
        try:
            found = await in_thread(self.engine.inspect, request.container)
        except EngineError as error:
            raise failed(error) from None
        if found is None or not found.lives:
            raise NoSuchLease(f"no container {request.container!r} runs here")
        chips = tuple(chips_in(self.broker.ledger, found))
        if not chips:
            raise InvalidRequest(f"container {found.name} was given no chip of this host")
        lease = self.broker.adopt(owner_of(call.peer), ByContainer(found.name, found.id), chips, found.name)
        await self.broker.recorded(lease.id)
        await self.try_to_look()
        return wire.Acquired(lease.id, list(lease.chips))

    async def _find(self, peer: Peer, wanted: str) -> Container:
        """Return one of our containers by name, id (or its beginning) or lease, if it is the peer's."""
        self._may_start(peer)
        found = [
            container
            for container in await in_thread(self.engine.containers)
            if wanted == container.name
            or (wanted == container.labels[LABEL] and container.labels.get(NAME_LABEL) == container.name)
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


def chips_in(ledger: Ledger, container: Container) -> list[int]:
    """Return the chips whose device nodes a container was given, whatever they are called on the host or in it."""
    numbers = {(chip.major, chip.minor): index for index, chip in ledger.chips.items()}
    by_path = {chip.node: index for index, chip in ledger.chips.items()}
    found = set()
    for path in container.devices:
        if path in by_path:
            found.add(by_path[path])
        with suppress(OSError):
            device = os.stat(path).st_rdev  # noqa: PTH116 - as everywhere for devices
            found |= {numbers[key] for key in [(os.major(device), os.minor(device))] if key in numbers}
    return sorted(found)


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
    if isinstance(error, EngineUnreachable):
        pass  # what is missing then is the engine's socket, not the command
    elif "executable file not found" in words or "no such file or directory" in words.lower():
        code = NOT_FOUND
    elif "permission denied" in words:
        code = NOT_EXECUTABLE
    return wire.EngineFailed(words, code)


def tell_status(call: Call, line: str) -> None:
    """Tell a client that follows what is going on."""
    if call.more:
        call.reply(wire.Progress(status=line), last=False)


def _check_options(request: wire.ContainerRun) -> None:
    """Refuse what can be seen to be wrong before anything is pulled, leased or created."""
    checked_name(request.name or "")
    if not request.image:
        raise InvalidRequest("which image? It has no name")
    if "" in (request.volumes or ()):
        raise InvalidRequest("-v '': a volume is SOURCE:PATH[:ro]")
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
