"""task run, task describe, host describe: ECS task definitions on this host, and what ECS would say of it."""

import base64
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from neurond.cli import FAILED_BEFORE_START, NO_SUCH, USAGE, Exit
from neurond.cli.containers import Stopper
from neurond.cli.ecs.placement import Host
from neurond.cli.ecs.text import MOST_BYTES, BadTaskFile
from neurond.cli.launching import show_status, with_conflict_code
from neurond.cli.options import Parser, add_waiting
from neurond.cli.taskfile import TaskFile, read_task
from neurond.cli.wishes import patience
from neurond.client import Client, NeurondError, Unreachable
from neurond.ledger.words import printable, ranges

Row = dict[str, Any]

LONGEST_LINE = 1 << 16
"""Bytes of output without an end of line that are kept back for one."""


def task(arguments: Sequence[str]) -> int:
    """Call one of the task verbs."""
    return _sub_verb("task", {"run": run, "describe": describe}, arguments)


def host(arguments: Sequence[str]) -> int:
    """Call the verb of the host."""
    return _sub_verb("host", {"describe": describe_host}, arguments)


def _sub_verb(verb: str, verbs: dict[str, Any], arguments: Sequence[str]) -> int:
    if arguments[:1] and arguments[0] in verbs:
        return int(verbs[arguments[0]](arguments[1:]))
    wanted = arguments[:1] in (["-h"], ["--help"])
    print(f"usage: neurond {verb} {{{','.join(verbs)}}} [OPTIONS]", file=sys.stdout if wanted else sys.stderr)
    return 0 if wanted else USAGE


# -- run --------------------------------------------------------------------------------------------------------------


def run(arguments: Sequence[str]) -> int:
    """Run a task; in the foreground its output is ours, and the exit code that of the essential container."""
    parser = Parser(
        "task run",
        "Run an ECS task definition: JSON, as aws ecs register-task-definition --cli-input-json takes it. One lease\n"
        "is for all its containers. They start in the order of dependsOn; the first essential one to end ends all.",
    )
    add_waiting(parser, "-w")
    parser.add_argument("-d", "--detach", action="store_true", help="do not follow the task; print its lease")
    parser.add_argument("--check", action="store_true", help="only read the file and say what would be asked")
    parser.add_argument("-j", "--json", action="store_true", help="with --check: print an object with plan and notes")
    parser.add_argument("file", metavar="FILE", help="the task definition; - is stdin")
    options = parser.parse(arguments)
    if options.json and not options.check:
        raise Exit(USAGE, "-j goes with --check: the output of a task is that of its containers")
    data = read_file(options.file)
    if options.check:
        return check(options, data)
    with Client(options.host) as client:
        read = understood(options.file, data, this_host(client))
        for note in read.notes:
            print(f"neurond: {printable(note)}", file=sys.stderr)
        parameters = read.plan | patience(options) | ({"detach": True} if options.detach else {})
        output = Output(prefixed=len(read.plan["containers"]) > 1)
        stopper = Stopper(options.host, "task")
        with stopper:
            return follow_task(client.stream("RunTask", **parameters), options, stopper, output)


def read_file(name: str) -> bytes:
    """Return what is in a file, or in stdin for "-"; not more than is needed to see that it is too long."""
    try:
        if name == "-":
            return sys.stdin.buffer.read(MOST_BYTES + 1)
        with open(name, "rb") as file:
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        raise Exit(FAILED_BEFORE_START, f"{name}: {error.strerror}") from None


def understood(name: str, data: bytes, on: Host | None) -> TaskFile:
    """Return the task that a file describes. Raises Exit."""
    try:
        return read_task(data, on, os.urandom(4).hex())
    except BadTaskFile as error:
        raise Exit(USAGE, f"{'stdin' if name == '-' else name}: {error}") from None


def this_host(client: Client) -> Host:
    """Return what a task may ask about the host of the daemon, which is ours."""
    return Host(client.call("ListChips")["instance_type"], os.uname().machine)


