"""The kinds of values that a key can have: how each is read, checked, written, and what is said to be possible."""

import json
import math
import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from neurond import catalog
from neurond.ledger.durations import read_duration, write_duration

LONGEST_SOCKET_PATH = 107
"""Bytes, without the final NUL (unix(7))."""
LONGEST_PATH, LONGEST_TEXT = 4095, 256
YES, NO = {"1", "yes", "true", "on"}, {"0", "no", "false", "off"}


class Bad(ValueError):
    """A value that can't be; the sentence says what is possible."""


class Kind:
    """A kind of value. This one is any text; the others say what else they are."""

    legal = "a text"
    metavar = "TEXT"
    choices: tuple[str, ...] | None = None

    def read(self, given: object) -> Any:
        """Check what a file of TOML holds, and return the value. Raises Bad."""
        if not isinstance(given, str):
            raise Bad(f"{self.legal} is possible, in quotes")
        return self.parse(given)

    def parse(self, text: str) -> Any:
        """Read what the command line or the environment holds. Raises Bad."""
        if len(text) > LONGEST_TEXT or not text.isprintable():
            raise Bad(f"a text of at most {LONGEST_TEXT} printable characters is possible")
        return text

    def write(self, value: Any) -> str:
        """Write a value as TOML has it."""
        return json.dumps(value, ensure_ascii=False)


class Choice(Kind):
    """One of a few words."""

    def __init__(self, *choices: str) -> None:
        self.choices = choices
        self.metavar = "{" + ",".join(choices) + "}"
        quoted = [json.dumps(choice) for choice in choices]
        self.legal = f"{', '.join(quoted[:-1])} or {quoted[-1]}"

    def parse(self, text: str) -> str:
        """Take a word that is there."""
        assert self.choices is not None  # noqa: S101 - tells mypy
        if text not in self.choices:
            raise Bad(f"{self.legal} is possible{did_you_mean(text, self.choices)}")
        return text


class Flag(Kind):
    """Yes or no."""

    legal = "true or false"
    metavar = "{yes,no}"

    def read(self, given: object) -> bool:
        """Take a truth value of TOML."""
        if not isinstance(given, bool):
            raise Bad("true or false is possible, without quotes")
        return given

    def parse(self, text: str) -> bool:
        """Read yes or no, in the forms that people use in the environment."""
        if text.lower() not in YES | NO:
            raise Bad("yes or no is possible")
        return text.lower() in YES


class InstanceType(Kind):
    """The name of an instance type of the catalog, or nothing."""

    metavar = "TYPE"
    legal = 'an instance type such as "trn1.32xlarge", or "" for none'

    def parse(self, text: str) -> str:
        """Take a name that the catalog knows."""
        if text and not catalog.look_up(text).known:
            raise Bad(f"choose one of {', '.join(catalog.names())}{did_you_mean(text, catalog.names())}")
        return text


class Address(Kind):
    """The address of a Docker Engine."""

    metavar = "URL"
    legal = 'an address such as "unix:///var/run/docker.sock"'

    def parse(self, text: str) -> str:
        """Take a URL."""
        scheme, there, rest = super().parse(text).partition("://")
        if not (scheme and there and rest):
            raise Bad("an address is of the form unix:///var/run/docker.sock")
        return text


class Group(Kind):
    """The name of a group of users, whether or not it is there now."""

    metavar = "GROUP"
    legal = "the name of a group"

    def parse(self, text: str) -> str:
        """Take what can be the name of a group."""
        if not text or len(text) > LONGEST_TEXT or not text.isprintable() or set(text) & set(" :,/"):
            raise Bad("the name of a group is possible, as getent group lists them")
        return text


class Directory(Kind):
    """An absolute path of a directory; `or_none` if it may be empty, for nowhere."""

    metavar = "DIR"

    def __init__(self, *, or_none: bool = False) -> None:
        self.or_none = or_none
        self.legal = "an absolute path" + (', or "" for nowhere' if or_none else "")

    def read(self, given: object) -> str:
        """Take an absolute path: a file has no directory that a relative one could be meant from."""
        if not isinstance(given, str) or not (given.startswith("/") or (self.or_none and not given)):
            raise Bad(f"{self.legal} is possible, in quotes")
        return self.parse(given)

    def parse(self, text: str) -> str:
        """Take a path, from the current directory if it is not absolute."""
        if not text and self.or_none:
            return text
        if not text or text == ".":
            raise Bad("give a directory of neurond's own, as /run/neurond")
        if len(os.fsencode(text)) > LONGEST_PATH or not text.isprintable():
            raise Bad("this is no path")
        return str(Path(text).absolute())


class RuntimeDirectory(Directory):
    """The directory that the socket is in."""

    def parse(self, text: str) -> str:
        """Take a path that leaves room for the name of the socket."""
        socket = f"{super().parse(text)}/neurond.sock"
        if len(os.fsencode(socket)) > LONGEST_SOCKET_PATH:
            raise Bad(
                f"the socket {socket} would have a path of {len(os.fsencode(socket))} bytes, "
                f"and {LONGEST_SOCKET_PATH} are possible"
            )
        return str(Path(socket).parent)


class Duration(Kind):
    """A time, in seconds or as a text such as "1h30m"; these are the shortest and the longest."""

    metavar = "DUR"

    def __init__(self, least: float, most: float) -> None:
        self.least, self.most = least, most
        self.legal = f'a time from "{write_duration(least)}" to "{write_duration(most)}"'

    def read(self, given: object) -> float:
        """Take a number of seconds, or a text."""
        if isinstance(given, str):
            return self.parse(given)
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise Bad(f"{self.legal} is possible, or a number of seconds")
        return self._within(given)

    def parse(self, text: str) -> float:
        """Read a text such as 30s, 1h30m or 90."""
        try:
            return self._within(read_duration(text))
        except Bad:
            raise
        except ValueError:
            raise Bad(f"{self.legal} is possible, such as 30s, 10m, 1h30m or 2d") from None

    def write(self, value: float) -> str:
        """Write it as a text."""
        return f'"{write_duration(value)}"'

    def _within(self, seconds: float) -> float:
        if math.isnan(seconds) or not self.least <= seconds <= self.most:
            raise Bad(f"{self.legal} is possible")
        return round(float(seconds), 3)


class Count(Kind):
    """A whole number; these are the least and the most."""

    metavar = "N"

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most
        self.legal = f"a whole number from {least} to {most}"

    def read(self, given: object) -> int:
        """Take a whole number."""
        if isinstance(given, bool) or not isinstance(given, int) or not self.least <= given <= self.most:
            raise Bad(f"{self.legal} is possible, without quotes")
        return given

    def parse(self, text: str) -> int:
        """Read digits."""
        if not (text.isascii() and text.isdecimal() and len(text) < 12) or not self.least <= int(text) <= self.most:
            raise Bad(f"{self.legal} is possible")
        return int(text)


def did_you_mean(text: str, possible: tuple[str, ...] | list[str]) -> str:
    """Return the end of a sentence that names what was probably meant, if anything is close to it."""
    close = get_close_matches(text.lower(), possible, 1)
    return f"; did you mean {close[0]}?" if close else ""
