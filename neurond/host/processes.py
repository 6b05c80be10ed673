"""Processes: who a pid is, when it ends, and which processes have a chip open. The only import of psutil."""

import errno
import math
import os
import pwd
import re
import stat
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import psutil

from neurond.ledger.words import printable

Device = tuple[int, int]
"""Major and minor number."""


@dataclass(frozen=True, slots=True)
class Uses:
    """Who has devices open or mapped: pids by device. What `unreadable` processes do could not be seen."""

    pids: dict[Device, list[int]]
    unreadable: list[int]


THREADS, START = 16, 18
"""Where in /proc/PID/stat, counted from behind the state, the number of threads and the start time are (proc(5))."""


class ProcessGone(Exception):
    """No such process, or it has already ended."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process as people see it."""

    pid: int
    uid: int
    user: str
    command: str


def boot_id() -> str:
    """Return the kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


def boottime() -> float:
    """Return seconds since boot, suspend included; nobody can set this clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def start_ticks(pid: int) -> int:
    """Return the start time of a process, in clock ticks since boot (field 22 of /proc/PID/stat, proc(5)).

    Raises ProcessGone if there is none, or if it is a zombie.
    """
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, OverflowError):
        raise ProcessGone(f"no process {pid}") from None
    state, *fields = line[line.rindex(b")") + 2 :].split()
    alone = int(fields[THREADS]) <= 1  # the first thread may have ended while others go on
    if state in b"ZXx" and alone:
        raise ProcessGone(f"process {pid} has already ended")
    return int(fields[START])


def age(pid: int) -> float:
    """Return how long ago a process was started, in seconds; infinite if it is gone."""
    try:
        return boottime() - start_ticks(pid) / os.sysconf("SC_CLK_TCK")
    except ProcessGone:
        return math.inf


def open_pidfd(pid: int, ticks: int) -> int:
    """Return a pidfd, readable when the process ends, even if nobody waits for it.

    Raises ProcessGone if the process is not the one that started at `ticks`.
    """
    try:
        fd = os.pidfd_open(pid)
    except OSError as error:
        if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM}:
            raise
        raise ProcessGone(f"no process {pid}") from None  # gone, or the id of a thread
    except OverflowError:
        raise ProcessGone(f"no process {pid}") from None
    try:
        if start_ticks(pid) == ticks:
            return fd
    except ProcessGone:
        pass
    except OSError:
        os.close(fd)
        raise
    os.close(fd)
    raise ProcessGone(f"process {pid} has ended")


def owner_of(pid: int) -> int:
    """Return the real uid of a process; raises ProcessGone."""
    try:
        return int(psutil.Process(pid).uids().real)
    except psutil.NoSuchProcess:
        raise ProcessGone(f"no process {pid}") from None


@lru_cache(maxsize=1024)
def user_name(uid: int) -> str:
    """Return the name of a user, or the uid in digits where there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def describe(pid: int) -> Process | None:
    """Return what people want to know of a process; None if it is gone."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            command = " ".join(process.cmdline()) or f"[{process.name()}]"
            uid = int(process.uids().real)
            return Process(pid, uid, user_name(uid), printable(command))
    except psutil.Error:
        return None


def users_of(devices: Collection[Device]) -> Uses:
    """Find the processes that have these character devices open or mapped, by looking through all of /proc.

    The numbers of the device count, not the path: a container has a node of its own, perhaps under another name. A
    descriptor opened for writing only is a status tool's, which the driver does not attach, and is not counted.
    """
    found: dict[Device, list[int]] = {}
    unreadable: list[int] = []
    for pid in _all_pids():
        try:
            own = _open_devices(pid, devices) | _mapped_devices(pid, devices)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        except OSError:  # no right to, or no descriptor left to look with
            unreadable.append(pid)
        else:
            for device in own:
                found.setdefault(device, []).append(pid)
    return Uses(found, unreadable)


def can_look_into_all() -> bool:
    """Tell whether we have the right to see what every process has open or mapped; process 1 stands for all."""
    try:
        os.readlink("/proc/1/exe")  # noqa: PTH115 - whether it can be read is asked
    except OSError:  # no right to, or /proc hides it (hidepid)
        return False
    return True


def _all_pids() -> Iterator[int]:
    """Yield all processes, also those that were started meanwhile: a parent may end before it is looked at."""
    seen: set[int] = set()
    for _ in range(MOST_ROUNDS):
        fresh = [pid for pid in psutil.pids() if pid not in seen]
        seen.update(fresh)
        yield from fresh
        if not fresh:
            return


