"""What a check finds, and the host that it looks at: files below a root, two sockets, and who is asking.

Nothing here opens a chip, and nothing waits longer than PATIENCE: doctor is for hosts on which things hang.
"""

import errno
import grp
import json
import os
import socket
import time
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from neurond.settings.table import Settings

PATIENCE = 2.0
"""Seconds that the daemon or the Engine may take for one answer."""
MOST = 16 << 20
"""Bytes of an answer that are read."""
DEFAULTS = Settings()
FINE, UNSEEN, WARNING, ERROR = "fine", "unseen", "warning", "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of doctor: `severity` is fine, unseen, warning or error; `fix` is empty where there is nothing to do."""

    area: str
    severity: str
    text: str
    fix: str = ""


class Failed(ValueError):
    """The Engine's answer to a call is that it can't."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host as one user sees it. `root` stands for /, `daemon` and `docker` are paths of sockets.

    `settings` are those in force, as far as can be known, and `files` where they were read. `wrong` is what is wrong in
    them, `unread` what the user may not read, `pending` what was set and waits for a restart.
    """

    root: Path
    daemon: Path
    docker: Path
    user: str
    uid: int
    gids: frozenset[int]
    settings: Settings = DEFAULTS
    files: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()

    def path(self, path: str) -> Path:
        """Return where a path of the host lies."""
        return self.root / path.lstrip("/")

    def text(self, path: str) -> str | None:
        """Return a file's text without blanks around it, None if there is none. Raises PermissionError."""
        try:
            return self.path(path).read_text("utf-8", "replace").strip()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ProcessLookupError):
            return None

    def names(self, path: str) -> list[str]:
        """Return the names in a directory, sorted; none if it is not there. Raises PermissionError."""
        try:
            return sorted(os.listdir(self.path(path)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def commands(self) -> dict[int, str]:
        """Return the short names (at most 15 letters) of all processes by pid.

        Raises PermissionError where /proc hides those of others (hidepid), as it does if even process 1 is missing.
        """
        pids = [int(name) for name in self.names("/proc") if name.isdecimal()]
        if 1 not in pids:
            raise PermissionError(errno.EACCES, "processes of others are hidden", "/proc")
        return {pid: self.text(f"/proc/{pid}/comm") or "" for pid in pids}

    def group(self, name: str) -> tuple[int, list[str]] | None:
        """Return the number and members of a group in /etc/group, and of this host in whatever else it asks (LDAP)."""
        if self.root == Path("/"):
            try:
                found = grp.getgrnam(name)
            except KeyError:
                return None
            return found.gr_gid, found.gr_mem
        for line in (self.text("/etc/group") or "").splitlines():
            parts = line.split(":")
            if len(parts) == 4 and parts[0] == name and parts[2].isdecimal():
                return int(parts[2]), [member for member in parts[3].split(",") if member]
        return None

    def ask(self, method: str) -> dict[str, Any]:
        """Call a method of the daemon without parameters. Raises OSError, TimeoutError among them, or ValueError."""
        deadline = time.monotonic() + PATIENCE
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE)
            connection.connect(str(self.daemon))
            connection.sendall(json.dumps({"method": f"io.neurond.{method}"}).encode() + b"\0")
            answer = b""
            while not answer.endswith(b"\0"):
                if time.monotonic() > deadline or len(answer) > MOST:
                    raise TimeoutError("no whole answer in time")
                data = connection.recv(1 << 16)
                if not data:
                    raise ConnectionResetError("it closed the connection")
                answer += data
        reply = _read_json(answer[:-1])
        if isinstance(reply, dict) and "error" in reply:
            raise ValueError(str(reply["error"]))
        try:
            return dict(reply["parameters"])
        except (LookupError, TypeError):
            raise ValueError("its answer is not neurond's") from None

    def engine(self, path: str) -> Any:
        """GET something of the Docker Engine. Raises OSError, TimeoutError among them, Failed or another ValueError."""
        connection = HTTPConnection("localhost", timeout=PATIENCE)
        connection.sock = socket.socket(socket.AF_UNIX)
        try:
            connection.sock.settimeout(PATIENCE)
            connection.sock.connect(str(self.docker))
            connection.request("GET", path)
            response = connection.getresponse()
            answer = _read_json(response.read(MOST))
        except HTTPException as error:
            raise ValueError(f"no HTTP answer: {error!r}") from None
        finally:
            connection.close()
        if response.status != HTTPStatus.OK:
            said = answer.get("message") if isinstance(answer, dict) else None
            raise Failed(f"{path} failed ({response.status}): {said or response.reason}")
        return answer


def _read_json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("its answer is nested too deeply") from None
