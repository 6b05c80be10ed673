"""What the doctor looks at: a host's files below a root, and what was asked of daemon, Docker and kernel before.

The areas read files through this and ask nothing themselves, so a tree of files and a few values are a host.
"""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from neurond.settings.sources import Finding as BadSetting
from neurond.settings.table import Settings

Severity = Literal["fine", "warning", "error", "unseen"]
LARGEST = 1 << 20


class Finding(NamedTuple):
    """One thing that was found, and what to do about it; `unseen` is what this user may not look at."""

    area: str
    severity: Severity
    sentence: str
    fix: str = ""


class Answer(NamedTuple):
    """What somebody answered, or why not; `refused` if this user may not ask."""

    content: Mapping[str, Any] | None
    trouble: str = ""
    refused: bool = False


NOTHING = Answer(None)


@dataclass(frozen=True)
class Host:
    """A host as one user sees it. `chips` is the root of the chips' sys and dev, another one if they are simulated."""

    root: Path = Path("/")
    chips: Path = Path("/")
    uid: int = 0
    user: str = "root"
    groups: frozenset[int] = frozenset()
    version: str = ""
    settings: Settings = field(default_factory=Settings)
    bad_settings: tuple[BadSetting, ...] = ()
    daemon: Answer = NOTHING
    docker: Answer = NOTHING
    synchronised: bool | None = None
    free: tuple[int, int] | None = None
    """Bytes and inodes that are free in the runtime directory."""

    @property
    def simulated(self) -> bool:
        """Whether the daemon simulates its chips."""
        return bool(self.daemon.content and self.daemon.content.get("simulated"))

    def path(self, path: str) -> Path:
        """Return where a path of the host is."""
        return self.root / path.lstrip("/")

    def text(self, path: str) -> str | None:
        """Return what a file holds, None if there is none. Raises OSError if it can't be read."""
        return read(self.path(path))

    def names(self, path: str) -> list[str]:
        """Return what is in a directory; nothing if there is none. Raises OSError if it can't be read."""
        try:
            return sorted(os.listdir(self.path(path)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def gid_of(self, group: str) -> int | None:
        """Return the number of a group in /etc/group."""
        entry = self.group_entry(group)
        return int(entry[2]) if entry else None

    def group_entry(self, group: str) -> list[str] | None:
        """Return the fields of a group in /etc/group: name, password, number, members."""
        for line in (self.text("/etc/group") or "").splitlines():
            fields = line.split(":")
            if len(fields) == 4 and fields[0] == group and fields[2].isdecimal():
                return fields
        return None

    def group_name(self, gid: int) -> str:
        """Return the name of a group by its number, or the number."""
        for line in (self.text("/etc/group") or "").splitlines():
            fields = line.split(":")
            if len(fields) == 4 and fields[2] == str(gid):
                return fields[0]
        return str(gid)


def read(path: Path) -> str | None:
    """Return what a regular file holds, None if there is none. Never waits for a pipe. Raises OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        return file.read(LARGEST).decode("utf-8", "replace")
