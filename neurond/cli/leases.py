"""run, acquire, renew, release, env: leases for people and scripts."""

import json
import os
import signal
import sys
from argparse import REMAINDER
from collections.abc import Sequence
from typing import Any

from neurond.cli import FAILED_BEFORE_START, NO_CAPACITY, NOT_EXECUTABLE, NOT_FOUND, USAGE, Exit
from neurond.cli.options import Parser, add_chips, duration, wish
from neurond.client import Client, NeurondError
from neurond.ledger.cores import contradiction

VISIBLE_CORES = "NEURON_RT_VISIBLE_CORES"


def run(arguments: Sequence[str]) -> int:
    """Lease chips, then become the command: its signals, terminal and exit code are its own."""
    parser = Parser("run", "Lease chips and run a command on them; the lease ends with the command.")
    add_chips(parser, "-w")
    parser.add_argument("--name", help="a name for people (default: the command's)")
    parser.add_argument("command", nargs=REMAINDER, metavar="-- CMD ...", help="the command and its arguments")
    options = parser.parse(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise Exit(USAGE, "run what? neurond run -n 1 -- python train.py")
    program = find_program(command[0])
    with Client(options.host) as client:
        name = options.name if options.name is not None else os.path.basename(command[0])[:128]
        lease = acquire_with(client, options, pid=0, name=name, env=True)
        environment = os.environ | lease["env"]
        if os.environ.get(VISIBLE_CORES) and VISIBLE_CORES in lease["env"]:
            wrong = contradiction(os.environ[VISIBLE_CORES], map(int, lease["env"][VISIBLE_CORES].split(",")))
            if wrong:
                raise Exit(FAILED_BEFORE_START, wrong)
            environment[VISIBLE_CORES] = os.environ[VISIBLE_CORES]
        sys.stdout.flush()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these two, a command must not
            signal.signal(number, signal.SIG_DFL)
        try:
            os.execve(program, command, environment)  # noqa: S606 - to become the command is the point
        except OSError as error:
            code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            raise Exit(code, f"{command[0]}: {error.strerror}") from None


def acquire(arguments: Sequence[str]) -> int:
    """Lease chips until a process ends, a time is over, or they are released."""
    parser = Parser(
        "acquire",
        "Lease chips. Prints the lease; it ends when the process that called this ends (the shell), when the "
        'process of --hold-pid ends, or after --ttl.\n\n  eval "$(neurond acquire -n 1 --ttl 30m --env)"',
    )
    add_chips(parser, "-w")
    bound = parser.add_mutually_exclusive_group()
    bound.add_argument("--ttl", type=duration, metavar="DUR", help="end the lease after this time (renew prolongs it)")
    bound.add_argument("--hold-pid", type=int, metavar="PID", help="end the lease with this process")
    parser.add_argument("--name", default="", help="a name for people")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--env", action="store_true", help="print shell commands that set the environment")
    form.add_argument("-j", "--json", action="store_true", help="print an object with lease, chips and env")
    options = parser.parse(arguments)
    if options.hold_pid is not None and options.hold_pid < 1:
        raise Exit(USAGE, f"--hold-pid {options.hold_pid}: no process has that number")
    pid = None if options.ttl is not None else options.hold_pid or calling_process()
    with Client(options.host) as client:
        lease = acquire_with(client, options, pid=pid, ttl=options.ttl, name=options.name, env=True)
    if options.json:
        print(json.dumps({key: lease[key] for key in ("lease", "chips", "env")}))
    elif options.env:
        print_exports(lease["env"])
    else:
        print(lease["lease"])
    return 0


def renew(arguments: Sequence[str]) -> int:
    """Let a lease with a time limit go on."""
    parser = Parser("renew", "Let a lease with a time limit end this time from now.")
    parser.add_argument("lease")
    parser.add_argument("--ttl", type=duration, metavar="DUR", required=True)
    options = parser.parse(arguments)
    with Client(options.host) as client:
        client.call("Renew", lease=options.lease, ttl=options.ttl)
    return 0


def release(arguments: Sequence[str]) -> int:
    """Give leases back."""
    parser = Parser("release", "Give leases back. A chip is free once no process has it open any more.")
    parser.add_argument("lease", nargs="+")
    options = parser.parse(arguments)
    first: NeurondError | None = None
    with Client(options.host) as client:
        for lease in options.lease:
            try:
                client.call("Release", lease=lease)
            except NeurondError as error:  # the others are given back all the same
                if first is not None:
                    print(f"neurond: {error}", file=sys.stderr)
                first = first or error
    if first is not None:
        raise first
    return 0


def env(arguments: Sequence[str]) -> int:
    """Print the environment of a lease."""
    parser = Parser("env", 'Print the environment for using a lease\'s chips: eval "$(neurond env LEASE)"')
    parser.add_argument("lease")
    parser.add_argument("-j", "--json", action="store_true", help="print an object with lease, chips and env")
    options = parser.parse(arguments)
    with Client(options.host) as client:
        reply = client.call("Environment", lease=options.lease)
    if options.json:
        print(json.dumps(reply))
    else:
        print_exports(reply["env"])
    return 0


def acquire_with(client: Client, options: Any, **more: Any) -> dict[str, Any]:
    """Ask for what the options of `add_chips` say, telling on stderr why it takes long, and return the lease."""
    try:
        for reply in client.stream("Acquire", **wish(options), **more):
            if not reply.get("waiting"):
                return reply
            hint = "" if options.wait is not None else " (--no-wait fails at once)"
            print(f"neurond: waiting: {reply['waiting']}{hint}", file=sys.stderr)
    except NeurondError as error:
        raise with_conflict_code(error, options.conflict_exit_code) from None
    raise Exit(FAILED_BEFORE_START, "neurond answered without a lease")


def with_conflict_code(error: NeurondError, code: int | None) -> Exception:
    """Return the error, with the exit code of -E if that was given and the chips were not to be had."""
    if error.kind in {"NoCapacity", "WaitTimedOut"}:
        return Exit(NO_CAPACITY if code is None else code, str(error))
    return error


def find_program(name: str) -> str:
    """Return the path that a command stands for, before any chip is leased. Raises Exit 126 or 127."""
    found = None
    for directory in [""] if "/" in name else os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(directory, name)
        if os.path.isfile(path):
            if os.access(path, os.X_OK):
                return path
            found = path
    if found:
        raise Exit(NOT_EXECUTABLE, f"{found}: not executable")
    raise Exit(NOT_FOUND, f"{name}: command not found")


def calling_process() -> int:
    """Return the pid of the process that called this command, looking through sudo."""
    pid = os.getppid()
    while True:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                name, _, fields = file.read().partition("(")[2].rpartition(")")
        except OSError:
            return pid
        if name not in {"sudo", "doas"}:
            return pid
        pid = int(fields.split()[1])


def print_exports(environment: dict[str, str]) -> None:
    """Print shell commands that set these variables; their values have no quotes in them."""
    for name, value in environment.items():
        print(f"export {name}='{value}'")
