"""The messages between the daemon and its clients, typed once.

The wire is varlink: JSON objects, each ended by a NUL byte, over a Unix socket. The interface description that the
daemon serves is made from the types below, so it cannot differ from what is accepted.
"""

import types
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from neurond.ledger import errors
from neurond.spec import Options

INTERFACE = "io.neurond"
VENDOR, PRODUCT, URL = "neurond", "neurond", "https://pypi.org/project/neurond/"
MAX_MESSAGE = 1 << 20
"""Longest message that the daemon takes, in bytes."""
MAX_WAIT = 366 * 86400.0
"""Longest wait and longest time limit, in seconds: a year."""


class Parameters(msgspec.Struct, forbid_unknown_fields=True):
    """What a client sends: an unknown field is an error, so that no wish is dropped in silence.

    A field that is optional in varlink may be null as well as missing, so None stands for both.
    """


class Message(msgspec.Struct, omit_defaults=True):
    """What the daemon sends."""


# -- chips and leases -----------------------------------------------------------------------------------------------


class Nothing(Parameters):
    """No parameters."""


class Done(Message):
    """No result but success."""


class Holder(Message):
    """Somebody who has a chip: a process (pid, user, command), a container (name and id), or a process in one."""

    pid: int | None = None
    user: str | None = None
    command: str | None = None
    container: str | None = None
    container_id: str | None = None


class NeuronProcess(Message):
    """A holder in the form that neuron-ls gives it."""

    pid: int
    command: str
    neuron_runtime_version: str


class ChipView(Message, omit_defaults=False):
    """One chip. The fields that neuron-ls has keep its names: memory_size in bytes, nc_count in logical cores."""

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


class Chips(Message, omit_defaults=False):
    """All chips of the host, by index. `note` says what is remarkable about the host, such as why it has none."""

    instance_type: str
    shape: str
    chips: list[ChipView]
    note: str | None


class LeaseView(Message, omit_defaults=False):
    """One lease: `since`, `until` in seconds since the epoch; `binding` is process, container, connection or time."""

    lease: str
    state: str
    chips: list[int]
    owner: str
    uid: int
    binding: str
    since: float
    name: str
    pid: int | None
    command: str | None
    container: str | None
    container_id: str | None
    until: float | None
    lost: list[int]
    asked: str
    enforcement: str | None
    enforcement_why: str | None
    users: list[Holder]
    why: str | None


class Leases(Message, omit_defaults=False):
    """Leases, oldest first; then the requests that wait, first come first."""

    leases: list[LeaseView]


class ListLeases(Parameters):
    """`ended` adds those that ended lately."""

    ended: bool | None = None


class Acquire(Parameters):
    """Ask for `count` chips, exactly these `chips`, or `all`.

    The lease is bound to the process `pid`, to a time limit of `ttl` seconds, or without either to this connection.
    `wait` is how many seconds to wait for capacity; with `more`, a reply says that and why the request waits. With
    `missing_ok` it also waits for chips that the host should have but has not now. `env` asks for the environment.
    Asking again with the same `key` gives the same lease. `enforce` says that the caller will confine itself to the
    chips of the lease by a device filter. `container` says that the process is, or becomes, a docker command that runs
    or creates a container: the lease goes over to the container that carries its label.
    """

    count: int | None = None
    chips: list[int] | None = None
    all: bool | None = None
    pid: int | None = None
    ttl: float | None = None
    name: str | None = None
    wait: float | None = None
    missing_ok: bool | None = None
    env: bool | None = None
    key: str | None = None
    enforce: bool | None = None
    container: Literal["run", "create"] | None = None


class Adopt(Parameters):
    """Turn the use of chips without a lease by the process `pid` into a lease that is bound to it."""

    pid: int
    name: str | None = None


class AdoptContainer(Parameters):
    """Turn the use of chips without a lease by a running container into a lease that is bound to it."""

    container: str


class Finding(Message):
    """Something that is not as the ledger has it: its kind, and a sentence."""

    kind: str
    sentence: str


class Findings(Message):
    """Everything in which ledger, processes, nodes and containers disagree now; nothing if all is well."""

    findings: list[Finding]


