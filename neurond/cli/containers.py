"""container run, ls, stop, logs: containers that the daemon launches on leased chips."""

from __future__ import annotations

import json
import os
import signal
import sys
from binascii import a2b_base64, b2a_base64

from neurond.cli import FAILED_BEFORE_START, USAGE, Exit, for_each
from neurond.cli.chipdevices import chip_device
from neurond.cli.container_options import run_parser
from neurond.cli.launching import check_image, environment, real_device, show_status, volume, with_conflict_code
from neurond.cli.options import Parser
from neurond.cli.wishes import wish
from neurond.client import Client, NeurondError, Unreachable
from neurond.ledger.words import ranges

TYPE_CHECKING = False  # typing takes longer to import than all that is done here
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any


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
    check_image(image)
    parameters = chips_asked(options) | {
        "image": image,
        "command": command,
        "entrypoint": None if options.entrypoint is None else list(filter(None, [options.entrypoint])),
        "env": environment(options.env, options.env_file),
        "volumes": [volume(text) for text in options.volume],
        "security_opt": [security(text) for text in options.security_opt],
        **{name: getattr(options, name) for name in PASSED_ON},
    }
    with Client(options.host) as client:
        stopper = Stopper(options.host)
        with stopper:
            return follow_run(client.stream("RunContainer", **parameters), options, stopper)


PASSED_ON = (
    *("detach", "remove", "name", "pull", "core_numbering", "labels", "mounts", "tmpfs", "privileged", "ulimits"),
    *("cap_add", "cap_drop", "group_add", "workdir", "user", "hostname", "add_host", "dns", "publish", "network"),
    *("ipc", "pid", "shm_size", "memory", "memory_reservation", "cpus", "cpuset_cpus", "cpu_shares", "init"),
    *("read_only", "log_driver", "log_opt", "platform", "stop_signal", "stop_timeout", "restart", "interactive", "efa"),
)
"""Options that the daemon judges: the form of each is docker's, and is checked there."""


def chips_asked(options: Any) -> dict[str, Any]:
    """Return what chips are asked for, by number too where a device is a chip, and the other devices."""
    parameters = wish(options)
    chips: list[int] = []
    inside: dict[str, str] = {}
    devices: list[str] = []
    for text in options.device:
        found = chip_device(text)
        if found is None:
            devices.append(real_device(text))
            continue
        chips.append(found.chip)
        if found.inside != f"/dev/neuron{found.chip}":
            inside[str(found.chip)] = found.inside
    if chips and (options.count is not None or options.all):
        raise Exit(USAGE, "--device /dev/neuronN asks for that chip: it can't be combined with -n or --all")
    if chips:
        parameters["chips"] = sorted({*chips, *(options.chips or ())})
    if not (options.count is not None or options.all or parameters["chips"]):
        raise Exit(USAGE, "how many chips? Ask with -n N, --chips 0,1, --device /dev/neuronN or --all")
    return parameters | {"devices": devices, "inside": inside or None}


def security(text: str) -> str:
    """Return a security option with the content of the seccomp profile that it names, as docker sends it."""
    name, equals, path = text.partition("=")
    if name != "seccomp" or not equals or path in {"unconfined", "builtin"}:
        return text
    try:
        with open(path, encoding="utf-8") as file:
            return f"seccomp={json.dumps(json.load(file))}"
    except (OSError, ValueError) as error:
        raise Exit(FAILED_BEFORE_START, f"--security-opt {text}: {error}") from None


class Stopper:
    """Stops a container or a task on SIGINT, SIGTERM and SIGHUP; before there is one, these end the command."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, host: str | None, kind: str = "container") -> None:
        self.host = host
        self.kind = kind
        self.target = ""

    def __enter__(self) -> Stopper:  # noqa: PYI034 - typing is slow to import
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
        import threading

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
            show_status(reply)
            if reply.get("container_id"):
                started(reply, options, stopper)
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


def started(reply: dict[str, Any], options: Any, stopper: Stopper) -> None:
    """Take note that the container runs."""
    stopper.target = reply["container_id"]
    if options.detach:
        print(reply["container_id"])
    elif sys.stderr.isatty():
        print(
            f"neurond: lease {reply['lease']}: chips {ranges(reply['chips'])} in {reply['container']}", file=sys.stderr
        )
    if options.interactive and not options.detach:
        import threading

        threading.Thread(target=send_input, args=(options.host, stopper.target), daemon=True).start()


def send_input(host: str | None, container_id: str) -> None:
    """Send our standard input to a container until either ends."""
    try:
        with Client(host) as client:
            while data := os.read(0, 1 << 16):
                text = b2a_base64(data, newline=False).decode("ascii")
                client.call("WriteInput", container=container_id, data=text)
            client.call("WriteInput", container=container_id, eof=True)
    except (NeurondError, Unreachable, OSError):
        pass  # it has ended, or reads no more: how it ended is what the command tells


def write_output(reply: dict[str, Any]) -> None:
    """Write output of the container, byte by byte as it came, to the stream that it is for."""
    if reply.get("data"):
        stream = sys.stderr.buffer if reply.get("stream") == "stderr" else sys.stdout.buffer
        stream.write(a2b_base64(reply["data"]))
        stream.flush()


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
        from neurond.cli.tables import print_table

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
    parser.add_argument("-t", "--time", type=int, metavar="SECONDS", help="the grace (default: the container's, or 10)")
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
