"""Processes: who a pid is, when it ends, and which processes have a chip open. The only import of psutil."""

import os
import pwd
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import psutil

Device = tuple[int, int]
"""Major and minor number."""


class ProcessGone(Exception):
    """No such process, or it has already ended."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process as people see it."""

    pid: int
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
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, OverflowError):
        raise ProcessGone(f"no process {pid}") from None
    state, *fields = stat[stat.rindex(b")") + 2 :].split()
    if state in b"ZXx":
        raise ProcessGone(f"process {pid} has already ended")
    return int(fields[18])


def open_pidfd(pid: int, ticks: int) -> int:
    """Return a pidfd, readable when the process ends, even if nobody waits for it.

    Raises ProcessGone if the process is not the one that started at `ticks`.
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise ProcessGone(f"no process {pid}") from None
    with suppress(ProcessGone):
        if start_ticks(pid) == ticks:
            return fd
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
            return Process(pid, user_name(process.uids().real), command)
    except psutil.Error:
        return None


def users_of(devices: Collection[Device]) -> dict[Device, list[int]]:
    """Return the pids that have these character devices open, by looking through all of /proc.

    The numbers of the device count, not the path: a container has a node of its own, perhaps under another name.
    A process that can't be looked into (the daemon is not root) is passed over.
    """
    found: dict[Device, list[int]] = {}
    for pid in psutil.pids():
        try:
            with os.scandir(f"/proc/{pid}/fd") as entries:
                names = [entry.path for entry in entries]
        except OSError:
            continue
        for name in names:
            try:
                number = os.stat(name).st_rdev  # noqa: PTH116 - thousands of these; a Path each is too slow
            except OSError:
                continue
            device = os.major(number), os.minor(number)
            if number and device in devices and pid not in found.setdefault(device, []):
                found[device].append(pid)
    return found