class Bind(Parameters):
    """Hand a lease over to another process, or to a time limit of `ttl` seconds, in one step."""

    lease: str
    pid: int | None = None
    ttl: float | None = None


class Acquired(Message, omit_defaults=False):
    """A lease and its chips, ascending. While the request waits, `waiting` says why and `chips` is empty.

    With `env` asked for, there is what a container takes as well: the `nodes` of the chips on the host, by number; the
    name of the lease as a device (`cdi`), where the engine knows such names; and the `labels` that make it ours.
    """

    lease: str
    chips: list[int]
    env: dict[str, str] | None = None
    waiting: str | None = None
    nodes: dict[str, str] | None = None
    cdi: str | None = None
    labels: dict[str, str] | None = None


class OfLease(Parameters):
    """Names a lease."""

    lease: str


class Release(Parameters):
    """Give a lease back. Root may give back another's lease if it insists (`force`) and says why (`reason`)."""

    lease: str
    force: bool | None = None
    reason: str | None = None


class Renew(Parameters):
    """Let a lease with a time limit end `ttl` seconds from now; `force` and `reason` are as for Release."""

    lease: str
    ttl: float
    force: bool | None = None
    reason: str | None = None


class Renewed(Message):
    """When the lease will end, in seconds since the epoch."""

    until: float


class Released(Message):
    """What the lease is now: "ended", or "draining" or "stuck" while a process still has a chip open."""

    state: str


class Environment(Message, omit_defaults=False):
    """The environment for a process that uses the lease's chips; the rest is as in Acquired."""

    lease: str
    chips: list[int]
    env: dict[str, str]
    nodes: dict[str, str]
    cdi: str | None
    labels: dict[str, str]


class Watch(Parameters):
    """Follow the events from number `since` on, or from now on. Call it with `more`."""

    since: int | None = None


class Watched(Message):
    """One event: {seq, at, event, data}."""

    event: msgspec.Raw


class Simulate(Parameters):
    """Pull or plug a simulated chip, under another major if one is given."""

    chip: int
    action: Literal["add", "remove"]
    major: int | None = None


class About(Message, omit_defaults=False):
    """The daemon itself."""

    version: str
    pid: int
    instance_type: str
    simulated: bool
    engine: str
    journal_problem: str | None


# -- containers -----------------------------------------------------------------------------------------------------


class ContainerRun(Options):
    """Lease chips and start a container on them. Call it with `more`; see Progress for what comes back.

    Options mean what they mean to `docker run`. `name` is the container's, and the lease's. `inside` gives chips
    another path inside, by their number. `pull` is as docker's: missing, always or never. With `detach` the reply comes
    when it runs; `remove` has it removed when it has ended.
    """

    count: int | None = None
    chips: list[int] | None = None
    all: bool | None = None
    wait: float | None = None
    missing_ok: bool | None = None
    name: str | None = None
    inside: dict[str, str] | None = None
    pull: Literal["missing", "always", "never"] | None = None
    detach: bool | None = None
    remove: bool | None = None
    core_numbering: Literal["none", "global", "local"] | None = None


class ContainerCheck(Parameters):
    """Ask whether a container with these options would get past its lease; everything is as given to `docker run`.

    The fields are those that can matter: others need not be told.
    """

    image: str
    count: int | None = None
    chips: list[int] | None = None
    all: bool | None = None
    privileged: bool | None = None
    devices: list[str] | None = None
    cgroup_rules: list[str] | None = None
    volumes: list[str] | None = None
    mounts: list[str] | None = None
    runtime: str | None = None
    gpus: str | None = None
    env: list[str] | None = None
    labels: list[str] | None = None
    restart: str | None = None


class Checked(Message, omit_defaults=False):
    """Nothing speaks against the container. `image_here` tells whether its image is; null if the engine can't say."""

    image_here: bool | None


class ContainerInput(Parameters):
    """Send `data`, in base64, to the standard input of a container that is `interactive`; `eof` ends the input."""

    container: str
    data: str | None = None
    eof: bool | None = None


class TaskChip(Parameters):
    """A chip of the task's lease for one of its containers: its path inside, and what may be done with it (r, w, m)."""

    chip: int
    path: str
    permissions: str


