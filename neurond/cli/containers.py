"""container run, ls, stop, logs: containers that the daemon launches on leased chips."""

import base64
import json
import os
import signal
import sys
import threading
from argparse import REMAINDER
from collections.abc import Iterator, Sequence
from typing import Any

from neurond.cli import FAILED_BEFORE_START, USAGE, Exit, for_each
from neurond.cli.leases import with_conflict_code
from neurond.cli.options import Parser, add_chips, wish
from neurond.cli.tables import print_table
from neurond.client import Client, NeurondError, Unreachable
from neurond.ledger.words import ranges


def container(arguments: Sequence[str]) -> int:
    """Call one of the container verbs."""
    verbs = {"run": run, "ls": ls, "stop": stop, "logs": logs}
    if arguments[:1] and arguments[0] in verbs:
        return verbs[arguments[0]](arguments[1:])
    wanted = arguments[:1] in (["-h"], ["--help"])
    print(f"usage: neurond container {{{','.join(verbs)}}} [OPTIONS]", file=sys.stdout if wanted else sys.stderr)
    return 0 if wanted else USAGE


def run(arguments: Sequence[str]) -> int:
    """Launch a container; in the foreground its output and its exit code are ours."""
    options = run_parser().parse(arguments)
    if options.image in ([], ["--"]):
        raise Exit(USAGE, "run which image? neurond container run -n 1 IMAGE [CMD ...]")
    image, *command = options.image[1:] if options.image[:1] == ["--"] else options.image
    if image.startswith("/dev/"):
        raise Exit(USAGE, f"{image} stands where the image should: chips are asked for with -n N or --chips 0,1")
    parameters = wish(options) | {
        "image": image,
        "command": command,
        "env": environment(options.env, options.env_file),
        "volumes": [volume(text) for text in options.volume],
        **{name: getattr(options, name) for name in PASSED_ON},
    }
    with Client(options.host) as client:
        stopper = Stopper(options.host)
        with stopper:
            return follow_run(client.stream("RunContainer", **parameters), options, stopper)


PASSED_ON = (
    "detach",
    "remove",
    "name",
    "labels",
    "ulimits",
    "cap_add",
    "workdir",
    "user",
    "shm_size",
    "network",
    "ipc",
    "entrypoint",
    "core_numbering",
)


def run_parser() -> Parser:
    """Return the parser of container run."""
    parser = Parser(
        "container run",
        "Lease chips and launch a container on them. Options mean what they mean to docker run.",
        usage="neurond container run (-n N | --chips 0,1 | --all) [OPTIONS] IMAGE [CMD ...]",
    )
    add_chips(parser)
    add = parser.add_argument
    add("-d", "--detach", action="store_true", help="do not follow the container; print its id")
    add("--rm", action="store_true", dest="remove", help="remove the container when it has ended")
    add("--name", help="name of the container (default: neurond-LEASE)")
    add("-e", "--env", action="append", default=[], metavar="K[=V]", help="set a variable, or pass on your own")
    add("--env-file", action="append", default=[], metavar="FILE", help="read variables from a file")
    add("-v", "--volume", action="append", default=[], metavar="SRC:DST[:ro]", help="mount a directory or a volume")
    add("-w", "--workdir", metavar="DIR", help="working directory inside")
    add("-u", "--user", help="user (and group) inside")
    add("--shm-size", metavar="SIZE", help="size of /dev/shm, as in 8g")
    add("--ulimit", action="append", default=[], dest="ulimits", metavar="NAME=SOFT[:HARD]", help="as memlock=-1:-1")
    add("--network", help="network, or host or none")
    add("--ipc", help="IPC namespace, as in host")
    add("--entrypoint", metavar="CMD", help="replace the image's entry point; an empty one removes it")
    add("--label", action="append", default=[], dest="labels", metavar="K=V", help="set a label")
    add("--cap-add", action="append", default=[], metavar="CAP", help="add a capability")
    add(
        "--core-numbering",
        choices=("none", "global", "local"),
        default="none",
        help="set NEURON_RT_VISIBLE_CORES with the host's core numbers, or from 0 on (default: leave it unset)",
    )
    add("image", nargs=REMAINDER, metavar="IMAGE [CMD ...]", help="the image, and the command with its arguments")
    return parser


