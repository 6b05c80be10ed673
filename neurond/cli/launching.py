"""What the verbs share that lease chips and then start something: a command, a container, docker itself."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal makes enums of all it has, which takes longer than a call
import os
import sys

from neurond.cli import FAILED_BEFORE_START, NO_CAPACITY, NOT_EXECUTABLE, NOT_FOUND, USAGE, Exit
from neurond.cli.wishes import wish
from neurond.client import Client, NeurondError
from neurond.ledger.cores import contradiction
from neurond.ledger.words import printable

TYPE_CHECKING = False  # typing takes longer to import than all that is done here
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any, NoReturn

VISIBLE_CORES = "NEURON_RT_VISIBLE_CORES"


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
        if "/" in name and os.path.isdir(path):
            raise Exit(NOT_EXECUTABLE, f"{path}: is a directory")
        if name and os.path.isfile(path):
            if os.access(path, os.X_OK):
                return path
            found = path
    if found:
        raise Exit(NOT_EXECUTABLE, f"{found}: not executable")
    raise Exit(NOT_FOUND, f"{name or repr(name)}: command not found")


def become(program: str, command: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Become the command: pid, terminal, signals and exit code are its own from here on. Raises Exit 126 or 127."""
    sys.stdout.flush()
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):  # Python ignores these two, a command must not
        _signal.signal(number, _signal.SIG_DFL)
    try:
        os.execve(program, command, environment)  # noqa: S606 - to become the command is the point
    except OSError as error:
        code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        raise Exit(code, f"{command[0]}: {error.strerror}") from None


def show_status(reply: Mapping[str, Any]) -> None:
    """Say what is going on; on a terminal a line that passes is written over by the next, elsewhere it is left out."""
    terminal = sys.stderr.isatty()
    begin = "\r\x1b[K" if terminal else ""
    if reply.get("status"):
        line = f"neurond: {printable(reply['status'])}"
        if not reply.get("passing"):
            print(f"{begin}{line}", file=sys.stderr)
        elif terminal:
            print(f"{begin}{line[: os.get_terminal_size(2).columns - 1]}", end="", file=sys.stderr, flush=True)
    elif (reply.get("lease") or "error" in reply) and terminal:
        print(begin, end="", file=sys.stderr, flush=True)


def lease_name(name: str) -> str:
    """Return a name for people as the daemon takes it."""
    return printable(name)[:128]


def check_image(image: str) -> None:
    """Raise Exit for what a shell makes of `--device /dev/neuron*`: the second path stands where the image should."""
    if image.startswith("/dev/"):
        raise Exit(USAGE, f"{image} stands where the image should: chips are asked for with -n N or --chips 0,1")


def leased_cores(environment: Mapping[str, str]) -> list[int]:
    """Return the host-wide logical cores that the environment of a lease names; none where they are not known."""
    visible = environment.get(VISIBLE_CORES)
    return [int(core) for core in visible.split(",")] if visible else []


def check_cores(wanted: str, cores: Sequence[int], *, local: bool = False) -> None:
    """Raise Exit if a NEURON_RT_VISIBLE_CORES of the user's own names cores beyond those of the lease.

    With `local` it may also count from 0, as inside a container. Cores that are not known contradict nothing.
    """
    wrong = contradiction(wanted, cores) if cores else None
    if wrong and not (local and contradiction(wanted, range(len(cores))) is None):
        raise Exit(USAGE, wrong)


def environment(given: Iterable[str], files: Iterable[str], *, strict: bool = True) -> list[str]:
    """Return NAME=VALUE of all variables, those of files first; a name alone passes on our own value, if any.

    Unless `strict`, what has no name or blanks in it is left out: somebody else will see to it.
    """
    lines: list[str] = []
    for path in files:
        try:
            with open(path, encoding="utf-8-sig") as file:
                lines += [line.strip("\r\n").lstrip() for line in file]
        except (OSError, UnicodeDecodeError) as error:
            raise Exit(FAILED_BEFORE_START, f"--env-file {path}: {error}") from None
    result = []
    for text in [*(line for line in lines if line and not line.startswith("#")), *given]:
        name, equals, _ = text.partition("=")
        if not name or any(c.isspace() for c in name):
            if not strict:
                continue
            raise Exit(USAGE, f"{text!r} is no environment variable: the form is NAME=VALUE")
        if equals:
            result.append(text)
        elif name in os.environ:
            result.append(f"{name}={os.environ[name]}")
    return result


def real_device(text: str) -> str:
    """Return a value of --device with its node as it is really called, by the path inside that it would have had.

    The daemon may see another /tmp and no /home, and could not tell that a link there leads to a chip.
    """
    node, _, rest = text.partition(":")
    real = os.path.realpath(node) if node.startswith("/") else node
    if real == node:
        return text
    inside = rest if rest.startswith("/") else f"{node}:{rest}" if rest else node
    return f"{real}:{inside}"


def volume(text: str) -> str:
    """Return a volume with a relative source made absolute, as docker does: the daemon has another directory."""
    source, colon, rest = text.partition(":")
    if colon and source.startswith("."):
        return os.path.abspath(source) + colon + rest
    return text
