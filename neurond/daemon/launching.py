"""Launching a container on leased chips.

Two phases: the image first, while no chip is held; then the lease with the journalled intent to create a container of a
known name, create, start, and the lease bound to the container's id. A failure at any point removes what was made and
ends the lease.
"""

import asyncio
import base64
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from neurond import wire
from neurond.daemon import labels, views
from neurond.daemon.broker import Broker, Waiter, Wish
from neurond.daemon.containers import ALWAYS, Containers, Launch, container_name
from neurond.daemon.fence import Fence
from neurond.daemon.points import reach
from neurond.daemon.requests import GONE, Requests, checked_name, owner_of, seconds, want_of
from neurond.daemon.server import Call, Handler
from neurond.daemon.threads import in_thread
from neurond.daemon.vetting import VISIBLE_CORES, contradicts, environment_of, vet
from neurond.host.docker import EngineError, EngineUnreachable, Output
from neurond.ledger.errors import InvalidRequest, NoSuchChip, NoSuchLease, Refused
from neurond.ledger.leases import Binding, ByContainer, Lease, Want
from neurond.ledger.words import ranges
from neurond.spec import (
    EFA_CAPABILITY,
    EFA_DEVICES,
    EFA_SHM,
    EFA_ULIMIT,
    Device,
    Options,
    SpecError,
    create_body,
    pairs,
    restart_policy,
)

log = structlog.get_logger()

LAST_OUTPUT = 10.0
"""Seconds that the output of a container may take to arrive after it has ended."""
NOT_EXECUTABLE, NOT_FOUND, FAILED = 126, 127, 125


