"""The daemon, its socket and directory, and whether the caller may use it."""

import json
import os
import re
import stat
from collections.abc import Iterable

from neurond import __version__
from neurond.cli.doctor.findings import ERROR, FINE, UNSEEN, WARNING, Finding, Host

LEAST_SPACE = 16 << 20
LEAST_INODES = 1000
JOURNAL = 1
"""The format of the journal that neurond.host.journal writes; importing that would be slow."""


def daemon(host: Host) -> Iterable[Finding]:
    """Tell whether the daemon answers, and whether it is as old as this command."""
    try:
        about = host.ask("Describe")
    except PermissionError:
        yield Finding(
            "daemon", UNSEEN, f"not seen: the daemon, as {host.user} may not open {host.daemon}", "run as root"
        )
    except TimeoutError:
        fix = "systemctl restart neurond ends no lease; journalctl -u neurond tells what it did last"
        yield Finding("daemon", ERROR, f"the daemon at {host.daemon} took the call and does not answer", fix)
    except (OSError, ValueError) as error:
        text = f"the daemon does not answer at {host.daemon}: {getattr(error, 'strerror', None) or error}"
        units = "neurond.socket neurond.service"
        fix = f"systemctl enable {units}; systemctl restart {units} (no lease ends by that)"
        yield Finding("daemon", ERROR, text, fix)
    else:
        if about.get("version") == __version__:
            yield Finding("daemon", FINE, f"the daemon answers, version {__version__}")
        else:
            text = f"the daemon has version {about.get('version', 'unknown')}, this command {__version__}"
            yield Finding("daemon", WARNING, text, "systemctl restart neurond (no lease ends by that)")
        if about.get("journal_problem"):
            yield Finding("daemon", ERROR, f"nothing is granted: {about['journal_problem']}", "make room on its disk")


def settings(host: Host) -> Iterable[Finding]:
    """Tell whether the files of settings are right, and in force."""
    for wrong in host.wrong:
        fix = "correct it until neurond config --check is content, then: systemctl reload-or-restart neurond"
        yield Finding("settings", ERROR, wrong, fix)
    for unread in host.unread:
        yield Finding("settings", UNSEEN, f"not seen: {unread}", "run as root")
    if host.pending:
        text = f"set, but not in force before the next start: {', '.join(host.pending)}"
        yield Finding("settings", WARNING, text, "systemctl restart neurond (no lease ends by that)")
    if not host.wrong and not host.unread and not host.pending:
        text = f"nothing is wrong in {', '.join(host.files)}" if host.files else "there is no file of settings"
        yield Finding("settings", FINE, text)


def membership(host: Host) -> Iterable[Finding]:
    """Tell whether the caller may lease chips."""
    name = host.settings.group
    group = host.group(name)
    if _own(host):
        yield Finding("group", FINE, f"{host.user} runs this daemon, and may lease chips of it")
    elif group is None:
        text = f"there is no group {name}, so only root can lease chips"
        yield Finding("group", WARNING, text, f"groupadd --system {name}; systemctl reload neurond")
    elif host.uid == 0 or group[0] in host.gids:
        yield Finding("group", FINE, f"{host.user} may lease chips")
    elif host.user in group[1]:
        text = f"{host.user} was added to group {name}, but this session began before"
        yield Finding("group", WARNING, text, f"log in again, or: newgrp {name}")
    else:
        fix = f"usermod -aG {name} {host.user} as root, then log in again"
        yield Finding("group", WARNING, f"{host.user} is not in group {name} and may not lease chips", fix)


def socket_rights(host: Host) -> Iterable[Finding]:
    """Compare the socket's owner, group and mode with root, those who may lease, and 0660."""
    try:
        found = host.daemon.stat()
    except FileNotFoundError:
        return
    name = host.settings.group
    group = host.group(name)
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid not in {0, host.uid}:
        text = f"{host.daemon} belongs to user {found.st_uid}, who may answer there as he likes"
        fix = f"see who serves it (ss -xlp src {host.daemon}); then systemctl restart neurond.socket neurond"
        yield Finding("socket", ERROR, text, fix)
    if _own(host) and not mode & 0o007:
        yield Finding("socket", FINE, f"{host.daemon} has mode {mode:04o}, and is of a daemon of your own")
        return
    if mode & 0o007:
        yield Finding(
            "socket", ERROR, f"{host.daemon} has mode {mode:04o}: anybody can call", f"chmod 0660 {host.daemon}"
        )
    elif group is not None and found.st_gid != group[0]:
        text = f"{host.daemon} belongs to group {found.st_gid}, so members of {name} can't call"
        yield Finding("socket", WARNING, text, f"chgrp {name} {host.daemon}")
    elif mode & 0o060 != 0o060:
        text = f"{host.daemon} has mode {mode:04o}, so members of {name} can't call"
        yield Finding("socket", WARNING, text, f"chmod 0660 {host.daemon}")
    else:
        whose = name if group is not None else str(found.st_gid)
        yield Finding("socket", FINE, f"{host.daemon} has mode {mode:04o}, group {whose}")