def check(options: Any, data: bytes) -> int:
    """Say what the file asks for, with this host in mind if its daemon answers."""
    try:
        with Client(options.host) as client:
            on: Host | None = this_host(client)
    except Unreachable:
        on = None
    read = understood(options.file, data, on)
    if options.json:
        print(json.dumps({"plan": read.plan, "notes": read.notes}))
        return 0
    plan = read.plan
    print(f"task {plan['name']}: {asked(plan)}")
    for container in plan["containers"]:
        chips = container["chips"]
        given = f"chips {ranges(c['chip'] for c in chips)}" if chips else ""
        given = "the task's chips" if container["all_chips"] else given
        print(printable(f"  {container['name']}: {container['options']['image']}, {given or 'no chip'}"))
    for note in read.notes:
        print(printable(f"note: {note}"))
    return 0


def asked(plan: Row) -> str:
    """Say which chips a plan asks for."""
    if plan.get("all"):
        return "all chips of the host"
    if plan.get("count"):
        return f"{plan['count']} chips"
    return f"chips {ranges(plan['chips'])}" if plan.get("chips") else "no chip"


def follow_task(replies: Iterator[Row], options: Any, stopper: Stopper, output: "Output") -> int:
    """Show what comes of a task, and return the exit code: that of the last reply which has one."""
    code = 0
    try:
        for reply in replies:
            show_status(reply)
            if reply.get("lease") and not stopper.target:
                stopper.target = reply["lease"]
                tell_lease(reply, detached=options.detach)
            output.write(reply)
            if "exit_code" in reply:
                code = int(reply["exit_code"])
                output.ended(reply.get("container", ""), code)
    except NeurondError as error:
        raise with_conflict_code(error, options.conflict_exit_code) from None
    except Unreachable as error:
        if not stopper.target:
            raise
        raise Exit(FAILED_BEFORE_START, f"{error}: task {stopper.target} goes on, and keeps its chips") from None
    finally:
        output.flush()
    return code


def tell_lease(reply: Row, *, detached: bool) -> None:
    """Say which lease a task has: as data if it is detached, else to a person who looks on."""
    if detached:
        print(reply["lease"])
    elif sys.stderr.isatty():
        print(f"neurond: task {reply['lease']}: chips {ranges(reply.get('chips') or ())}", file=sys.stderr)


class Output:
    """Output of containers; if there are several, whole lines, each with the name of its container before it."""

    def __init__(self, *, prefixed: bool) -> None:
        self.prefixed = prefixed
        self._begun: dict[tuple[str, str], bytes] = {}
        self._ended: set[str] = set()

    def write(self, reply: Row) -> None:
        """Write what a reply brings, to the stream that it is for."""
        if not reply.get("data"):
            return
        data = base64.b64decode(reply["data"])
        name, stream = reply.get("container", ""), reply.get("stream", "stdout")
        if not self.prefixed:
            self._out(stream, data)
            return
        *lines, rest = (self._begun.pop((name, stream), b"") + data).split(b"\n")
        while len(rest) > LONGEST_LINE:
            lines.append(rest[:LONGEST_LINE])
            rest = rest[LONGEST_LINE:]
        if rest:
            self._begun[name, stream] = rest
        if lines:
            self._out(stream, b"".join(f"{name} | ".encode() + line + b"\n" for line in lines))

    def ended(self, container: str, code: int) -> None:
        """Say that a container has ended, if there are several, once, after the last of its output."""
        self.flush(container)
        if self.prefixed and container and container not in self._ended:
            self._ended.add(container)
            print(f"neurond: {printable(container)} has ended with {code}", file=sys.stderr)

    def flush(self, container: str = "") -> None:
        """Write the last lines of a container, or of all, which have no end of line."""
        for name, stream in [key for key in self._begun if container in {"", key[0]}]:
            self._out(stream, f"{name} | ".encode() + self._begun.pop((name, stream)) + b"\n")

    @staticmethod
    def _out(stream: str, data: bytes) -> None:
        to = sys.stderr.buffer if stream == "stderr" else sys.stdout.buffer
        to.write(data)
        to.flush()


