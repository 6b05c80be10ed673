"""run: lease chips, then become the command.

People put it in front of everything, so it begins fast: the usual form of its options is read without argparse.
"""

from __future__ import annotations

import os

from neurond.cli import FAILED_BEFORE_START, NOT_ALLOWED, USAGE, Exit
from neurond.cli.launching import (
    VISIBLE_CORES,
    acquire_with,
    become,
    check_cores,
    find_program,
    lease_name,
    leased_cores,
)
from neurond.client import Client

TYPE_CHECKING = False  # typing takes longer to import than all that is done here
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


def run(arguments: Sequence[str]) -> int:
    """Lease chips, then become the command: its signals, terminal and exit code are its own."""
    options = read_plain(arguments) or read(arguments)
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


def read(arguments: Sequence[str]) -> Any:
    """Read the options by argparse."""
    import argparse

    from neurond.cli.options import Parser, add_chips

    parser = Parser("run", "Lease chips and run a command on them; the lease ends with the command.")
    add_chips(parser, "-w")
    parser.add_argument("--name", help="a name for people (default: the command's)")
    parser.add_argument(
        "--enforce", action="store_true", help="confine the command to its chips by a device filter (root, systemd)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD ...", help="the command and its arguments")
    return parser.parse(arguments)


class Plain:
    """The options of run, as argparse would have read them."""

    count: int | None = None
    chips = wait = conflict_exit_code = name = host = None
    all = no_wait = enforce = False
    command: list[str]


def read_plain(arguments: Sequence[str]) -> Plain | None:
    """Read `-n N`, `--count N`, `--no-wait` and what stands behind `--`; None if there is anything else to it."""
    if "--" not in arguments or any(name.startswith("NEUROND_RUN_") for name in os.environ):
        return None
    found = Plain()
    at = list(arguments).index("--")
    own, found.command = list(arguments[:at]), list(arguments[at:])
    while own:
        option = own.pop(0)
        if option in {"-n", "--count"} and own and own[0].isascii() and own[0].isdecimal() and len(own[0]) < 6:
            found.count = int(own.pop(0))
        elif option == "--no-wait":
            found.no_wait = True
        else:
            return None
    return None if found.count is None else found


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