class TaskDependency(Parameters):
    """Another container of the task that has to be so far first; the conditions are those of ECS."""

    container: str
    condition: Literal["START", "COMPLETE", "SUCCESS", "HEALTHY"]


class TaskContainer(Parameters):
    """A container of a task. It gets `chips`, or with `all_chips` all those of the lease, or none."""

    name: str
    options: Options
    essential: bool | None = None
    depends_on: list[TaskDependency] | None = None
    chips: list[TaskChip] | None = None
    all_chips: bool | None = None


class TaskRun(Parameters):
    """Run containers on one lease, each when what it depends on is so far; the first essential one to end ends all.

    Call it with `more`; see Progress for what comes back. With `detach` the reply comes when the first ones run.
    """

    name: str
    containers: list[TaskContainer]
    count: int | None = None
    chips: list[int] | None = None
    all: bool | None = None
    wait: float | None = None
    missing_ok: bool | None = None
    detach: bool | None = None


class TaskStop(Parameters):
    """Stop all containers of a task, which is named by its lease."""

    task: str


class Progress(Message):
    """What happens to a launch. `data` is output of the container in base64, `stream` says whether stdout or stderr.

    `status` is a line for people (pulling, waiting), one that is `passing` is replaced by the next. `container` and
    `lease` come when it runs; `exit_code` is last. Of a task, `container` says whose output or exit code a reply has;
    the last one has the exit code of the task.
    """

    status: str | None = None
    passing: bool | None = None
    lease: str | None = None
    chips: list[int] | None = None
    container: str | None = None
    container_id: str | None = None
    stream: str | None = None
    data: str | None = None
    exit_code: int | None = None


class ContainerView(Message, omit_defaults=False):
    """A container that neurond launched. `status` is Docker's word; `lease` is null once the lease has ended.

    Of a container of a task, `task` is the task's name, `task_id` the lease that it began with, and `task_container`
    the name that the container has in it.
    """

    name: str
    container_id: str
    image: str
    status: str
    exit_code: int | None
    lease: str | None
    chips: list[int]
    owner: str | None
    health: str | None
    task: str | None
    task_id: str | None
    task_container: str | None


class Containers(Message, omit_defaults=False):
    """Containers that neurond launched and Docker still knows."""

    containers: list[ContainerView]


class ContainerStop(Parameters):
    """Stop a container by its name, id or lease; `timeout` is the grace in seconds before SIGKILL."""

    container: str
    timeout: int | None = None


class ContainerLogs(Parameters):
    """Read the output of a container, `tail` lines of it or all, and what follows if `follow`. Call it with `more`."""

    container: str
    follow: bool | None = None
    tail: int | None = None


class Names(Message, omit_defaults=False):
    """The leases as devices (CDI): chips by name, and the specification that gives an engine these names.

    `file` is where the engine finds it; null if the engine here does not resolve such names.
    """

    file: str | None
    names: dict[str, list[int]]
    specification: msgspec.Raw


class Setting(Message, omit_defaults=False):
    """One setting: its value in force (times in seconds), where that is set, and what the next start would make of it.

    `origin` is FILE:LINE, "environment NAME", "command line --OPTION" or "default". `next` and `next_origin` are null
    unless the last reload found another value that it could not apply.
    """

    key: str
    value: msgspec.Raw
    origin: str
    next: msgspec.Raw
    next_origin: str | None
    reload: bool


class Settings(Message, omit_defaults=False):
    """The settings in force, the files read for them, and what the last reload found wrong and hence did not apply."""

    pid: int
    files: list[str]
    problems: list[str]
    settings: list[Setting]


# -- the interface --------------------------------------------------------------------------------------------------


class Method(NamedTuple):
    """The types of one method."""

    parameters: type[msgspec.Struct]
    reply: type[Message]