# -- describe ---------------------------------------------------------------------------------------------------------

ARN = "neurond:task/"
STATUSES = {"created": "PENDING", "running": "RUNNING", "paused": "RUNNING", "restarting": "RUNNING"}
"""ECS's word for Docker's; any other of Docker's is STOPPED."""


def describe(arguments: Sequence[str]) -> int:
    """Print tasks as aws ecs describe-tasks does."""
    parser = Parser("task describe", "Print tasks as aws ecs describe-tasks prints them, all of them or these.")
    parser.add_argument("task", nargs="*", help="lease or taskArn of a task")
    options = parser.parse(arguments)
    with Client(options.host) as client:
        rows = [row for row in client.call("ListContainers")["containers"] if row.get("task")]
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["task_id"], row["task"]), []).append(row)
    wanted = [name.removeprefix(ARN) for name in options.task]
    known = {identity for identity, _ in found}
    tasks = [described(identity, name, own) for (identity, name), own in found.items()]
    failures = [{"arn": f"{ARN}{name}", "reason": "MISSING"} for name in wanted if name not in known]
    if wanted:
        tasks = [entry for entry in tasks if entry["taskArn"].removeprefix(ARN) in wanted]
    print(json.dumps({"tasks": tasks, "failures": failures}, indent=4))
    return NO_SUCH if failures else 0


def described(identity: str, name: str, rows: Sequence[Row]) -> Row:
    """Return one task in the shape of DescribeTasks."""
    containers = [described_container(row) for row in rows]
    statuses = {container["lastStatus"] for container in containers}
    status = next((word for word in ("RUNNING", "PENDING") if word in statuses), "STOPPED")
    return {
        "taskArn": f"{ARN}{identity}",
        "group": f"family:{name}",
        "lastStatus": status,
        "desiredStatus": "STOPPED" if status == "STOPPED" else "RUNNING",
        "startedBy": next((row["owner"] for row in rows if row["owner"]), ""),
        "containers": containers,
    }


def described_container(row: Row) -> Row:
    """Return one container in the shape of DescribeTasks."""
    entry = {
        "name": row.get("task_container") or row["name"],
        "runtimeId": row["container_id"],
        "image": row["image"],
        "lastStatus": STATUSES.get(row["status"], "STOPPED"),
        "neuronDeviceIds": [str(chip) for chip in row["chips"]],
    }
    if row["exit_code"] is not None:
        entry["exitCode"] = row["exit_code"]
    if row.get("health"):
        entry["healthStatus"] = str(row["health"]).upper()
    return entry


def describe_host(arguments: Sequence[str]) -> int:
    """Print this host as aws ecs describe-container-instances does."""
    parser = Parser("host describe", "Print this host as aws ecs describe-container-instances prints one.")
    options = parser.parse(arguments)
    with Client(options.host) as client:
        reply = client.call("ListChips")
    chips = reply["chips"]
    attributes = Host(reply["instance_type"], os.uname().machine).attributes()
    instance = {
        "containerInstanceArn": f"neurond:container-instance/{os.uname().nodename}",
        "status": "ACTIVE",
        "agentConnected": True,
        "registeredResources": [resource([chip["neuron_device"] for chip in chips])],
        "remainingResources": [resource([chip["neuron_device"] for chip in chips if chip["state"] == "free"])],
        "attributes": [{"name": name, "value": value} for name, value in attributes.items()],
    }
    print(json.dumps({"containerInstances": [instance], "failures": []}, indent=4))
    return 0


def resource(chips: Sequence[int]) -> Row:
    """Return chips as a resource of a container instance."""
    return {"name": "NEURON_DEVICES", "type": "STRINGSET", "stringSetValue": [str(chip) for chip in chips]}