class Stopper:
    """Stops a container or a task on SIGINT, SIGTERM and SIGHUP; before there is one, these end the command."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, host: str | None, kind: str = "container") -> None:
        self.host = host
        self.kind = kind
        self.target = ""

    def __enter__(self) -> "Stopper":  # noqa: PYI034 - typing is slow to import
        for number in self.SIGNALS:
            signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self.SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    def _on_signal(self, number: int, _: object) -> None:
        if not self.target:
            raise Exit(128 + number)
        # In a thread, so that output still comes while the container takes its time to end.
        threading.Thread(target=self._stop, daemon=True).start()

    def _stop(self) -> None:
        try:
            with Client(self.host) as client:
                client.call(f"Stop{self.kind.capitalize()}", **{self.kind: self.target})
        except (NeurondError, Unreachable) as error:
            print(f"neurond: {self.kind} {self.target} could not be stopped: {error}", file=sys.stderr)


def follow_run(replies: Iterator[dict[str, Any]], options: Any, stopper: Stopper) -> int:
    """Show what comes of a launch, and return the exit code."""
    try:
        for reply in replies:
            if reply.get("status"):
                print(f"neurond: {reply['status']}", file=sys.stderr)
            if reply.get("container_id"):
                stopper.target = reply["container_id"]
                if options.detach:
                    print(reply["container_id"])
                elif sys.stderr.isatty():
                    chips = ranges(reply["chips"])
                    print(f"neurond: lease {reply['lease']}: chips {chips} in {reply['container']}", file=sys.stderr)
            write_output(reply)
            if "exit_code" in reply:
                return int(reply["exit_code"])
    except NeurondError as error:
        raise with_conflict_code(error, options.conflict_exit_code) from None
    except Unreachable as error:
        if not stopper.target:
            raise
        hint = f"container {stopper.target[:12]} goes on, and keeps its chips"
        raise Exit(FAILED_BEFORE_START, f"{error}: {hint}") from None
    return 0


def write_output(reply: dict[str, Any]) -> None:
    """Write output of the container, byte by byte as it came, to the stream that it is for."""
    if reply.get("data"):
        stream = sys.stderr.buffer if reply.get("stream") == "stderr" else sys.stdout.buffer
        stream.write(base64.b64decode(reply["data"]))
        stream.flush()


def environment(given: Sequence[str], files: Sequence[str]) -> list[str]:
    """Return NAME=VALUE of all variables, those of files first; a name alone passes on our own value, if any."""
    lines: list[str] = []
    for path in files:
        try:
            with open(path, encoding="utf-8") as file:
                lines += [line.strip("\r\n").lstrip() for line in file]
        except (OSError, UnicodeDecodeError) as error:
            raise Exit(FAILED_BEFORE_START, f"--env-file {path}: {error}") from None
    result = []
    for text in [*(line for line in lines if line and not line.startswith("#")), *given]:
        name, equals, _ = text.partition("=")
        if not name or any(c.isspace() for c in name):
            raise Exit(USAGE, f"{text!r} is no environment variable: the form is NAME=VALUE")
        if equals:
            result.append(text)
        elif name in os.environ:
            result.append(f"{name}={os.environ[name]}")
    return result


def volume(text: str) -> str:
    """Return a volume with a relative source made absolute, as docker does: the daemon has another directory."""
    source, colon, rest = text.partition(":")
    if colon and source.startswith("."):
        return os.path.abspath(source) + colon + rest
    return text


def ls(arguments: Sequence[str]) -> int:
    """List the containers that neurond launched."""
    parser = Parser("container ls", "List the containers that neurond launched.")
    parser.add_argument("-a", "--ended", action="store_true", help="also those that have ended")
    parser.add_argument("-q", "--quiet", action="store_true", help="print the ids only")
    parser.add_argument("-j", "--json", action="store_true", help="print a list of objects")
    options = parser.parse(arguments)
    with Client(options.host) as client:
        found = client.call("ListContainers")["containers"]
    rows = [row for row in found if options.ended or row["status"] in {"running", "paused", "restarting"}]
    if options.json:
        print(json.dumps(rows))
    elif options.quiet:
        print("".join(f"{row['container_id'][:12]}\n" for row in rows), end="")
    elif rows:
        print_table(
            ["CONTAINER", "NAME", "IMAGE", "STATUS", "LEASE", "CHIPS", "OWNER"],
            [
                [
                    row["container_id"][:12],
                    row["name"],
                    row["image"],
                    row["status"] + ("" if row["exit_code"] is None else f" ({row['exit_code']})"),
                    row["lease"] or "",
                    ranges(row["chips"]) if row["chips"] else "",
                    row["owner"] or "",
                ]
                for row in rows
            ],
            colour=False,
        )
    return 0


def stop(arguments: Sequence[str]) -> int:
    """Stop containers."""
    parser = Parser("container stop", "Stop containers: their stop signal, then SIGKILL after a grace.")
    parser.add_argument("container", nargs="+", help="name, id or lease")
    parser.add_argument("-t", "--time", type=int, default=10, metavar="SECONDS", help="the grace (default: 10)")
    options = parser.parse(arguments)

    def stop_one(name: str) -> None:
        client.call("StopContainer", container=name, timeout=options.time)
        print(name)

    with Client(options.host) as client:
        for_each(options.container, stop_one)
    return 0


def logs(arguments: Sequence[str]) -> int:
    """Print the output of a container."""
    parser = Parser("container logs", "Print the output of a container.")
    parser.add_argument("container", help="name, id or lease")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until it ends")
    parser.add_argument("--tail", type=int, metavar="N", help="the last N lines only")
    options = parser.parse(arguments)
    with Client(options.host) as client:
        call = {"container": options.container, "follow": options.follow, "tail": options.tail}
        for reply in client.stream("ContainerLogs", **call):
            write_output(reply)
    return 0
