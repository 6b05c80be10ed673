"""The options of `container run`, in one table: the parser and the README's list of them are made from it."""

import argparse

from neurond.cli.options import Parser, add_chips

TEXT, NUMBER, FLAG, MANY = "text", "number", "flag", "many"


class Option:
    """An option: its names, what it takes, how that is called, what it does, and its field if that has another name."""

    __slots__ = ("dest", "help", "kind", "metavar", "names")

    def __init__(self, names: str, kind: str, metavar: str, help: str, dest: str = "") -> None:  # noqa: A002
        self.names, self.kind, self.metavar, self.help, self.dest = names, kind, metavar, help, dest


OPTIONS = (
    Option("--device", MANY, "NODE", "a device; /dev/neuronN[:PATH] asks for that chip, as --chips does"),
    Option("-d --detach", FLAG, "", "do not follow the container; print its id"),
    Option("--rm", FLAG, "", "remove the container when it has ended", "remove"),
    Option("--name", TEXT, "", "name of the container (default: neurond-LEASE)"),
    Option("--pull", TEXT, "{missing|always|never}", "when to pull the image (default: missing)"),
    Option("--platform", TEXT, "OS/ARCH", "platform of the image"),
    Option("-e --env", MANY, "K[=V]", "set a variable, or pass on your own"),
    Option("--env-file", MANY, "FILE", "read variables from a file"),
    Option("-v --volume", MANY, "SRC:DST[:ro]", "mount a directory or a volume"),
    Option("--mount", MANY, "SPEC", "as type=bind,source=/data,target=/data,readonly", "mounts"),
    Option("--tmpfs", MANY, "PATH[:OPTIONS]", "mount a tmpfs"),
    Option("-w --workdir", TEXT, "DIR", "working directory inside"),
    Option("-u --user", TEXT, "", "user (and group) inside"),
    Option("--group-add", MANY, "GROUP", "a further group of the user inside"),
    Option("--hostname", TEXT, "NAME", "host name inside"),
    Option("--add-host", MANY, "NAME:IP", "a line for /etc/hosts inside"),
    Option("--dns", MANY, "IP", "a name server"),
    Option("-p --publish", MANY, "[[IP:]PORT:]PORT[/udp]", "make a port of the container one of the host"),
    Option("--network", TEXT, "", "network, or host or none"),
    Option("--ipc", TEXT, "", "IPC namespace, as in host"),
    Option("--pid", TEXT, "", "PID namespace, as in host"),
    Option("--shm-size", TEXT, "SIZE", "size of /dev/shm, as in 8g"),
    Option("-m --memory", TEXT, "SIZE", "limit of memory"),
    Option("--memory-reservation", TEXT, "SIZE", "soft limit of memory"),
    Option("--cpus", TEXT, "N", "limit of processors, as in 1.5"),
    Option("--cpuset-cpus", TEXT, "0-3", "processors to run on"),
    Option("--cpu-shares", NUMBER, "N", "weight beside other containers"),
    Option("--ulimit", MANY, "NAME=SOFT[:HARD]", "as memlock=-1:-1", "ulimits"),
    Option("--cap-add", MANY, "CAP", "add a capability"),
    Option("--cap-drop", MANY, "CAP", "drop a capability"),
    Option("--security-opt", MANY, "OPT", "as no-new-privileges, seccomp=FILE"),
    Option("--privileged", FLAG, "", "open everything to the container; only together with --all"),
    Option(
        "--efa", FLAG, "", "add what the Elastic Fabric Adapter takes: its devices, IPC_LOCK, memlock, shared memory"
    ),
    Option("--entrypoint", TEXT, "CMD", "replace the image's entry point; an empty one removes it"),
    Option("--init", FLAG, "", "run an init inside that forwards signals and reaps processes"),
    Option("-i --interactive", FLAG, "", "pass on standard input"),
    Option("--read-only", FLAG, "", "mount the root file system read-only"),
    Option("-l --label", MANY, "K=V", "set a label", "labels"),
    Option("--log-driver", TEXT, "DRIVER", "where docker keeps the output, as json-file or journald"),
    Option("--log-opt", MANY, "K=V", "an option of the log driver"),
    Option("--restart", TEXT, "POLICY", "no, on-failure[:N]; always and unless-stopped where the engine has CDI"),
    Option("--stop-signal", TEXT, "SIGNAL", "signal that asks it to stop (default: the image's, or SIGTERM)"),
    Option("--stop-timeout", NUMBER, "SECONDS", "grace between that and SIGKILL (default: 10)"),
    Option(
        "--core-numbering",
        TEXT,
        "{none|global|local}",
        "set NEURON_RT_VISIBLE_CORES with the host's core numbers, or from 0 on (default: leave it unset)",
    ),
)

REFUSED = {
    "--gpus": "these are NVIDIA's; Neuron chips are asked for with -n, --chips or --all",
    "--runtime": "neurond maps the nodes itself, and AWS's runtime neuron would map chips that no lease knows of",
    "--device-cgroup-rule": "it would open devices beyond the lease",
    "-t --tty": "a container that the daemon launches has no terminal: neurond docker run -it has one",
}
"""Options that people know from docker and that are not there, with the reason."""


def run_parser() -> Parser:
    """Return the parser of container run."""
    parser = Parser(
        "container run",
        "Lease chips and launch a container on them. Options mean what they mean to docker run.",
        usage="neurond container run (-n N | --chips 0,1 | --all) [OPTIONS] IMAGE [CMD ...]",
        hint="neurond docker run takes every option of docker's",
    )
    add_chips(parser, required=False)
    for option in OPTIONS:
        _add(parser, option)
    for names, why in REFUSED.items():
        parser.refuse(names, why)
    parser.add_argument(
        "image", nargs=argparse.REMAINDER, metavar="IMAGE [CMD ...]", help="the image, and the command with arguments"
    )
    return parser


def _add(parser: Parser, option: Option) -> None:
    names = option.names.split()
    dest = option.dest or names[-1][2:].replace("-", "_")
    metavar = option.metavar or None
    if option.kind == FLAG:
        parser.add_argument(*names, dest=dest, action="store_true", default=None, help=option.help)
    elif option.kind == MANY:
        parser.add_argument(*names, dest=dest, action="append", default=[], metavar=metavar, help=option.help)
    elif option.metavar.startswith("{"):
        choices = option.metavar[1:-1].split("|")
        parser.add_argument(*names, dest=dest, choices=choices, help=option.help)
    else:
        kind = int if option.kind == NUMBER else str
        parser.add_argument(*names, dest=dest, type=kind, metavar=metavar, help=option.help)


def table() -> str:
    """Return, as Markdown, the options of `container run`, and what is refused and why."""
    lines = ["| option | what it does |", "|---|---|"]
    for option in OPTIONS:
        *short, long = option.names.split()
        value = f" {option.metavar or long[2:].upper()}" if option.kind != FLAG else ""
        names = " ".join([*(f"`{name}`" for name in short), f"`{long}{value}`"]).replace("|", "\\|")
        lines.append(f"| {names} | {option.help}{'; may be repeated' if option.kind == MANY else ''} |")
    for names, why in REFUSED.items():
        lines.append(f"| {' '.join(f'`{name}`' for name in names.split())} | refused: {why} |")
    return "\n".join(lines) + "\n"
