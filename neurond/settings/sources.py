"""Settings from where they are set: the command line, else the environment, conf.d, the file, the default.

Whatever is wrong is found at once, in all files, and each finding names its place and what is possible.
"""

import json
import os
import pwd
import re
import shlex
import stat
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from neurond.settings.kinds import Bad, did_you_mean
from neurond.settings.table import DEFAULT_FILE, KEYS, Key, Settings

LARGEST_FILE = 64 << 10
LONGEST_SHOWN = 60
NO_FILE = Path("/dev/null")
COMMAND_LINE, ENVIRONMENT, DEFAULT = "command line", "environment", "default"
CONFIG = "NEUROND_SERVE_CONFIG"
"""The variable that names another file."""
CLOSING = re.compile(r"\"\"\"|'''|]")
"""What the last line of a statement of several lines has in it."""

UNQUOTED = "Invalid value", "Expected newline"
"""How tomllib's errors begin of a text that stands without quotes."""


class Finding(NamedTuple):
    """Something wrong, and where."""

    where: str
    sentence: str
    origin: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.sentence}"


class Read(NamedTuple):
    """What is set, where the value of each key comes from, what is wrong, and the files that were read.

    With findings, the settings are not to be used.
    """

    settings: Settings
    origins: dict[str, str]
    findings: list[Finding]
    files: list[str]


class Sources(NamedTuple):
    """Where settings come from. `file` need not be there, unless it was `asked` for; NO_FILE is none."""

    command_line: Mapping[str, str]
    environment: Mapping[str, str]
    file: Path = Path(DEFAULT_FILE)
    asked: bool = False

    def read(self) -> Read:
        """Read all of it; it may be another set of files each time."""
        reader = Reader()
        if self.asked or os.path.lexists(self.file):
            reader.read_file(self.file)
        for path in reader.snippets(self.file.parent / "conf.d") if self.file != NO_FILE else ():
            reader.read_file(path)
        for key in KEYS.values():
            text = self.environment.get(key.variable)
            if text:
                where = f"{key.variable}={_word(text)}"
                reader.take(key, key.kind.parse, text, where, f"{ENVIRONMENT} {key.variable}")
        for name, text in self.command_line.items():
            key = KEYS[name]
            where = f"{key.option} {_word(text)}"
            reader.take(key, key.kind.parse, text, where, f"{COMMAND_LINE} {key.option}")
        return reader.outcome()


def sources_of(file: str | None, command_line: Mapping[str, str], environment: Mapping[str, str]) -> Sources:
    """Return the sources, with the file that was asked for in the command line or the environment, if one was."""
    asked = file or environment.get(CONFIG)
    return Sources(command_line, environment, Path(asked or DEFAULT_FILE).absolute(), asked=bool(asked))


