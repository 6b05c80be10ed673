"""Tasks: several containers on one lease, started in the order of what they depend on.

The lease is bound to all of them, and lives as long as any does. When an essential container ends, or the owner or root
says so, the others are stopped. All of that is in memory: after a crash of neurond the containers that run go on and
keep the lease, and end each for itself.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import structlog

from neurond import wire
from neurond.daemon import labels
from neurond.daemon.containers import Containers, container_name
from neurond.daemon.launching import FAILED, Launching, failed
from neurond.daemon.points import reach
from neurond.daemon.requests import Requests, checked_name, seconds, want_of
from neurond.daemon.server import Call, Handler
from neurond.daemon.threads import in_thread
from neurond.host.docker import EngineError, Output
from neurond.ledger.errors import InvalidRequest, NoSuchLease, NotAllowed
from neurond.ledger.leases import ByTask, Lease
from neurond.spec import Device

log = structlog.get_logger()

HEALTH_PERIOD = 1.0
MOST_CONTAINERS = 10
"""As in ECS."""


@dataclass(slots=True)
class Part:
    """One container of a running task: `started` and `ended` (with its exit code) are waited for by others."""

    wanted: wire.TaskContainer
    started: "asyncio.Future[None]"
    ended: "asyncio.Future[int]"
    id: str = ""
    output: Output | None = None


@dataclass(slots=True)
class Task:
    """A task that this daemon runs."""

    name: str
    lease: Lease
    parts: dict[str, Part]
    stop: asyncio.Event = field(default_factory=asyncio.Event)


class Tasks:
    """Answers RunTask and StopTask."""

    def __init__(self, requests: Requests, containers: Containers, launching: Launching) -> None:
        self.requests = requests
        self.broker = requests.broker
        self.containers = containers
        self.engine = containers.engine
        self.launching = launching
        self._running: dict[str, Task] = {}
        self._followed: set[asyncio.Task[int]] = set()
        self._loop = asyncio.get_running_loop()

    def handlers(self) -> dict[str, Handler]:
        """Return the functions that answer calls, by the method's name."""
        return {"RunTask": self._run, "StopTask": self._stop}

    async def _run(self, call: Call, request: wire.TaskRun) -> wire.Progress:
        self.requests.may_start(call.peer)
        self.requests.may_lease(call.peer)
        if not (call.more or request.detach):
            raise InvalidRequest("RunTask streams output unless it detaches: call it with more")
        _check_containers(request)
        want = want_of(request.count, request.chips, every=request.all, missing_ok=request.missing_ok)
        self.broker.ledger.check(want)
        wait = seconds("wait", request.wait or 0)
        name = checked_name(request.name)
        for part in request.containers:
            self._vet(request, part)
        try:
            for part in request.containers:
                self._vet(request, part, await self.launching.have_image(call, part.options, "missing"))
            reach("container.pulled")
            names = tuple(part.name for part in request.containers)
            lease = await self.launching.lease(call, want, ByTask(names, ("",) * len(names)), name, wait)
        except EngineError as error:
            raise failed(error) from None
        parts = {
            part.name: Part(part, self._loop.create_future(), self._loop.create_future()) for part in request.containers
        }
        task = self._running[lease.id] = Task(name, lease, parts)
        begun = wire.Progress(lease=lease.id, chips=list(lease.chips))
        if not request.detach:
            call.reply(begun, last=False)
        following = self._loop.create_task(self._follow(call, task, detached=bool(request.detach)))
        self._followed.add(following)
        following.add_done_callback(self._followed.discard)
        if request.detach:
            first = [part.started for part in parts.values() if not part.wanted.depends_on]
            futures: list[asyncio.Future[Any]] = [following, asyncio.gather(*first)]
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                return begun
        return wire.Progress(exit_code=await following)

    def _vet(self, request: wire.TaskRun, part: wire.TaskContainer, image_env: list[str] | None = None) -> None:
        """Judge one container by the chips that it gets; those that it shares with the whole task count as its own."""
        own = [chip.chip for chip in part.chips or ()]
        check = wire.ContainerCheck(
            part.options.image,
            request.count if part.all_chips else None,
            own or (request.chips if part.all_chips else None),
            all=request.all,
            privileged=part.options.privileged,
            devices=part.options.devices,
            volumes=part.options.volumes,
            mounts=part.options.mounts,
            env=part.options.env,
            labels=part.options.labels,
            restart=part.options.restart,
        )
        try:
            self.launching.vet(part.options, check, image_env or ())
        except InvalidRequest as error:
            raise InvalidRequest(f"container {part.name}: {error}") from None

    async def _stop(self, call: Call, request: wire.TaskStop) -> wire.Done:
        """Stop a task by its lease; one that an earlier daemon began too."""
        self.requests.may_start(call.peer)
        lease = self.broker.ledger.leases.get(request.task)
        if lease is None or not isinstance(lease.binding, ByTask):
            raise NoSuchLease(f"no task {request.task!r} runs here (neurond task describe lists them)")
        if call.peer.uid not in {0, lease.owner.uid}:
            raise NotAllowed(f"task {lease.id} belongs to {lease.owner.name}: only {lease.owner.name} or root may")
        task = self._running.get(lease.id)
        if task is not None:
            task.stop.set()
            await asyncio.wait([part.ended for part in task.parts.values()])
        else:
            living = [one for _, one in lease.binding.containers if one]
            try:
                await asyncio.gather(*(self.containers.stop(one, None) for one in living))
            except EngineError as error:
                raise failed(error) from None
        self.containers.look_soon()
        return wire.Done()

    # -- the life of a task -----------------------------------------------------------------------------------------

    async def _follow(self, call: Call, task: Task, *, detached: bool) -> int:
        """Run a task to its end; return the exit code of the essential container that ended first."""
        workers = [self._loop.create_task(self._live(call, task, p, detached=detached)) for p in task.parts.values()]
        essential = [part.ended for part in task.parts.values() if part.wanted.essential is not False]
        stopping: asyncio.Task[Any] = self._loop.create_task(task.stop.wait())
        problem: BaseException | None = None
        try:
            waiting: set[asyncio.Future[Any]] = {*workers, stopping}
            while waiting and not stopping.done() and not any(part.done() for part in essential):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                problem = next((one.exception() for one in done if one.exception() is not None), None)
                if problem is not None or waiting == {stopping}:
                    break
            first = next((part.result() for part in essential if part.done()), None)
            if problem is not None:
                raise problem
            await self._end(task, workers)
        except Exception as error:  # of whatever kind: no container runs on when nobody follows the task any more
            await self._give_up(task, workers, error)
            if isinstance(error, EngineError):
                raise failed(error) from None
            raise
        finally:
            stopping.cancel()
            for part in task.parts.values():
                if not part.ended.done():
                    part.ended.set_result(FAILED)
            self.containers.launches.pop(task.lease.id, None)
            del self._running[task.lease.id]
            self.containers.look_soon()
        codes = [part.ended.result() for part in task.parts.values() if part.wanted.essential is not False]
        return first if first is not None else next(iter(codes), 0)

    async def _live(self, call: Call, task: Task, part: Part, *, detached: bool) -> None:
        """Make one container when what it depends on is so far, and follow it to its end."""
        for dependency in part.wanted.depends_on or ():
            await self._wait_for(task, part, dependency)
        pump = None
        await self._start(task, part, detached=detached)
        if part.output is not None:
            pump = asyncio.ensure_future(in_thread(self.launching.pump, call, part.output, part.wanted.name))
        code = await self.containers.ended(part.id)
        if pump is not None and part.output is not None:
            await self.launching.last_output(call, pump, part.output)
        call.reply(wire.Progress(container=part.wanted.name, exit_code=FAILED if code is None else code), last=False)
        part.ended.set_result(FAILED if code is None else code)

    async def _wait_for(self, task: Task, part: Part, dependency: wire.TaskDependency) -> None:
        other = task.parts[dependency.container]
        await asyncio.shield(other.started)
        if dependency.condition in {"COMPLETE", "SUCCESS"}:
            code = await asyncio.shield(other.ended)
            if dependency.condition == "SUCCESS" and code != 0:
                raise EngineError(f"container {part.wanted.name} needs {dependency.container}, which ended with {code}")
        while dependency.condition == "HEALTHY":
            found = await in_thread(self.engine.inspect, other.id)
            if found is not None and found.health == "healthy":
                return
            if found is None or not found.lives or found.health == "unhealthy":
                raise EngineError(f"container {part.wanted.name} needs {dependency.container}, which is not healthy")
            await asyncio.sleep(HEALTH_PERIOD)

    async def _start(self, task: Task, part: Part, *, detached: bool) -> None:
        wanted, lease = part.wanted, task.lease
        name = container_name(lease, wanted.name)
        chips = self._devices(lease, wanted)
        own = {
            labels.TASK: task.name,
            labels.TASK_CONTAINER: wanted.name,
            labels.CHIPS: ",".join(str(index) for index in self._indices(lease, wanted)),
        }
        part.id = await self.launching.create(wanted.options, lease, name, chips, more_labels=own)
        reach("container.created")
        if not detached:
            part.output = await in_thread(self.engine.attach, part.id)
        await in_thread(self.engine.start, part.id)
        reach("container.started")
        current = self.broker.ledger.get(lease.id)
        if not isinstance(current.binding, ByTask):
            raise NoSuchLease(f"lease {lease.id} is bound to something else now")
        ids = tuple(one.id for one in task.parts.values())
        self.broker.happened(self.broker.ledger.bind(lease.id, ByTask(current.binding.names, ids)))
        await self.broker.recording.recorded(lease.id)
        reach("container.bound")
        part.started.set_result(None)

    def _indices(self, lease: Lease, wanted: wire.TaskContainer) -> list[int]:
        return list(lease.chips) if wanted.all_chips else sorted({chip.chip for chip in wanted.chips or ()})

    def _devices(self, lease: Lease, wanted: wire.TaskContainer) -> list[Device]:
        if wanted.all_chips:
            return self.launching.nodes(lease)
        chips = wanted.chips or ()
        return [Device(self.launching.node(lease, chip.chip), chip.path, chip.permissions) for chip in chips]

    async def _end(self, task: Task, workers: "list[asyncio.Task[None]]") -> None:
        """Stop what still runs, and wait until all of it has ended."""
        for worker, part in zip(workers, task.parts.values(), strict=True):
            if not part.started.done():
                worker.cancel()
        living = [part for part in task.parts.values() if part.started.done() and not part.ended.done()]
        await asyncio.gather(*(self._stop_one(part) for part in living))
        await asyncio.gather(*workers, return_exceptions=True)
        # What was created, or just being started, when the task ended
        made = [part for part in task.parts.values() if part.id and not part.started.done()]
        for part in made:
            with suppress(EngineError):
                await in_thread(self.engine.remove, part.id)

    async def _stop_one(self, part: Part) -> None:
        with suppress(EngineError):  # it goes on, and keeps the lease: the next look at the containers will tell
            await self.containers.stop(part.id, None)

    async def _give_up(self, task: Task, workers: "list[asyncio.Task[None]]", error: Exception) -> None:
        """Take back what a task that can't run has made."""
        log.info("task.failed", lease=task.lease.id, task=task.name, error=str(error))
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        parts = task.parts.values()
        await asyncio.gather(*(self._stop_one(part) for part in parts if part.started.done() and not part.ended.done()))
        made = [part.id for part in parts if part.id]
        started = any(part.started.done() for part in parts)
        binding = ByTask(tuple(container_name(task.lease, p.wanted.name) for p in parts), tuple(p.id for p in parts))
        await self.launching.undo(task.lease, binding, made, error, started=started or bool(made))


