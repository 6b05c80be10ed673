"""run, acquire, renew, release, env: leases for people and scripts."""

import json
import os
from argparse import REMAINDER
from collections.abc import Sequence
from typing import Any

from neurond.cli import FAILED_BEFORE_START, NOT_ALLOWED, USAGE, Exit, exit_code_of, for_each
from neurond.cli.launching import (
    VISIBLE_CORES,
    acquire_with,
    become,
    check_cores,
    find_program,
    lease_name,
    leased_cores,
)
from neurond.cli.options import Parser, add_chips, duration
from neurond.client import Client, NeurondError, Unreachable


def run(arguments: Sequence[str]) -> int:
    """Lease chips, then become the command: its signals, terminal and exit code are its own."""
    parser = Parser("run", "Lease chips and run a command on them; the lease ends with the command.")
    add_chips(parser, "-w")
    parser.add_argument("--name", help="a name for people (default: the command's)")
    parser.add_argument(
        "--enforce", action="store_true", help="confine the command to its chips by a device filter (root, systemd)"
    )
    parser.add_argument("command", nargs=REMAINDER, metavar="-- CMD ...", help="the command and its arguments")
    options = parser.parse(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise Exit(USAGE, "run what? neurond run -n 1 -- python train.py")
    program = find_program(command[0])
    if options.enforce:
        check_can_confine()
    with Client(options.host) as client:
        name = options.name if options.name is not None else lease_name(os.path.basename(command[0]))
        lease = acquire_with(client, options, pid=0, name=name, env=True, enforce=options.enforce)
        environment = os.environ | lease["env"]
        if os.environ.get(VISIBLE_CORES) and VISIBLE_CORES in lease["env"]:
            check_cores(os.environ[VISIBLE_CORES], leased_cores(lease["env"]))
            environment[VISIBLE_CORES] = os.environ[VISIBLE_CORES]
        if options.enforce:
            command = [*confined(client, lease["chips"]), *command]
            program = find_program(command[0])
        become(program, command, environment)


def check_can_confine() -> None:
    """Raise Exit where no device filter can be set up, before any chip is asked for or waited for."""
    if os.geteuid() != 0:
        raise Exit(NOT_ALLOWED, "--enforce sets up a device filter, which only root may")
    if not os.path.isdir("/run/systemd/system"):
        raise Exit(FAILED_BEFORE_START, "--enforce needs systemd as the init of this host, which it is not")
    find_program("systemd-run")


def confined(client: Client, chips: Sequence[int]) -> list[str]:
    """Return the beginning of a command that runs in a scope of its own, which can open no chip but these.

    systemd-run moves itself into the scope and becomes the command, so the lease's process stays the same.
    """
    nodes = {chip["neuron_device"]: chip["node"] for chip in client.call("ListChips")["chips"]}
    allowed = [f"--property=DeviceAllow={nodes[chip]} rw" for chip in chips]
    return ["systemd-run", "--scope", "--quiet", "--property=DevicePolicy=closed", *allowed, "--"]


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
    parser.add_argument("--key", help="your own name for this request: asking again with it gives the same lease")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--env", action="store_true", help="print shell commands that set the environment")
    form.add_argument("-j", "--json", action="store_true", help="print an object with lease, chips and env")
    options = parser.parse(arguments)
    check_pid("--hold-pid", options.hold_pid)
    pid = None if options.ttl is not None else options.hold_pid or calling_process()
    more = {"pid": pid, "ttl": options.ttl, "name": options.name, "key": options.key, "env": True}
    try:
        with Client(options.host) as client:
            lease = acquire_with(client, options, **more)
            try:
                print_lease(lease, options)
            except OSError:  # a lease that nobody hears of is no use to anybody
                client.call("Release", lease=lease["lease"])
                raise
    except (Exit, NeurondError, Unreachable) as error:
        if options.env:
            print(f"(exit {exit_code_of('acquire', error)})")  # so that eval fails, and not only this command
        raise
    return 0


def print_lease(lease: dict[str, Any], options: Any) -> None:
    """Print a lease in the form that was asked for."""
    if options.json:
        print_json(lease)
    elif options.env:
        print_exports(lease["env"])
    else:
        print(lease["lease"], flush=True)


def print_json(lease: dict[str, Any]) -> None:
    """Print what is promised of a lease as an object; what more the daemon tells is for docker's arguments."""
    print(json.dumps({key: lease[key] for key in ("lease", "chips", "env")}), flush=True)


def renew(arguments: Sequence[str]) -> int:
    """Let a lease with a time limit go on."""
    parser = Parser("renew", "Let a lease with a time limit end this time from now.")
    parser.add_argument("lease")
    parser.add_argument("--ttl", type=duration, metavar="DUR", required=True)
    add_force(parser)
    options = parser.parse(arguments)
    with Client(options.host) as client:
        client.call("Renew", lease=options.lease, ttl=options.ttl, force=options.force, reason=options.reason)
    return 0


def release(arguments: Sequence[str]) -> int:
    """Give leases back."""
    parser = Parser("release", "Give leases back. A chip is free once no process has it open any more.")
    parser.add_argument("lease", nargs="+")
    add_force(parser)
    options = parser.parse(arguments)
    with Client(options.host) as client:
        for_each(
            options.lease, lambda lease: client.call("Release", lease=lease, force=options.force, reason=options.reason)
        )
    return 0


def bind(arguments: Sequence[str]) -> int:
    """Hand a lease over."""
    parser = Parser("bind", "Hand a lease over to another process or to a time limit, in one step.")
    parser.add_argument("lease")
    bound = parser.add_mutually_exclusive_group(required=True)
    bound.add_argument("--ttl", type=duration, metavar="DUR", help="end the lease after this time")
    bound.add_argument("--hold-pid", type=int, metavar="PID", help="end the lease with this process")
    options = parser.parse(arguments)
    check_pid("--hold-pid", options.hold_pid)
    with Client(options.host) as client:
        client.call("Bind", lease=options.lease, pid=options.hold_pid, ttl=options.ttl)
    return 0


def adopt(arguments: Sequence[str]) -> int:
    """Turn a running use of chips into a lease."""
    parser = Parser("adopt", "Turn the use of chips without a lease into a lease in place. Prints the lease.")
    whose = parser.add_mutually_exclusive_group(required=True)
    whose.add_argument("--pid", type=int, help="a process of your own that has chips open")
    whose.add_argument("--container", help="a running container that was given chips")
    parser.add_argument("--name", default="", help="a name for people")
    options = parser.parse(arguments)
    check_pid("--pid", options.pid)
    with Client(options.host) as client:
        if options.container is not None:
            lease = client.call("AdoptContainer", container=options.container)
        else:
            lease = client.call("Adopt", pid=options.pid, name=options.name)
    print(lease["lease"])
    return 0


def check_pid(option: str, pid: int | None) -> None:
    """Raise Exit for what can't be a process: on the wire, 0 would be this command itself."""
    if pid is not None and pid < 1:
        raise Exit(USAGE, f"{option} {pid}: no process has that number")


def add_force(parser: Parser) -> None:
    """Add what root needs to meddle with somebody else's lease."""
    parser.add_argument("--force", action="store_true", help="do so with another user's lease (root)")
    parser.add_argument("--reason", metavar="WHY", help="why, for the log")


def env(arguments: Sequence[str]) -> int:
    """Print the environment of a lease."""
    parser = Parser("env", 'Print the environment for using a lease\'s chips: eval "$(neurond env LEASE)"')
    parser.add_argument("lease")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("-j", "--json", action="store_true", help="print an object with lease, chips and env")
    form.add_argument(
        "--docker-args",
        action="store_true",
        help="print docker's arguments for the chips, in one line: docker run $(neurond env ID --docker-args) IMAGE",
    )
    options = parser.parse(arguments)
    with Client(options.host) as client:
        reply = client.call("Environment", lease=options.lease)
    if options.docker_args:
        import shlex

        from neurond.cli.docker import arguments_for

        print(shlex.join(arguments_for(reply)))
    elif options.json:
        print_json(reply)
    else:
        print_exports(reply["env"])
    return 0


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
    print("".join(f"export {name}='{value}'\n" for name, value in environment.items()), end="", flush=True)