class Reader:
    """Collects values and findings; what is read later counts."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.findings: list[Finding] = []
        self._values: dict[str, Any] = {}
        self._origins: dict[str, str] = {}

    def outcome(self) -> Read:
        """Return what was found."""
        origins = {name: self._origins.get(name, DEFAULT) for name in KEYS}
        return Read(Settings(**self._values), origins, self.findings, self.files)

    def take(self, key: Key, read: Callable[[Any], Any], given: object, where: str, origin: str) -> None:
        """Read one value of a key."""
        try:
            self._values[key.name] = read(given)
            self._origins[key.name] = origin
        except Bad as bad:
            said = f"{key.name} = {_shown(given)}: {bad}" if where == origin else str(bad)
            self.findings.append(Finding(where, said, origin.partition(" --")[0]))

    def snippets(self, directory: Path) -> list[Path]:
        """Return the files of conf.d by name; a directory that is not there has none."""
        try:
            found = [path for path in directory.iterdir() if path.name.endswith(".toml") and path.name[0] != "."]
            why = _not_ours(directory.stat())
        except FileNotFoundError:
            return []
        except OSError as error:
            self.findings.append(Finding(str(directory), f"cannot be read: {error.strerror}"))
            return []
        if why:
            self.findings.append(Finding(str(directory), why))
        return sorted(found)

    def read_file(self, path: Path) -> None:
        """Read one file."""
        self.files.append(str(path))
        text = ""
        try:
            text = _text_of(path)
            data = tomllib.loads(text)
        except _Refused as refused:
            self.findings.append(refused.finding)
        except tomllib.TOMLDecodeError as error:
            self.findings.append(_no_toml(path, text, str(error)))
        except (ValueError, RecursionError):  # a number or a nesting beyond what Python reads
            self.findings.append(Finding(str(path), "has a number or a nesting that is too large to be meant"))
        else:
            lines = lines_of(text)
            for name, given in data.items():
                where = f"{path}:{lines.get(name, 1)}"
                if name in KEYS:
                    self.take(KEYS[name], KEYS[name].kind.read, given, where, where)
                else:
                    self.findings.append(Finding(where, _unknown(name, given)))


def lines_of(text: str) -> dict[str, int]:
    """Return the number of the line where each key at the top begins, of a text that is TOML.

    tomllib does not tell. But the lines of one statement are TOML by themselves, and fewer of them are not.
    """
    found: dict[str, int] = {}
    statement, begin, in_table = "", 1, False
    for number, line in enumerate(text.split("\n"), 1):
        goes_on = bool(statement)
        statement += line + "\n"
        if goes_on and not CLOSING.search(line):
            continue
        try:
            data = tomllib.loads(statement)
        except ValueError:
            continue  # it goes on in the next line
        is_header = statement.lstrip().startswith("[")
        in_table |= is_header
        if is_header or not in_table:
            for name in data:
                found.setdefault(name, begin)
        statement, begin = "", number + 1
    return found


class _Refused(Exception):
    """A file that is not read any further."""

    def __init__(self, where: str, sentence: str) -> None:
        super().__init__(sentence)
        self.finding = Finding(where, sentence)


def _text_of(path: Path) -> str:
    """Return what a file holds, if it is one that may be trusted."""
    if path == NO_FILE:
        return ""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)  # a pipe would have us wait
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise _Refused(str(path), "is not a file")
            why = _not_ours(status)
            if why:
                raise _Refused(str(path), why)
            data = file.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "this is no path"
        raise _Refused(str(path), f"cannot be read: {reason}") from None
    if len(data) > LARGEST_FILE:
        raise _Refused(str(path), f"is larger than {LARGEST_FILE >> 10} KiB, and surely not meant")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _Refused(f"{path}:{line}", "is no UTF-8 text") from None


def _not_ours(status: os.stat_result) -> str:
    """Return why root's daemon must not believe a file or a directory, "" if it may: others could make it do things."""
    if os.geteuid() != 0:
        return ""
    if status.st_uid != 0:
        return f"belongs to {_user(status.st_uid)}, and root only takes settings from root: chown root"
    if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and status.st_gid != 0):
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        return f"can be written by others (mode {mode}), and root only takes settings from root: chmod go-w"
    return ""


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _no_toml(path: Path, text: str, error: str) -> Finding:
    found = re.search(r"^(.*) \(at (?:line (\d+), column \d+|end of document)\)$", error, re.DOTALL)
    if found is None:
        return Finding(str(path), f"is no TOML: {error}")
    line = found[2] or text.rstrip().count("\n") + 1
    hint = ' (a text stands in quotes, as in log_level = "info")' if found[1].startswith(UNQUOTED) else ""
    return Finding(f"{path}:{line}", f"is no TOML: {found[1][:1].lower()}{found[1][1:]}{hint}")


def _unknown(name: str, given: object) -> str:
    """Say that there is no such key, and which was probably meant."""
    names = list(KEYS)
    if isinstance(given, dict | list):
        inner = given if isinstance(given, dict) else {}
        meant = did_you_mean(f"{name}_{next(iter(inner), '')}".strip("_"), names)
        return f'there is no table {_shown(name)}: keys stand by themselves, as in stuck_after = "30s"{meant}'
    close = did_you_mean(name.replace("-", "_"), names)
    return f"there is no key {_shown(name)}{close}" + ("" if close else f"; possible are {', '.join(names)}")


def _shown(given: object) -> str:
    """Write a value as it stands in a file, shortened."""
    try:
        text = json.dumps(given, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):  # more digits than Python writes
        return "a number of very many digits"
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."


def _word(text: str) -> str:
    """Write a word as one would write it for a shell, shortened."""
    return shlex.quote(text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "...")
