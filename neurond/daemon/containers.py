"""Containers on leased chips, followed: what runs, what has ended, what came back, what nobody will miss.

News from the engine means "look again": every look compares all containers with all leases, so that an event that never
came costs time and nothing else. A container is known by its id, which the journal has; labels alone are no proof, as
`docker commit` copies them into an image.
"""

import asyncio
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import structlog

from neurond.daemon import labels
from neurond.daemon.broker import Broker
from neurond.daemon.fence import Fence
from neurond.daemon.look import Look
from neurond.daemon.openable import chips_in
from neurond.daemon.points import reach
from neurond.daemon.strangers import Strangers
from neurond.daemon.threads import in_thread
from neurond.host.docker import Container, Engine, EngineError
from neurond.ledger.leases import ByContainer, ByProcess, ByTask, Lease, OnContainers, container_ids

log = structlog.get_logger()

RECONNECT = 1.0
QUIET = 0.1
"""Seconds from the start of a container, or an end that was told, to the look at all others, which takes time too."""
ALWAYS = {"always", "unless-stopped"}
"""Restart policies by which an engine starts a container also when it starts itself."""
ALWAYS_GRACE = 4.0
"""Seconds that an engine may take from stopping its containers to being gone."""


@dataclass(slots=True)
class Launch:
    """A lease whose containers are being made: until `started`, a look leaves it to who makes them."""

    started: bool = False


