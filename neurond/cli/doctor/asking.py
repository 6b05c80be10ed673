"""Asking those who may not answer: the daemon, Docker and the kernel, each within a few seconds."""

import ctypes
import getpass
import http.client
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from neurond import __version__
from neurond.cli.doctor.host import Answer, Host
from neurond.client import Client, NeurondError, ShutOut, Unreachable
from neurond.settings.sources import sources_of

PATIENCE = 5.0
"""Seconds for all that is asked of one."""
LARGEST = 8 << 20
MOST_CONTAINERS = 200
STA_UNSYNC = 0x40


def within(seconds: float, work: Callable[[], Answer], silent: str) -> Answer:
    """Return what `work` returns, or that there was no answer in time; it is then left behind, to end with us."""
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else Answer(None, silent)


def ask_daemon(where: str, seconds: float = PATIENCE) -> Answer:
    """Ask the daemon what it is, for its settings, and how many leases have names as devices."""

    def work() -> Answer:
        try:
            with Client(where) as client:
                about = client.call("Describe")
                named = len(client.call("ListNames")["names"])
                try:
                    rows = client.call("ListSettings")["settings"]
                except NeurondError:
                    rows = []  # it is older than this command
        except (Unreachable, NeurondError, ValueError) as error:
            return Answer(None, str(error), refused=isinstance(error, ShutOut))
        return Answer({**about, "named": named, "settings": {row["key"]: row["value"] for row in rows}})

    return within(seconds, work, f"neurond does not answer at {_path(where)}: it was silent for {seconds:g} s")


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str, seconds: float) -> None:
        super().__init__("localhost", timeout=seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def ask_docker(where: str, seconds: float = PATIENCE) -> Answer:
    """Ask Docker for its version, its info and its running containers, as inspect shows them."""
    path = _path(where)
    if not path:
        return Answer(None, f"{where} is not a Unix socket, and only those are asked")

    def get(what: str) -> Any:
        connection = _Connection(path, seconds + 1)  # `within` has the say
        try:
            connection.request("GET", what)
            response = connection.getresponse()
            content = json.loads(response.read(LARGEST))
        finally:
            connection.close()
        if response.status != http.client.OK:
            raise ValueError(f"{what}: status {response.status}")
        return content

    def inspect(name: str) -> Mapping[str, Any]:
        try:
            return dict(get(f"/containers/{name}/json"))
        except ValueError:
            return {}  # it has ended meanwhile

    def work() -> Answer:
        try:
            names = [str(one["Id"]) for one in get("/containers/json")][:MOST_CONTAINERS]
            content = {"version": get("/version"), "info": get("/info"), "containers": list(map(inspect, names))}
        except PermissionError:
            return Answer(None, f"its socket {path} may not be opened", refused=True)
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            return Answer(None, f"{path}: {error}")
        return Answer(content)

    return within(seconds, work, f"{path}: silent for {seconds:g} s")


def synchronised() -> bool | None:
    """Return whether the kernel's clock follows another, None if it won't say; adjtimex(2) of no mode only reads."""
    buffer = (ctypes.c_int * 128)()  # struct timex: modes, offset, freq, maxerror, esterror, status: longs but for two
    if ctypes.CDLL(None).adjtimex(ctypes.byref(buffer)) < 0:
        return None
    status = ctypes.c_int.from_buffer(buffer, ctypes.sizeof(ctypes.c_long) * 5)
    return not status.value & STA_UNSYNC


def look(config: str | None, where: str | None) -> Host:
    """Ask everybody, and return this host."""
    read = sources_of(config, {}, os.environ).read()
    settings = read.settings
    given = where or os.environ.get("NEUROND_HOST")
    daemon = ask_daemon(given or f"unix://{settings.runtime_dir}/neurond.sock")
    theirs = daemon.content["settings"] if daemon.content else {}
    known = {
        key: theirs[key] for key in ("runtime_dir", "docker", "cdi_dir", "group", "container_group") if key in theirs
    }
    settings = replace(settings, **known)
    if given and not known and _path(given).endswith("/neurond.sock"):
        settings = replace(settings, runtime_dir=os.path.dirname(_path(given)))
    simulated = bool(daemon.content and daemon.content.get("simulated"))
    return Host(
        chips=Path(settings.runtime_dir) / "sim" if simulated else Path("/"),
        uid=os.geteuid(),
        user=_user(),
        groups=frozenset({os.getegid(), *os.getgroups()}),
        version=__version__,
        settings=settings,
        bad_settings=tuple(read.findings),
        daemon=daemon,
        docker=ask_docker(settings.docker),
        synchronised=synchronised(),
        free=_free(settings.runtime_dir),
    )


def _path(where: str) -> str:
    if where.startswith("/"):
        return where
    return where.removeprefix("unix://").removeprefix("unix:") if where.startswith("unix:") else ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())


def _free(directory: str) -> tuple[int, int] | None:
    try:
        status = os.statvfs(directory)
    except OSError:
        return None
    inodes = status.f_favail if status.f_files else 1 << 31  # some file systems do not count them
    return status.f_bavail * status.f_frsize, inodes
