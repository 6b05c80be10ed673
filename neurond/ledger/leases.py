"""A lease, what it was asked for, what it is bound to."""

from typing import Literal

from neurond.ledger.chips import User
from neurond.ledger.values import value

State = Literal["queued", "active", "draining", "stuck", "ended"]


@value(frozen=True, slots=True)
class Owner:
    """The user a lease belongs to: the uid is what counts, the name is for people."""

    uid: int
    name: str


@value(frozen=True, slots=True)
class Want:
    """What a request asks for: `count` chips of neurond's choice, exactly these `chips`, or `every` chip.

    `missing_ok` lets a request wait for chips that are not on the host yet.
    """

    count: int = 0
    chips: tuple[int, ...] = ()
    every: bool = False
    missing_ok: bool = False


class Binding:
    """What a lease is bound to: its end is the end of the lease. `kind` names it in the journal and on the wire."""

    __slots__ = ()
    kind: str


@value(frozen=True, slots=True)
class ByProcess(Binding):
    """Ends when the process is gone.

    `ticks` is its start time (field 22 of /proc/PID/stat): a pid alone may have been given to somebody else.
    """

    pid: int
    ticks: int
    kind: Literal["process"] = "process"


class OnContainers(Binding):
    """What is bound to one or more containers: their names and ids, an id empty while there is only the intent."""

    __slots__ = ()

    @property
    def containers(self) -> tuple[tuple[str, str], ...]:
        """Name and id of each container that it names."""
        raise NotImplementedError


@value(frozen=True, slots=True)
class ByContainer(OnContainers):
    """Ends when the container has exited or is removed. While `id` is empty it is a journalled intent to create it."""

    name: str
    id: str = ""
    kind: Literal["container"] = "container"

    @property
    def containers(self) -> tuple[tuple[str, str], ...]:
        """Name and id of each container that it names."""
        return ((self.name, self.id),)


@value(frozen=True, slots=True)
class ByTask(OnContainers):
    """Ends when the last container of a task has exited or is removed; an empty id is an intent to create it."""

    names: tuple[str, ...]
    ids: tuple[str, ...]
    kind: Literal["task"] = "task"

    @property
    def containers(self) -> tuple[tuple[str, str], ...]:
        """Name and id of each container that it names."""
        return tuple(zip(self.names, self.ids, strict=True))


@value(frozen=True, slots=True)
class ByConnection(Binding):
    """Ends when the client's connection closes; does not outlive the daemon. `pid` is the client, for people."""

    pid: int
    kind: Literal["connection"] = "connection"


@value(frozen=True, slots=True)
class ByTime(Binding):
    """Ends at `deadline`, in seconds of CLOCK_BOOTTIME (never the wall clock, which can be set)."""

    deadline: float
    kind: Literal["time"] = "time"


BINDINGS: dict[str, type[Binding]] = {
    "process": ByProcess,
    "container": ByContainer,
    "task": ByTask,
    "connection": ByConnection,
    "time": ByTime,
}


def container_ids(binding: Binding) -> set[str]:
    """Return the ids of the containers that a lease is bound to."""
    return {one for _, one in binding.containers if one} if isinstance(binding, OnContainers) else set()


@value(frozen=True, slots=True)
class Lease:
    """Who holds which chips since when, and until what happens.

    `since` is the wall clock (seconds since the epoch) of the request while queued, then of the grant; it is for
    people. `up` is the same in seconds since boot, by a clock that nobody sets. `chips` is empty while queued. `lost`
    are chips that vanished from the host while held. `why` says why a draining lease is at its end. `key` is the
    client's own name for the request, so that asking twice gives one lease. `ttl` is the time limit in seconds that was
    asked for, 0 without one. `enforce` says that the holder asked to be confined to its chips, `for_container` that the
    process which holds it is about to start the container that will: the lease goes over to the one that carries its
    label. `users` are the processes that a stuck lease waits for.
    """

    id: str
    state: State
    owner: Owner
    want: Want
    binding: Binding
    since: float
    chips: tuple[int, ...] = ()
    name: str = ""
    lost: tuple[int, ...] = ()
    why: str = ""
    key: str = ""
    ttl: float = 0
    enforce: bool = False
    for_container: Literal["", "run", "create"] = ""
    users: tuple[User, ...] = ()
    up: float = 0
