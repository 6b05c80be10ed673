"""run, acquire, renew, release, env: leases for people and scripts."""

import json
import os
from collections.abc import Sequence
from typing import Any

from neurond.cli import USAGE, Exit, exit_code_of, for_each
from neurond.cli.launching import (
    acquire_with,
)
from neurond.cli.options import Parser, add_chips, duration
from neurond.client import Client, NeurondError, Unreachable


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
    parser.add_argument("lease", help="id of the lease")
    parser.add_argument("--ttl", type=duration, metavar="DUR", required=True)
    add_force(parser)
    options = parser.parse(arguments)
    with Client(options.host) as client:
        client.call("Renew", lease=options.lease, ttl=options.ttl, force=options.force, reason=options.reason)
    return 0


def release(arguments: Sequence[str]) -> int:
    """Give leases back."""
    parser = Parser("release", "Give leases back. A chip is free once no process has it open any more.")
    parser.add_argument("lease", nargs="+", help="ids of leases")
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
    parser.add_argument("lease", help="id of the lease")
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
    parser.add_argument("lease", help="id of the lease")
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
