"""The daemon: whether it answers, its version, its socket, its unit and its settings."""

import stat
from collections.abc import Iterator

from neurond.cli.doctor.host import Finding, Host

AREA = "daemon"
UNITS = "/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"


def answers(host: Host) -> Iterator[Finding]:
    """Compare the version of the daemon with this command's."""
    daemon = host.daemon
    if daemon.refused:
        yield Finding(AREA, "unseen", f"the daemon: {daemon.trouble}", "run as root, or join the group of its socket")
    elif daemon.content is None:
        yield Finding(AREA, "error", daemon.trouble, "systemctl start neurond; journalctl -u neurond says why it ended")
    elif daemon.content["version"] != host.version:
        yield Finding(
            AREA,
            "warning",
            f"the daemon is version {daemon.content['version']}, this command {host.version}",
            "systemctl restart neurond (no lease ends by that)",
        )
    else:
        yield Finding(AREA, "fine", f"the daemon answers, version {host.version}")
    if daemon.content and daemon.content.get("journal_problem"):
        yield Finding(
            AREA, "error", str(daemon.content["journal_problem"]), "make room in the runtime directory; it goes on then"
        )


def socket(host: Host) -> Iterator[Finding]:
    """Say who may connect."""
    path = host.path(f"{host.settings.runtime_dir}/neurond.sock")
    try:
        status = path.lstat()
    except FileNotFoundError:
        return  # then no daemon answers, which is said already
    except PermissionError:
        yield Finding(AREA, "unseen", f"the socket {path}", "run as root")
        return
    if not stat.S_ISSOCK(status.st_mode):
        yield Finding(AREA, "error", f"{path} is not a socket", f"move {path} away, then systemctl restart neurond")
        return
    mode = stat.S_IMODE(status.st_mode)
    wanted = host.gid_of(host.settings.group)
    has = f"the socket is {mode:04o} with group {host.group_name(status.st_gid)}"
    if mode != 0o660:
        yield Finding(AREA, "warning", f"{has}; it should be 0660", f"chmod 0660 {path}; see SocketMode= of the unit")
    elif wanted is not None and status.st_gid != wanted:
        yield Finding(
            AREA, "warning", f"{has}; it should be {host.settings.group}'s", f"chgrp {host.settings.group} {path}"
        )
    elif status.st_uid not in {0, host.uid}:
        yield Finding(
            AREA, "warning", f"the socket belongs to user {status.st_uid}, not to root", "run neurond as root"
        )
    else:
        yield Finding(AREA, "fine", has)


def unit(host: Host) -> Iterator[Finding]:
    """Say whether the daemon starts at boot."""
    if host.simulated:
        return
    if not any(host.path(f"{directory}/neurond.service").exists() for directory in UNITS):
        yield Finding(
            AREA,
            "warning",
            "systemd has no neurond.service: the daemon does not start at boot",
            "install the package, or copy systemd/neurond.* to /etc/systemd/system and run systemctl daemon-reload",
        )
    elif not host.path("/etc/systemd/system/multi-user.target.wants/neurond.service").is_symlink():
        yield Finding(
            AREA, "warning", "neurond.service is not enabled", "systemctl enable --now neurond.socket neurond.service"
        )
    else:
        yield Finding(AREA, "fine", "neurond.service is enabled")


def settings(host: Host) -> Iterator[Finding]:
    """Say what is wrong in the files of settings."""
    for bad in host.bad_settings:
        yield Finding(AREA, "error", str(bad), "correct it, then neurond config --check, systemctl reload neurond")
    if not host.bad_settings:
        yield Finding(AREA, "fine", "nothing is wrong in the settings")


CHECKS = (answers, socket, unit, settings)
