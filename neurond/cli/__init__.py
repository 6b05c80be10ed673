"""The command line: `neurond VERB`. stdout is data, stderr is talk.

Each verb lives in one of the modules beside this one and is imported when it is called.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

from neurond.client import NeurondError, ShutOut, Unreachable
from neurond.ledger.words import printable

TYPE_CHECKING = False  # typing takes longer to import than all that is done here
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn

VERBS = {
    "run": ("run", "lease chips, then run a command on them"),
    "acquire": ("leases", "lease chips for a script"),
    "renew": ("leases", "let a lease with a time limit go on"),
    "release": ("leases", "give a lease back"),
    "bind": ("leases", "hand a lease over to another process or a time limit"),
    "adopt": ("leases", "turn a running use of chips into a lease"),
    "env": ("leases", "print the environment of a lease"),
    "ls": ("show", "show the chips"),
    "ps": ("show", "show the leases"),
    "watch": ("show", "follow what happens"),
    "check": ("show", "compare the ledger with processes, nodes and containers"),
    "doctor": ("doctor", "say what is wrong on this host, with a fix for each"),
    "container": ("containers", "run, list, stop containers on leased chips, read their output"),
    "docker": ("docker", "docker run and docker create with leased chips, and any flag of docker's"),
    "task": ("task", "run an ECS task definition, describe its tasks"),
    "host": ("task", "describe this host as ECS describes one"),
    "cdi": ("cdi", "list leases as device names, print their CDI specification"),
    "serve": ("serve", "run the daemon"),
    "config": ("config", "print the settings in force and where they are set, or check the files"),
    "bench": ("bench", "measure how fast all this is here, beside Redis, etcd and flock"),
    "simulate": ("simulate", "pull and plug chips of a simulated host"),
    "version": ("show", "print the versions of the command and of the daemon"),
}

FAILED, USAGE, FAILED_BEFORE_START, NOT_EXECUTABLE, NOT_FOUND = 1, 2, 125, 126, 127
NO_SUCH, UNREACHABLE, NO_CAPACITY, NOT_ALLOWED = 66, 69, 75, 77

EXIT_CODES = {
    "InvalidRequest": USAGE,
    "InvalidParameter": USAGE,
    "NoSuchChip": NO_SUCH,
    "NoSuchLease": NO_SUCH,
    "NoCapacity": NO_CAPACITY,
    "WaitTimedOut": NO_CAPACITY,
    "NotAllowed": NOT_ALLOWED,
}
LAUNCHING = {"run", "container run", "docker run", "docker create", "docker start", "task run"}
"""Verbs that end as what they start does, so that codes below 125 are its own."""

HELP_EPILOG = """\
exit codes:
  the command's own  of run, container run, docker run and task run, once the command or container has started
  1    failed                          66   no such lease or chip
  2    wrong usage or impossible wish  69   the daemon does not answer
  125  failed before the start         75   no capacity, or the wait ran out
  126  command not executable          77   not allowed
  127  command not found               128+N  ended by signal N

environment:
  NEUROND_HOST  address of the daemon, as unix:///run/neurond/neurond.sock
  NEUROND_<VERB>_<OPTION> gives any option, as in NEUROND_RUN_WAIT=10m
"""


class Exit(Exception):
    """Ends the command with this exit code; the sentence, if any, goes to stderr."""

    def __init__(self, code: int, sentence: str = "") -> None:
        super().__init__(sentence)
        self.code = code


def command() -> NoReturn:
    """Be the command `neurond`: end without what an interpreter does at its end, which takes longer than a call."""
    code = main()
    try:  # noqa: SIM105 - contextlib takes its time to import
        sys.stderr.flush()
    except OSError:
        pass
    os._exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    for name in ("stdout", "stderr"):  # one that was closed is None
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for the rest of the process
    try:
        try:
            return _main(arguments)
        finally:
            sys.stdout.flush()  # while an error can still be handled; argparse leaves by SystemExit after its help
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered can't be said any more
        if isinstance(error, BrokenPipeError):
            return 128 + 13
        return _say(Exception(f"cannot write to stdout: {error.strerror}"), FAILED)


def _main(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    while given and (given[0] in {"-H", "--host"} or given[0].startswith("--host=")):
        option, equals, where = given.pop(0).partition("=")
        if not equals and not given:
            print(f"neurond: {option} takes an address, such as unix:///run/neurond/neurond.sock", file=sys.stderr)
            return USAGE
        os.environ["NEUROND_HOST"] = where if equals else given.pop(0)
    if not given or given[0] in {"-h", "--help", "help"}:
        print(usage(), end="", file=sys.stdout if given else sys.stderr)
        return 0 if given else USAGE
    if given[0] in {"-V", "--version"}:
        from neurond import __version__

        print(f"neurond {__version__}")
        return 0
    if given[0] not in VERBS:
        what = f"no option {given[0]!r} before the verb" if given[0][:1] == "-" else f"no verb {given[0]!r}"
        print(f"neurond: {what} (neurond --help lists them)", file=sys.stderr)
        return USAGE
    return _run(given[0], given[1:])


def usage() -> str:
    """Return the text of --help."""
    verbs = "\n".join(f"  {verb:10} {text}" for verb, (_, text) in VERBS.items())
    return f"usage: neurond VERB [OPTIONS]   (neurond VERB --help says more)\n\n{verbs}\n\n{HELP_EPILOG}"


def _run(verb: str, arguments: Sequence[str]) -> int:
    try:
        return int(getattr(import_module(f"neurond.cli.{VERBS[verb][0]}"), verb)(arguments))
    except (Exit, NeurondError, Unreachable) as error:
        return _say(error, exit_code_of(verb if verb in LAUNCHING else " ".join([verb, *arguments[:1]]), error))
    except KeyboardInterrupt:
        return 128 + 2


def exit_code_of(verb: str, error: Exit | NeurondError | Unreachable) -> int:
    """Return the exit code that an error gives a verb."""
    if isinstance(error, Exit):
        return error.code
    if isinstance(error, Unreachable):
        return NOT_ALLOWED if isinstance(error, ShutOut) else UNREACHABLE
    code = EXIT_CODES.get(error.kind, FAILED)
    if code == FAILED and verb in LAUNCHING:
        code = int(error.parameters.get("exit_code", FAILED_BEFORE_START))
    return code


def for_each(names: Sequence[str], work: Callable[[str], object]) -> None:
    """Do something to each of these, the others too when one fails; raise what went wrong first at the end."""
    failures: list[NeurondError] = []
    for name in names:
        try:
            work(name)
        except NeurondError as error:
            failures.append(error)
    for later in failures[1:]:
        _say(later, FAILED)
    if failures:
        raise failures[0]


def _say(error: Exception, code: int) -> int:
    if str(error):
        print(f"neurond: {printable(str(error))}", file=sys.stderr)
    return code
