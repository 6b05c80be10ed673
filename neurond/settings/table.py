"""The one table of keys. Validation, `neurond serve`'s options, `neurond config` and all documents are made from it."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, NamedTuple, get_type_hints

from neurond.settings.kinds import (
    Address,
    Choice,
    Count,
    Directory,
    Duration,
    Flag,
    Group,
    InstanceType,
    Kind,
    RuntimeDirectory,
)

DAY = 86400.0
LONGEST = 366 * DAY
"""The longest time that anything may be asked for, in seconds."""
PREFIX = "NEUROND_SERVE_"
DEFAULT_FILE = "/etc/neurond/neurond.toml"


class Is(NamedTuple):
    """What a key is: its kind, what it means, and whether a reload applies it."""

    kind: Kind
    meaning: str
    reload: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, with their defaults; times are in seconds."""

    runtime_dir: Annotated[str, Is(RuntimeDirectory(), "where journal, lock and socket (DIR/neurond.sock) are")] = (
        "/run/neurond"
    )
    simulate: Annotated[str, Is(InstanceType(), "simulate a host of this instance type, as trn1.32xlarge")] = ""
    docker: Annotated[str, Is(Address(), "address of the Docker Engine")] = "unix:///var/run/docker.sock"
    cdi_dir: Annotated[
        str, Is(Directory(or_none=True), "where to give leases names as devices (CDI), if the engine looks there")
    ] = "/run/cdi"
    group: Annotated[
        str, Is(Group(), "whose members may lease chips, besides root; the socket is this group's", reload=True)
    ] = "neuron"
    container_group: Annotated[
        str, Is(Group(), "whose members may start containers; who may do that is as good as root", reload=True)
    ] = "docker"
    log_level: Annotated[str, Is(Choice("debug", "info", "warning", "error"), "how much is logged", reload=True)] = (
        "info"
    )
    log_format: Annotated[
        str,
        Is(
            Choice("auto", "journal", "json", "text"),
            "form of the log: auto is text on a terminal, fields in the systemd journal, and JSON elsewhere",
            reload=True,
        ),
    ] = "auto"
    stuck_after: Annotated[
        float,
        Is(
            Duration(0.1, DAY),
            "how long processes may keep the chips of a lease open after its end before it is called stuck",
            reload=True,
        ),
    ] = 30.0
    longest_ttl: Annotated[
        float, Is(Duration(1, LONGEST), "the longest time limit that a lease may be asked for with", reload=True)
    ] = LONGEST
    most_waiting: Annotated[
        int, Is(Count(1, 65536), "how many requests of one user may wait for chips at a time", reload=True)
    ] = 1024
    most_connections: Annotated[
        int,
        Is(
            Count(16, 65536), "how many clients may be connected, as far as the limit of open files allows", reload=True
        ),
    ] = 4096
    most_connections_per_user: Annotated[
        int, Is(Count(1, 65536), "how many clients of one user other than root may be connected", reload=True)
    ] = 1024
    look_every: Annotated[
        float,
        Is(
            Duration(1, 3600),
            "how often all processes are looked through for uses of chips that no event has told of",
            reload=True,
        ),
    ] = 30.0
    docker_look_every: Annotated[
        float,
        Is(Duration(0.5, 3600), "how often all containers are looked at without news from Docker", reload=True),
    ] = 5.0
    start_grace: Annotated[
        float,
        Is(
            Duration(0, 3600),
            "how long a container may take to start after the docker command that made it has ended",
            reload=True,
        ),
    ] = 5.0
    restart_grace: Annotated[
        float,
        Is(
            Duration(0, 3600),
            "how long a container that docker has stopped keeps its lease, as docker restart may start it again",
            reload=True,
        ),
    ] = 2.0
    stop_conflicts: Annotated[
        bool,
        Is(
            Flag(),
            "stop a container that was started again after its chips had gone to somebody else; false only says so",
            reload=True,
        ),
    ] = False
    conflict_grace: Annotated[
        float,
        Is(
            Duration(0, 3600),
            "how long such a container has between SIGTERM and SIGKILL",
            reload=True,
        ),
    ] = 10.0


def cdi_name(home: str) -> str:
    """Return a name for a file beside those of other daemons, made of the runtime directory."""
    return "neurond" if home == "/run/neurond" else "neurond-" + home.strip("/").replace("/", "-")


class Key(NamedTuple):
    """A key with all that is said of it."""

    name: str
    kind: Kind
    default: Any
    meaning: str
    reload: bool

    @property
    def option(self) -> str:
        """The option of `neurond serve`."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The variable of the environment."""
        return PREFIX + self.name.upper()

    @property
    def applies(self) -> str:
        """When a change of it takes effect."""
        return "at a reload" if self.reload else "at the next start"


def _keys() -> dict[str, Key]:
    hints = get_type_hints(Settings, include_extras=True)
    found = {}
    for field in fields(Settings):
        (what,) = hints[field.name].__metadata__
        found[field.name] = Key(field.name, what.kind, field.default, what.meaning, what.reload)
    return found


KEYS = _keys()
"""All keys by name, in the order of the documents. The man page and other texts are made from this."""