METHODS: dict[str, Method] = {
    "Describe": Method(Nothing, About),
    "ListChips": Method(Nothing, Chips),
    "ListLeases": Method(ListLeases, Leases),
    "Acquire": Method(Acquire, Acquired),
    "Adopt": Method(Adopt, Acquired),
    "AdoptContainer": Method(AdoptContainer, Acquired),
    "Bind": Method(Bind, Done),
    "Check": Method(Nothing, Findings),
    "Release": Method(Release, Released),
    "Renew": Method(Renew, Renewed),
    "Environment": Method(OfLease, Environment),
    "Watch": Method(Watch, Watched),
    "Simulate": Method(Simulate, Done),
    "RunContainer": Method(ContainerRun, Progress),
    "CheckContainer": Method(ContainerCheck, Checked),
    "WriteInput": Method(ContainerInput, Done),
    "RunTask": Method(TaskRun, Progress),
    "StopTask": Method(TaskStop, Done),
    "ListNames": Method(Nothing, Names),
    "ListSettings": Method(Nothing, Settings),
    "ListContainers": Method(Nothing, Containers),
    "StopContainer": Method(ContainerStop, Done),
    "ContainerLogs": Method(ContainerLogs, Progress),
}


class BadMessage(errors.Refused):
    """A message that is no varlink call: too long, or not JSON of the right form."""

    kind = "BadMessage"


class JournalFull(errors.Refused):
    """Nothing can be granted, as the journal can't be written; existing leases are untouched."""

    kind = "JournalFull"


class EngineFailed(errors.Refused):
    """Docker could not be reached, or refused: the sentence has Docker's words, `exit_code` is as of docker run."""

    kind = "EngineFailed"

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code

    def parameters(self) -> dict[str, object]:
        """Return the sentence and the exit code."""
        return {"message": str(self), "exit_code": self.exit_code}


class Lagged(errors.Refused):
    """A watcher did not read fast enough, or asked for events that are no longer kept."""

    kind = "Lagged"


ERRORS: tuple[type[errors.Refused], ...] = (
    errors.InvalidRequest,
    errors.NoSuchChip,
    errors.NoSuchLease,
    errors.NotAllowed,
    errors.NoCapacity,
    errors.WaitTimedOut,
    BadMessage,
    JournalFull,
    EngineFailed,
    Lagged,
)


def interface_description() -> str:
    """Return the varlink interface description, made from the types above."""
    named: dict[str, type] = {}
    methods = []
    for name, (parameters, reply) in METHODS.items():
        comment = _comment(parameters if parameters is not Nothing else reply)
        methods.append(f"{comment}method {name}{_struct(parameters, named)} -> {_struct(reply, named)}\n")
    texts, done = [], set[str]()
    while todo := [name for name in named if name not in done]:
        for name in todo:
            done.add(name)
            texts.append(f"{_comment(named[name])}type {name} {_struct(named[name], named)}\n")
    faults = [
        f"{_comment(error)}error {error.kind} (message: string"
        + (", holders: []string" if issubclass(error, errors.NoCapacity) else "")
        + (", exit_code: int" if error is EngineFailed else "")
        + ")\n"
        for error in ERRORS
    ]
    head = f"# Leases of the AWS Neuron chips of one host.\ninterface {INTERFACE}\n"
    return "\n".join([head, *texts, *methods, *faults])


def _comment(cls: type) -> str:
    lines = (cls.__doc__ or "").strip().split("\n")
    return "".join(f"# {line.strip()}".rstrip() + "\n" for line in lines)


def _struct(cls: type, named: dict[str, type]) -> str:
    hints = get_type_hints(cls)
    fields = msgspec.structs.fields(cls)
    sent = issubclass(cls, Message)
    parts = []
    for field in fields:
        idl = _idl(hints[field.name], named)
        optional = not sent and not field.required
        parts.append(f"{field.name}: {'?' if optional and not idl.startswith('?') else ''}{idl}")
    return f"({', '.join(parts)})"


def _idl(hint: Any, named: dict[str, type]) -> str:
    simple: dict[Any, str] = {int: "int", float: "float", str: "string", bool: "bool", msgspec.Raw: "object"}
    if hint in simple:
        return simple[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in {types.UnionType, Union}:
        return "?" + _idl(next(a for a in arguments if a is not type(None)), named)
    if origin is list:
        return "[]" + _idl(arguments[0], named)
    if origin is dict:
        return "[string]" + _idl(arguments[1], named)
    if origin is Literal:
        return f"({', '.join(arguments)})"
    named[hint.__name__] = hint
    return str(hint.__name__)