class Containers:
    """All containers of this daemon on an engine, and the strangers that have chips.

    `home` is the daemon's runtime directory.
    """

    def __init__(self, broker: Broker, engine: Engine, fence: Fence, home: str) -> None:
        self.broker = broker
        self.engine = engine
        self.fence = fence
        self.home = home
        self.launches: dict[str, Launch] = {}
        self._exits: dict[str, asyncio.Future[int | None]] = {}
        self._ends: set[asyncio.Task[None]] = set()
        self._removing: dict[str, asyncio.Task[None]] = {}
        self._reachable = True
        self._knows_engine = False
        self._may_be_restarted: dict[str, bool] = {}
        """Containers that were sent a signal: whether that may be the first half of a docker restart."""
        self._gone_since: dict[str, float] = {}
        """Leases whose container has ended, but may come back, with the time of that by the loop's clock."""
        self._waits: dict[str, asyncio.Task[None]] = {}
        self._looking = asyncio.Lock()
        self._again = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.strangers = Strangers(
            broker,
            engine,
            home,
            is_ready=self._is_ready,
            end=self.stop,
            look_soon=self._again.set,
        )
        broker.on_orphan = self._again.set

    # -- for those who launch ---------------------------------------------------------------------------------------

    def look_soon(self) -> None:
        """Have a look soon."""
        self._again.set()

    def expect_end(self, container_id: str) -> None:
        """Take note of the end of a container that is about to be started, until `ended` or `expect_none`."""
        self._exits[container_id] = self._loop.create_future()

    def expect_none(self, container_id: str) -> None:
        """Forget that the end of a container was expected, as it was not started."""
        self._exits.pop(container_id, None)

    async def ended(self, container_id: str) -> int | None:
        """Wait until a container has ended for good; return its exit code, None if it was removed before."""
        future = self._exits.get(container_id)
        if future is None:
            future = self._exits[container_id] = self._loop.create_future()
            self._take_end_soon(container_id)  # it may be over already
        return await asyncio.shield(future)

    async def stop(self, container_id: str, grace: int | None) -> None:
        """Stop a container for good, its own grace for None: it is not expected back. Raises EngineError."""
        self._may_be_restarted[container_id] = False
        await in_thread(self.engine.stop, container_id, grace)

    async def mine(self) -> list[Container]:
        """Return all containers of this daemon, whatever their state. Raises EngineError."""
        found = await in_thread(self.engine.containers)
        return [container for container in found if container.labels.get(labels.HOME) == self.home]

    # -- following --------------------------------------------------------------------------------------------------

    async def follow(self) -> None:
        """Look at once, whenever the engine has news, and every so often. Runs until cancelled."""
        self._again.set()
        threading.Thread(target=self._listen, name="docker-events", daemon=True).start()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.broker.rules.settings.docker_look_every):
                    await self._again.wait()
            self._again.clear()
            await self.try_to_look()

    async def try_to_look(self) -> None:
        """Look, or take note that the engine can't be asked."""
        try:
            await self.look()
        except EngineError as error:
            self._note_failure(error)
        except Exception:  # whatever an engine may answer, chips in doubt stay withheld, and we look again
            log.exception("containers.failed")
        else:
            self._reachable = True

    def _note_failure(self, error: EngineError) -> None:
        """Say once that the engine can't be asked: a warning only where that matters."""
        if self._reachable:
            leases = self.broker.ledger.leases.values()
            if any(isinstance(lease.binding, OnContainers) for lease in leases):
                log.warning("engine.failed", error=str(error), follows="keeping the chips of containers leased")
            else:
                log.info("engine.absent", error=str(error))
        self._reachable = False

    async def look(self) -> None:
        """Compare all containers with all leases. Raises EngineError at the end for what could not be found out."""
        async with self._looking:
            if not self._knows_engine:
                self.fence.found(await in_thread(self.engine.cdi_directories))
                self._knows_engine = True
                self._gone_since.clear()
            mine = await self.mine()
            look = Look(self.engine)
            leases = [lease for lease in self.broker.ledger.leases.values() if self._is_settled(lease)]
            bound = {one for lease in self.broker.ledger.leases.values() for one in container_ids(lease.binding)}
            self._may_be_restarted = {one: may for one, may in self._may_be_restarted.items() if one in bound}
            tasks = [self._compare(lease, look) for lease in leases if isinstance(lease.binding, OnContainers)]
            tasks += [self._hand_over(lease, mine, look) for lease in leases if is_handed_over_next(lease)]
            problems = [e for e in await asyncio.gather(*tasks, return_exceptions=True) if e is not None]
            ending = [self._tell_exit(container_id, look) for container_id in tuple(self._exits)]
            problems += [e for e in await asyncio.gather(*ending, return_exceptions=True) if e is not None]
            for container in mine:
                await self._tidy(await look.latest(container))
            await self.strangers.find(look)
            for problem in problems:
                raise problem

    def _is_settled(self, lease: Lease) -> bool:
        launch = self.launches.get(lease.id)
        return launch is None or launch.started

    async def _compare(self, lease: Lease, look: Look) -> None:
        """Compare one lease with the containers that it is bound to."""
        assert isinstance(lease.binding, OnContainers)  # noqa: S101 - tells mypy
        found = [await self._found(lease, name, known_id, look) for name, known_id in lease.binding.containers]
        if self.broker.ledger.leases.get(lease.id) is not lease:
            return  # it is another one since we asked
        living = [container for container in found if container is not None and stays(lease, container)]
        if living:
            self._gone_since.pop(lease.id, None)
        if lease.state != "active":
            if living:  # started again before its chips were free, as by docker restart
                self.broker.happened(self.broker.ledger.revive(lease.id))
        elif living:
            binding = _bound_to(lease.binding, found)
            if binding != lease.binding:  # an intent that a crash interrupted, or a new name
                self.broker.happened(self.broker.ledger.bind(lease.id, binding))
        elif not self._may_come_back(lease, found):
            reach("container.ended")
            self.broker.binding_ended(lease.id, why_over(lease, found))

    def _may_come_back(self, lease: Lease, found: list[Container | None]) -> bool:
        """Tell whether a container that has ended may be started again at once, and keeps its lease for that moment.

        By `docker restart`, if it was sent a signal. Or by an engine that is just being stopped, when it is started
        again, but only where its name as a device will let it: with policy always; if the engine goes away within the
        moment, the lease goes on until the engine is back.
        """
        there = [container for container in found if container is not None]
        stopped = any(self._may_be_restarted.get(container.id) for container in there)
        grace = self.broker.rules.settings.restart_grace if stopped else 0
        if any(container.restart in ALWAYS for container in there):
            grace = ALWAYS_GRACE
        since = self._gone_since.setdefault(lease.id, self._loop.time())
        if self._loop.time() - since >= grace:
            del self._gone_since[lease.id]
            return False
        if lease.id not in self._waits:
            self._waits[lease.id] = self._loop.create_task(self._compare_later(lease.id, grace))
        return True

    async def _compare_later(self, lease_id: str, after: float) -> None:
        """Compare one lease again, also while a look is held up by another's container."""
        await asyncio.sleep(after)
        del self._waits[lease_id]
        lease = self.broker.ledger.leases.get(lease_id)
        if lease is not None:
            with suppress(EngineError):  # the next look will tell
                await self._compare(lease, Look(self.engine))

    async def _found(self, lease: Lease, name: str, known_id: str, look: Look) -> Container | None:
        found = await look.inspect(known_id or container_name(lease, name))
        if found is not None and not known_id and found.labels.get(labels.LEASE) != lease.id:
            return None  # somebody else's, of the name that we had in mind
        return found

    async def _hand_over(self, lease: Lease, mine: list[Container], look: Look) -> None:
        """Bind a lease that a docker command holds to the container that it has started, if it has."""
        orphan = self.broker.orphans.get(lease.id)
        starting = False
        for container in mine:
            if container.labels.get(labels.LEASE) != lease.id:
                continue
            found = await look.inspect(container.id)
            chips = set(chips_in(self.broker.ledger, found, self.home)) if found is not None else set()
            if found is None or not chips <= set(lease.chips) or not (chips or lease.lost):
                continue  # with more than these it stays a stranger, with none it is not the one that was started
            if self.broker.ledger.leases.get(lease.id) is not lease:
                return
            if found.lives or (orphan is not None and stays(lease, found)):
                self.broker.happened(self.broker.ledger.bind(lease.id, ByContainer(found.name, found.id)))
                return
            starting |= found.status == "created"
        if orphan is not None and self.broker.ledger.leases.get(lease.id) is lease:
            if starting and self._loop.time() - orphan.since < self.broker.rules.settings.start_grace:
                self._loop.call_later(1, self._again.set)
            else:
                self.broker.binding_ended(lease.id, orphan.reason)

    async def _tell_exit(self, container_id: str, look: Look) -> None:
        found = await look.inspect(container_id)
        leases = self.broker.ledger.leases
        if any(one in leases and container_id in container_ids(leases[one].binding) for one in self._gone_since):
            return  # it may come back
        if found is None or not (found.lives or found.status == "created"):
            future = self._exits.pop(container_id, None)
            if future is not None and not future.done():
                future.set_result(found.exit_code if found is not None else None)

    def _is_ready(self, container: Container) -> bool:
        launch = self.launches.get(container.labels.get(labels.LEASE, ""))
        return launch is None or launch.started

    async def _tidy(self, container: Container) -> None:
        """Have removed what nobody will miss: a container never started, or one that was to be removed when it ends.

        No look waits for that: an engine may hang on the removal of one container.
        """
        lease_id = container.labels[labels.LEASE]
        if lease_id in self.launches or container.lives:
            return
        lease = self.broker.ledger.leases.get(lease_id)
        if lease is not None and lease.state == "active" and not await self._was_given_up(lease, container):
            return
        half_made = container.status == "created" and container.labels.get(labels.NAME) == container.name
        ended = container.labels.get(labels.REMOVE) == "yes" and self.strangers.is_our_own(container)
        if (half_made or ended) and container.id not in self._removing:
            self._removing[container.id] = self._loop.create_task(self._remove(container))

    async def _remove(self, container: Container) -> None:
        try:
            if await self._has_labels_of_its_image(container):
                return
            await in_thread(self.engine.remove, container.id)
        except EngineError as error:
            log.warning("container.not_removed", container=container.name, error=str(error), follows="trying again")
        else:
            lease = container.labels[labels.LEASE]
            log.info("container.removed", container=container.name, lease=lease, status=container.status)
            reach("container.removed")
        finally:
            del self._removing[container.id]

    async def _was_given_up(self, lease: Lease, container: Container) -> bool:
        """Tell whether nobody will start a container of a lease that lives: a crash came between, in a task."""
        if container.status != "created" or not isinstance(lease.binding, ByTask):
            return False
        with suppress(EngineError):
            found = await in_thread(self.engine.inspect, container.id)
            return found is not None and found.status == "created" and lease.id not in self.launches
        return False

    async def _has_labels_of_its_image(self, container: Container) -> bool:
        """Tell whether a container was made of a copy (`docker commit`) of one of ours, and not by us."""
        inherited = await in_thread(self.engine.image_labels, container.image)
        return inherited.get(labels.LEASE) == container.labels[labels.LEASE]

    def _listen(self) -> None:
        """Wait for news, for ever; the stream may end at any time without a word."""
        there = True
        while not self._loop.is_closed():
            was_there, there = there, True
            try:
                self.engine.events(self._news)
            except EngineError:
                there = False
            except Exception:  # the stream was cut in the middle of a message, or holds what docker-py can't read
                log.exception("engine.events_failed", follows="looking every so often, and listening again")
            self._knows_engine = False  # it may be another one when it is back
            if there or was_there:
                self._news("", "")  # the stream has ended, or did not begin: that is news once
            time.sleep(RECONNECT)

    def _news(self, action: str, container_id: str) -> None:
        with suppress(RuntimeError):  # the loop is closed: neurond stops
            self._loop.call_soon_threadsafe(self._take_news, action, container_id)

    def _take_news(self, action: str, container_id: str) -> None:
        if action == "kill":
            self._may_be_restarted.setdefault(container_id, True)
            return  # whether it has ended by that, other news will tell
        if action == "start":
            self._may_be_restarted.pop(container_id, None)
            self._loop.call_later(QUIET, self._again.set)
        elif container_id in self._exits:
            self._take_end_soon(container_id)
        else:
            self._again.set()

    def _take_end_soon(self, container_id: str) -> None:
        task = self._loop.create_task(self._take_end(container_id))
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    async def _take_end(self, container_id: str) -> None:
        """Tell of the end of a container that somebody waits for, before the others are looked at."""
        look = Look(self.engine)
        lease = next(
            (it for it in self.broker.ledger.leases.values() if container_id in container_ids(it.binding)), None
        )
        with suppress(EngineError):  # the look that follows will tell
            if lease is not None and self._is_settled(lease):
                await self._compare(lease, look)
            if container_id in self._exits:
                await self._tell_exit(container_id, look)
        self._loop.call_later(QUIET, self._again.set)