def _check_containers(request: wire.TaskRun) -> None:
    """Refuse what can't be: no containers or too many, names twice, unknown or circular dependencies, stray chips."""
    by_name: Mapping[str, wire.TaskContainer] = {part.name: part for part in request.containers}
    if not request.containers or len(request.containers) > MOST_CONTAINERS:
        raise InvalidRequest(f"a task has 1 to {MOST_CONTAINERS} containers, this one {len(request.containers)}")
    if len(by_name) < len(request.containers):
        raise InvalidRequest("two containers of the task have the same name")
    if not any(part.all_chips or part.chips for part in request.containers):
        raise InvalidRequest("no container of the task asks for a chip: it needs no lease, so docker itself can run it")
    for part in request.containers:
        checked_name(part.name)
        stray = {chip.chip for chip in part.chips or ()} - set(request.chips or ())
        if stray and not request.all:
            raise InvalidRequest(f"container {part.name} is given chip {min(stray)}, which the task does not ask for")
    done: set[str] = set()
    while len(done) < len(by_name):
        ready = {
            name
            for name, part in by_name.items()
            if name not in done and {one.container for one in part.depends_on or ()} <= done
        }
        if not ready:
            circle = ", ".join(sorted(by_name.keys() - done))
            raise InvalidRequest(f"containers {circle} depend on each other in a circle, or on one that is not there")
        done |= ready