class Launching:
    """Answers RunContainer and CheckContainer, and has what the launch of a task needs as well."""

    def __init__(self, broker: Broker, requests: Requests, containers: Containers, fence: Fence) -> None:
        self.broker = broker
        self.requests = requests
        self.containers = containers
        self.engine = containers.engine
        self.fence = fence
        self._loop = asyncio.get_running_loop()

    def handlers(self) -> dict[str, Handler]:
        """Return the functions that answer calls, by the method's name."""
        return {"RunContainer": self._run, "CheckContainer": self._check}

    # -- the calls --------------------------------------------------------------------------------------------------

    async def _run(self, call: Call, request: wire.ContainerRun) -> wire.Progress | None:
        self.requests.may_start(call.peer)
        self.requests.may_lease(call.peer)
        if not (call.more or request.detach):
            raise InvalidRequest("RunContainer streams output unless it detaches: call it with more")
        want = want_of(request.count, request.chips, every=request.all, missing_ok=request.missing_ok)
        wait = seconds("wait", request.wait or 0)
        checked_name(request.name or "")
        check = check_of(request, request)
        if request.inside and not want.chips:
            raise InvalidRequest("another path inside can only be given to a chip that is asked for by its number")
        self.vet(request, check)
        if request.inside:
            _refuse_always(request, "a chip has another path inside")
        self.broker.ledger.check(want)
        try:
            image_env = await self.have_image(call, request, request.pull or "missing")
            self.vet(request, check, image_env)
            reach("container.pulled")
            lease = await self.lease(call, want, ByContainer(request.name or ""), request.name or "", wait)
        except EngineError as error:
            raise failed(error) from None
        launch = self.containers.launches[lease.id]
        try:
            return await self._launch(call, request, lease, launch)
        finally:
            del self.containers.launches[lease.id]
            self.containers.look_soon()

    async def _check(self, call: Call, request: wire.ContainerCheck) -> wire.Checked:
        """Judge what a docker command asks for, by its options and by what its image sets, if that is there."""
        self.requests.may_lease(call.peer)
        self._vet(request)
        try:
            image_env = await in_thread(self.engine.image_env, request.image)
        except EngineError:  # docker itself will say so
            return wire.Checked(None)
        self._vet(request, image_env or ())
        return wire.Checked(image_env is not None)

    # -- for containers and tasks -----------------------------------------------------------------------------------

    def vet(self, options: Options, check: wire.ContainerCheck, image_env: Iterable[str] = ()) -> None:
        """Raise InvalidRequest for what can be seen to be wrong before anything is pulled, leased or created."""
        for volume in options.volumes or ():
            if not volume:
                raise InvalidRequest("-v '': a volume is SOURCE:PATH[:ro]")
        if options.efa:
            _efa_nodes()
        try:
            create_body(options)
        except SpecError as error:
            raise InvalidRequest(str(error)) from None
        self._vet(check, image_env)

    def _vet(self, check: wire.ContainerCheck, image_env: Iterable[str] = ()) -> None:
        vet(check, self.broker.ledger, self.broker.rules.lnc, image_env)
        try:
            policy = restart_policy(check.restart or "no")["Name"]
        except SpecError as error:
            raise InvalidRequest(str(error)) from None
        if policy in ALWAYS and not self.fence.is_on:
            raise InvalidRequest(
                f"--restart {check.restart}: Docker would start the container again after its chips went to somebody "
                "else, and this engine can't be kept from it (it has no CDI, or has it off): use on-failure[:TIMES]"
            )

    async def have_image(self, call: Call, options: Options, policy: str) -> list[str]:
        """Pull an image if need be, and return the NAME=VALUE that it sets. No chip is held meanwhile."""
        image = options.image
        env = None if policy == "always" else await in_thread(self.engine.image_env, image)
        if env is not None:
            return env
        if policy == "never":
            raise EngineError(f"image {image} is not here, and --pull never forbids to get it")
        gone = threading.Event()
        call.on_gone = gone.set

        def tell(line: str) -> bool:
            self._loop.call_soon_threadsafe(lambda: tell_status(call, f"pulling {image}: {line}", passing=True))
            return not gone.is_set()

        tell_status(call, f"pulling {image}")
        await in_thread(self.engine.pull, image, tell, options.platform)
        call.on_gone = None
        if gone.is_set():
            raise NoSuchLease("the client went away during the pull")
        return await in_thread(self.engine.image_env, image) or []

    async def lease(self, call: Call, want: Want, binding: Binding, name: str, wait: float) -> Lease:
        """Lease chips with the intent to create containers of known names; its launch is known from now on."""
        granted: asyncio.Future[Lease] = self._loop.create_future()

        def settle(outcome: Lease | Refused) -> None:
            if not granted.done():
                granted.set_result(outcome) if isinstance(outcome, Lease) else granted.set_exception(outcome)

        await self.broker.known()
        if call.connection.gone:
            raise NoSuchLease("the client went away before its request")
        waiter = Waiter(settle, settle)
        lease = self.broker.ask(Wish(want, owner_of(call.peer), binding, name, wait))
        if lease.state == "queued":
            self.broker.join(lease.id, waiter)
        # From the first moment on, so that no look takes it for what a crash has left behind.
        self.containers.launches[lease.id] = Launch()
        try:
            if lease.state == "queued":

                def gone() -> None:
                    self.broker.leave(lease.id, waiter, GONE)
                    settle(NoSuchLease(GONE))

                call.on_gone = gone
                tell_status(call, f"waiting: {self.broker.why_waits(lease)}")
                lease = await granted
                call.on_gone = None
            await self.broker.recording.recorded(lease.id)
            if _is_gone(call):  # nobody could stop what it would start
                self.broker.end(lease.id, GONE)
                raise NoSuchLease(GONE)
        except BaseException:
            del self.containers.launches[lease.id]
            raise
        return lease

    async def create(
        self,
        options: Options,
        lease: Lease,
        name: str,
        chips: Sequence[Device],
        *,
        more_labels: Mapping[str, str],
        numbering: str = "none",
    ) -> str:
        """Create a container that has these chips of a lease; return its id. Raises EngineError or InvalidRequest."""
        env = views.environment(self.broker.ledger, lease, self.broker.rules.lnc)
        cores = views.cores_of(self.broker.ledger, lease.chips, self.broker.rules.lnc)
        given = environment_of(options.env or ())
        wrong = contradicts(given, self.broker.ledger, lease.chips, self.broker.rules.lnc)
        if wrong:
            raise InvalidRequest(wrong)
        visible = env.pop(VISIBLE_CORES, None)
        if visible and numbering != "none" and VISIBLE_CORES not in given:
            env[VISIBLE_CORES] = ",".join(map(str, cores if numbering == "global" else range(len(cores))))
        if not chips:
            env = {}
        own = labels.labels_of(self.containers.home, lease) | {labels.NAME: name, **more_labels}
        made = Options(**{field: getattr(options, field) for field in Options.__struct_fields__})
        made.labels = [f"{key}={value}" for key, value in (pairs("label", options.labels or ()) | own).items()]
        if options.efa:
            _add_efa(made)
        plain = any(device.path != f"/dev/neuron{index}" for device, index in zip(chips, lease.chips, strict=False))
        cdi = self.fence.name_of(lease) if chips and not plain and len(chips) == len(lease.chips) else None
        if chips and cdi is None:
            _refuse_always(options, "its chips can't be given by the name of their lease")
        body = create_body(
            made, () if cdi else chips, [cdi] if cdi else (), [f"{key}={value}" for key, value in env.items()]
        )
        return await in_thread(self.engine.create, name, body, options.platform)

    def nodes(self, lease: Lease, inside: Mapping[str, str] | None = None) -> list[Device]:
        """Return the devices of a lease's chips, with other paths inside where they are given, by the chip's number."""
        paths = inside or {}
        return [Device(self.node(lease, index), paths.get(str(index), f"/dev/neuron{index}")) for index in lease.chips]

    def node(self, lease: Lease, index: int) -> str:
        """Return the node of a chip of a lease. Raises NoSuchChip if it is none of its, or vanished since the grant."""
        if index not in lease.chips:
            raise NoSuchChip(f"chip {index} is none of lease {lease.id}, which has {ranges(lease.chips)}")
        chip = self.broker.ledger.chips.get(index)
        if chip is None:
            raise NoSuchChip(f"chip {index} has vanished from the host since it was leased")
        return chip.node

    def pump(self, call: Call, output: Output, container: str | None = None) -> None:
        """Send the output of a container as it comes, as fast as the client reads it. Runs in a thread."""

        async def send(stream: str, data: bytes) -> bool:
            text = base64.b64encode(data).decode("ascii")
            call.reply(wire.Progress(stream=stream, data=text, container=container), last=False)
            return await call.writable()

        for stream, data in output:
            if not asyncio.run_coroutine_threadsafe(send(stream, data), self._loop).result():
                output.close()
                return

    async def last_output(self, call: Call, pump: "asyncio.Future[None]", output: Output) -> None:
        """Wait for what a container that has ended had to say."""
        # What the client has not read yet is its own pace; only an engine that never ends the stream is cut off.
        while not (await asyncio.wait([pump], timeout=LAST_OUTPUT))[0] and not call.connection.may_write.is_set():
            pass
        output.close()

    # -- one container ----------------------------------------------------------------------------------------------

    async def _launch(
        self, call: Call, request: wire.ContainerRun, lease: Lease, launch: Launch
    ) -> wire.Progress | None:
        name = container_name(lease, request.name or "")
        created, started, output = "", False, None
        reach("container.leased")
        more = {labels.REMOVE: "yes"} if request.remove else {}
        numbering = request.core_numbering or "none"
        try:
            devices = self.nodes(lease, request.inside)
            created = await self.create(request, lease, name, devices, more_labels=more, numbering=numbering)
            reach("container.created")
            if not request.detach:
                output = await in_thread(self.engine.attach, created)
            if call.connection.gone:
                raise EngineError("the client went away before the start")
            started = True
            self.containers.expect_end(created)
            await in_thread(self.engine.start, created)
            reach("container.started")
            if call.connection.gone:  # it never learned of the container, so it could not stop it either
                raise EngineError("the client went away during the start")
            self.broker.happened(self.broker.ledger.bind(lease.id, ByContainer(name, created)))
        except (EngineError, Refused) as error:
            if output is not None:
                output.close()
            self.containers.expect_none(created)
            await self.undo(lease, ByContainer(name, created), [created], error, started=started)
            raise failed(error) if isinstance(error, EngineError) else error from None
        launch.started = True
        with suppress(wire.JournalFull):  # the intent is in the journal, by which the container is found again
            await self.broker.recording.recorded(lease.id)
        reach("container.bound")
        if request.detach:
            self.containers.look_soon()  # it may be over already
        running = wire.Progress(lease=lease.id, chips=list(lease.chips), container=name, container_id=created)
        if output is None:
            self.containers.expect_none(created)
            return running
        call.reply(running, last=False)
        pump = asyncio.ensure_future(in_thread(self.pump, call, output))
        code = await self.containers.ended(created)
        await self.last_output(call, pump, output)
        if request.remove:  # as docker run --rm: gone when the command returns, so its name can be used again
            with suppress(EngineError):
                await in_thread(self.engine.remove, created)
        return wire.Progress(exit_code=FAILED if code is None else code)

    async def undo(
        self, lease: Lease, binding: Binding, created: Iterable[str], error: Exception, *, started: bool
    ) -> None:
        """Remove what a launch that failed has made, and end its lease; in doubt its container keeps the chips."""
        reason = f"its container could not be started: {error}"
        try:
            for container in filter(None, created):
                await in_thread(self.engine.remove, container)
        except EngineError:
            if started:  # it may run all the same
                with suppress(NoSuchLease):
                    self.broker.happened(self.broker.ledger.bind(lease.id, binding))
                return
        if started:
            self.broker.binding_ended(lease.id, reason)
            await self.broker.known()  # so that who hears of the failure finds the chips free
        else:
            self.broker.end(lease.id, reason)