def is_handed_over_next(lease: Lease) -> bool:
    """Tell whether a docker command holds a lease for the container that it starts."""
    return bool(lease.for_container) and isinstance(lease.binding, ByProcess) and lease.state == "active"


def container_name(lease: Lease, wanted: str = "") -> str:
    """Return the name of a lease's container: the user's choice, or one made of the lease's id.

    Those of a task have the names that they have in it, after the lease's id.
    """
    if isinstance(lease.binding, ByTask):
        return f"neurond-{lease.id}-{wanted}"
    return wanted or f"neurond-{lease.id}"


def _bound_to(binding: OnContainers, found: list[Container | None]) -> OnContainers:
    """Return a binding with the names and ids that its containers have now."""
    both = [
        (container.name, container.id) if container is not None and container.status != "created" else before
        for container, before in zip(found, binding.containers, strict=True)
    ]
    if isinstance(binding, ByContainer):
        return ByContainer(*both[0])
    return ByTask(tuple(name for name, _ in both), tuple(one for _, one in both))


def stays(lease: Lease, container: Container) -> bool:
    """Tell whether a container keeps its lease alive: it lives, or `docker create` made it to be started later."""
    return container.lives or (container.status == "created" and lease.for_container == "create")


def why_over(lease: Lease, found: list[Container | None]) -> str:
    """Say why a lease is over of whose containers, as found now (None if there is none), not one lives."""
    whose = "its container" if isinstance(lease.binding, ByContainer) else "the last of its containers"
    there = [container for container in found if container is not None]
    if not there:
        return f"{whose} was removed" if container_ids(lease.binding) else f"{whose} was never created"
    ended = [container for container in there if container.status != "created"]
    return f"{whose} exited with {ended[-1].exit_code}" if ended else f"{whose} was never started"