def _own(host: Host) -> bool:
    """Tell whether the caller is an ordinary user who runs this daemon himself."""
    try:
        return host.uid != 0 and host.daemon.stat().st_uid == host.uid
    except OSError:
        return False


def unit(host: Host) -> Iterable[Finding]:
    """Tell whether the service begins at boot."""
    if host.path("/run/systemd/system").is_dir():
        if os.path.lexists(host.path("/etc/systemd/system/multi-user.target.wants/neurond.service")):
            yield Finding("unit", FINE, "neurond.service is enabled")
        else:
            text = "neurond.service is not enabled: nobody watches the chips after the next boot"
            yield Finding("unit", WARNING, text, "systemctl enable neurond.socket neurond.service")


def room(host: Host) -> Iterable[Finding]:
    """Tell whether the journal of leases has room to grow."""
    directory = host.daemon.parent
    try:
        have = os.statvfs(directory)
    except FileNotFoundError:
        return
    space = have.f_bavail * have.f_frsize
    fix = f"see what fills it: du -xh --max-depth=2 {directory.parent} | sort -h; df -i {directory}"
    if space < LEAST_SPACE:
        yield Finding("disk", ERROR, f"{directory} has {space >> 10} KiB left: soon nothing can be granted", fix)
    elif have.f_files and have.f_favail < LEAST_INODES:
        yield Finding("disk", ERROR, f"{directory} has {have.f_favail} inodes left: soon nothing can be granted", fix)
    else:
        yield Finding("disk", FINE, f"{directory} has {space >> 20} MiB left")


def journal(host: Host) -> Iterable[Finding]:
    """Tell whether the journal of leases is of this boot, and whether older ones were kept aside."""
    directory = host.daemon.parent
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return
    aside = [name for name in names if re.fullmatch(r"journal\.\d{8}T\d{6}\..*", name)]
    if aside:
        text = f"a damaged or foreign journal was kept aside: {', '.join(aside)}"
        yield Finding("journal", WARNING, text, f"look at it, then remove it: rm {directory / aside[0]}")
    if "journal" not in names:
        return
    with open(directory / "journal", "rb") as file:
        line = file.readline(1 << 16)
    try:
        header = json.loads(line[9:])  # after its checksum and a blank
        version, boot = header["journal"], header["boot"]
    except (KeyError, TypeError, ValueError):
        yield Finding("journal", ERROR, f"{directory}/journal is not neurond's", "restart neurond: it keeps it aside")
        return
    if version != JOURNAL:
        text = f"{directory}/journal has format {version}, this version reads {JOURNAL}"
        yield Finding("journal", ERROR, text, "install the version of neurond that wrote it, or end its leases first")
    elif boot != host.text("/proc/sys/kernel/random/boot_id"):
        text = f"{directory}/journal is of another boot: all its leases are void"
        yield Finding("journal", WARNING, text, "start neurond: it begins a new one")
    else:
        yield Finding("journal", FINE, f"{directory}/journal is of this boot")


def clock(host: Host) -> Iterable[Finding]:
    """Tell whether something keeps the clock, by the files that systemd-timesyncd and chronyd leave."""
    if host.path("/run/systemd/timesync/synchronized").exists():
        yield Finding("clock", FINE, "the clock is synchronised by systemd-timesyncd")
    elif {"chronyd", "ntpd"} & set(host.commands().values()):
        yield Finding(
            "clock", UNSEEN, "not seen: whether chronyd or ntpd, which runs, has the time", "chronyc tracking"
        )
    else:
        text = "nothing seems to keep the clock: times in the log and of other hosts will differ"
        yield Finding("clock", WARNING, text, "install chrony, or: timedatectl set-ntp true")