def _is_gone(call: Call) -> bool:
    """Tell whether the client is gone by now, whatever was true before."""
    return call.connection.gone


def _refuse_always(options: Options, why: str) -> None:
    """Raise InvalidRequest for a policy by which the engine would start a container whoever has its chips by then."""
    if restart_policy(options.restart or "no")["Name"] in ALWAYS:
        raise InvalidRequest(
            f"--restart {options.restart}: {why}, so Docker could not be kept from starting the container after its "
            "chips went to somebody else: use on-failure[:TIMES]"
        )


def check_of(options: Options, wish: wire.ContainerRun | wire.ContainerCheck) -> wire.ContainerCheck:
    """Return what matters of the options of a container, and of how chips are asked for."""
    return wire.ContainerCheck(
        options.image,
        wish.count,
        wish.chips,
        wish.all,
        privileged=options.privileged,
        devices=options.devices,
        volumes=options.volumes,
        mounts=options.mounts,
        env=options.env,
        labels=options.labels,
        restart=options.restart,
    )


def _efa_nodes() -> list[str]:
    """Return the nodes of the Elastic Fabric Adapter. Raises InvalidRequest if there are none."""
    nodes = sorted(str(path) for path in Path(EFA_DEVICES).parent.glob(Path(EFA_DEVICES).name + "*"))
    if not nodes:
        raise InvalidRequest(f"--efa: this host has no {EFA_DEVICES}*: is the EFA driver loaded?")
    return nodes


def _add_efa(options: Options) -> None:
    """Add what the Elastic Fabric Adapter takes, but for what the user set himself."""
    options.devices = [*(options.devices or ()), *_efa_nodes()]
    options.cap_add = [*(options.cap_add or ()), EFA_CAPABILITY]
    if not any(text.startswith("memlock=") for text in options.ulimits or ()):
        options.ulimits = [*(options.ulimits or ()), EFA_ULIMIT]
    options.shm_size = options.shm_size or EFA_SHM


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


def tell_status(call: Call, line: str, *, passing: bool = False) -> None:
    """Tell a client that follows what is going on; what passes is left out if the client does not keep up."""
    if call.more and not (passing and call.unread()):
        call.reply(wire.Progress(status=line, passing=passing or None), last=False)