def _open_devices(pid: int, devices: Collection[Device]) -> set[Device]:
    fds = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208 - names are wanted
    if fds:
        return _devices_behind(f"/proc/{pid}", fds, devices)
    found: set[Device] = set()  # a process whose first thread has ended shows none, but its other threads do
    for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
        with suppress(FileNotFoundError, ProcessLookupError):
            at = f"/proc/{pid}/task/{thread}"
            found |= _devices_behind(at, os.listdir(at + "/fd"), devices)  # noqa: PTH208
    return found


def _devices_behind(at: str, fds: Iterable[str], devices: Collection[Device]) -> set[Device]:
    found: set[Device] = set()
    for fd in fds:
        try:
            device = _device(f"{at}/fd/{fd}")
        except PermissionError:
            raise
        except OSError:
            continue  # closed meanwhile, or a file on a server that is gone
        if device is not None and device in devices and _attaches(f"{at}/fdinfo/{fd}"):
            found.add(device)
    return found


def _device(path: str) -> Device | None:
    """Return the numbers of what a link of /proc leads to, None if that is no character device.

    Raises PermissionError if it is the process that can't be looked into, and not its file, as on somebody's FUSE.
    """
    try:
        status = os.stat(path)  # noqa: PTH116 - thousands of these; a Path each is too slow
    except PermissionError:
        os.readlink(path)  # noqa: PTH115 - denied as well if it is the process
        return None
    if not stat.S_ISCHR(status.st_mode):
        return None
    return os.major(status.st_rdev), os.minor(status.st_rdev)


def _attaches(fdinfo: str) -> bool:
    """Tell from /proc/PID/fdinfo whether a descriptor uses the device; what can't be read counts as in use.

    Opened for writing only it is a status tool's, which the driver does not attach; O_PATH opens nothing.
    """
    try:
        text = Path(fdinfo).read_text("ascii")
    except OSError:
        return True
    found = re.search(r"^flags:\s*([0-7]+)$", text, re.MULTILINE)
    flags = int(found[1], 8) if found else os.O_RDWR
    return not flags & os.O_PATH and flags & os.O_ACCMODE != os.O_WRONLY


MOST_ROUNDS = 10
_plain_files: set[tuple[str, str]] = set()
"""Files on disks that are mapped and no device, by the file system and inode that /proc/PID/maps shows."""
MOST_PLAIN_FILES = 100_000


def _mapped_devices(pid: int, devices: Collection[Device]) -> set[Device]:
    """Find devices that are mapped only, their descriptors closed; needs the right to look into map_files."""
    found: set[Device] = set()
    if len(_plain_files) > MOST_PLAIN_FILES:
        _plain_files.clear()
    # The kernel escapes line feeds in names and nothing else, so lines are split at those and nowhere else.
    for line in Path(f"/proc/{pid}/maps").read_bytes().split(b"\n"):
        area, _, _, where, inode, *name = (*line.decode("ascii", "replace").split(" ", 5), "", "", "", "", "")[:6]
        if inode in {"0", ""} or not name:
            continue
        if (where, inode) in _plain_files:
            continue
        with suppress(FileNotFoundError, ProcessLookupError):  # without the right to look, PermissionError says so
            device = _device(f"/proc/{pid}/map_files/{area}")
            if device is not None and device in devices:
                found.add(device)
            elif device is None and not where.startswith("00:"):  # those of no disk come and go
                _plain_files.add((where, inode))
    return found


def ancestors(pid: int) -> Iterator[int]:
    """Yield a process and those it descends from, as far as they live."""
    seen = set()
    while pid > 1 and pid not in seen:
        seen.add(pid)
        yield pid
        try:
            line = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            return
        pid = int(line[line.rindex(b")") + 2 :].split()[1])


def environment_value(pid: int, name: str) -> str | None:
    """Return a variable of the environment that a process was started with, None if it can't be known."""
    prefix = name.encode() + b"="
    try:
        content = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    value = next((item for item in content.split(b"\0") if item.startswith(prefix)), None)
    return value[len(prefix) :].decode("utf-8", "replace") if value is not None else None


def container_of(pid: int) -> str | None:
    """Return the id of the container that a process runs in, by its control groups; None outside of one."""
    try:
        content = Path(f"/proc/{pid}/cgroup").read_text("utf-8", "replace")
    except OSError:
        return None
    found = re.search(r"(?:docker[-/]|libpod-|cri-containerd-)([0-9a-f]{64})", content)
    return found[1] if found else None
