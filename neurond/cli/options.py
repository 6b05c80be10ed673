"""Options that several verbs share, and how they are read."""

from __future__ import annotations

import argparse
import os
import re
from argparse import SUPPRESS

from neurond.ledger.durations import read_duration

TYPE_CHECKING = False  # typing takes longer to import than all that is done here
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn


class Help(argparse.RawDescriptionHelpFormatter):
    """Knows how wide the terminal is. argparse asks for each option that is added, by a module slow to import."""

    def __init__(self, prog: str) -> None:
        columns = os.environ.get("COLUMNS", "")
        if not columns.isdecimal():
            try:
                columns = str(os.get_terminal_size(1).columns)
            except OSError:
                columns = "80"
        super().__init__(prog, width=int(columns) - 2)


class Parser(argparse.ArgumentParser):
    """An argparse parser without abbreviations, whose options can also come from NEUROND_<VERB>_<OPTION>."""

    def __init__(self, verb: str, description: str, *, hint: str = "", host: bool = True, **kwargs: Any) -> None:
        super().__init__(
            prog=f"neurond {verb}",
            description=description,
            allow_abbrev=False,
            formatter_class=Help,
            **kwargs,
        )
        self._hint = hint
        self._prefix = "NEUROND_" + verb.replace(" ", "_").upper() + "_"
        if host:
            self.add_argument("-H", "--host", metavar="ADDRESS", help="address of the daemon (default: $NEUROND_HOST)")

    def refuse(self, names: str, why: str) -> None:
        """Have an option that people know from elsewhere refused by its names (`-t --tty`), with the reason."""
        self.add_argument(*names.split(), nargs="?", action=_Refused, help=SUPPRESS, metavar=why)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the command line, and where to look when an option is not ours."""
        super().error(f"{message}\n{self._hint}" if self._hint and "unrecognized" in message else message)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse, then fill in from the environment what the command line left open."""
        return self.parse_args([*self._from_environment(arguments), *arguments])

    def _from_environment(self, arguments: Sequence[str]) -> list[str]:
        own = self._own(arguments)
        found: list[str] = []
        for action in self._actions:
            long = next((name for name in action.option_strings if name.startswith("--")), None)
            value = os.environ.get(self._prefix + (long or "--")[2:].replace("-", "_").upper())
            if long is None or not value or self._given(action, own):
                continue
            if action.nargs == 0:
                found += [long] if value not in {"0", "no", "false"} else []
            else:
                found.append(f"{long}={value}")
        return found

    def _own(self, arguments: Sequence[str]) -> list[str]:
        """Return what stands before `--`, or before the first word of a command that takes all the rest."""
        own = list(arguments[: arguments.index("--")] if "--" in arguments else arguments)
        if not any(action.nargs == argparse.REMAINDER for action in self._actions):
            return own
        at = 0
        while at < len(own) and own[at].startswith("-"):
            action = self._option_string_actions.get(own[at])
            at += 2 if action is not None and action.nargs is None else 1
        return own[:at]

    def _given(self, action: argparse.Action, arguments: Sequence[str]) -> bool:
        """Tell whether the option, or one that excludes it, stands on the command line."""
        rivals = [action]
        for group in self._mutually_exclusive_groups:
            if action in group._group_actions:  # noqa: SLF001 - argparse has no public way to ask
                rivals = group._group_actions  # noqa: SLF001
        names = {name for rival in rivals for name in rival.option_strings}
        return any(
            argument.partition("=")[0] in names or (argument[:2] in names and argument[1:2] != "-")
            for argument in arguments
        )


class _Refused(argparse.Action):
    """An option that only says why it is not there."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.error(f"{'/'.join(self.option_strings)}: {self.metavar}")


def add_chips(parser: argparse.ArgumentParser, *wait_names: str, required: bool = True) -> None:
    """Add how many or which chips are asked for, and how long to wait for them (`--wait`, and these names for it)."""
    which = parser.add_mutually_exclusive_group(required=required)
    which.add_argument("-n", "--count", type=int, metavar="N", help="lease N chips of neurond's choice")
    which.add_argument("--chips", type=chip_list, metavar="0,1", help="lease exactly these chips (0,1 or 0-3)")
    which.add_argument("--all", action="store_true", help="lease all chips of the host")
    add_waiting(parser, *wait_names)


def add_waiting(parser: argparse.ArgumentParser, *wait_names: str) -> None:
    """Add how long to wait for chips (`--wait`, and these names for it), and the exit code if that was in vain."""
    waiting = parser.add_mutually_exclusive_group()
    waiting.add_argument(
        *wait_names,
        "--wait",
        type=duration,
        metavar="DUR",
        help="wait as long as this for chips that are in use or not there yet (30s, 10m, 2h); "
        "without it, wait without limit for chips in use, and not at all for missing ones",
    )
    waiting.add_argument("--no-wait", action="store_true", help="fail at once if the chips are not free")
    parser.add_argument(
        "-E",
        "--conflict-exit-code",
        type=exit_code,
        metavar="CODE",
        help="exit code when the chips are not to be had (default: 75)",
    )


def exit_code(text: str) -> int:
    """Read an exit code, 0 to 255."""
    if not text.isdecimal() or int(text) > 255:
        raise argparse.ArgumentTypeError(f"{text!r} is no exit code: 0 to 255 are possible")
    return int(text)


def chip_list(text: str) -> list[int]:
    """Read 0,1 or 0-3 or 0-3,8; what is wrong beyond the form is the daemon's to say."""
    chips: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        if not found:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of chips such as 0,1 or 0-3")
        chips.extend(range(int(found[1]), int(found[2] or found[1]) + 1))
    if not chips:
        raise argparse.ArgumentTypeError(f"{text!r} names no chip")
    return chips


def duration(text: str) -> float:
    """Read a time such as 90, 90s, 1h30m, 2d into seconds."""
    try:
        return read_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
