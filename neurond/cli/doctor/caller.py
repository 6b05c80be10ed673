"""Whether the one who asks may lease chips and start containers."""

from collections.abc import Iterator

from neurond.cli.doctor.host import Finding, Host

AREA = "caller"


def groups(host: Host) -> Iterator[Finding]:
    """Look for the groups of the settings, in /etc/group and in this session."""
    for group, what in ((host.settings.group, "lease chips"), (host.settings.container_group, "start containers")):
        if not group:
            continue
        entry = host.group_entry(group)
        if entry is None:
            if group == host.settings.group:
                yield Finding(
                    AREA,
                    "warning",
                    f"/etc/group has no group {group}: without it only root may {what}",
                    f"groupadd --system {group}, then restart neurond",
                )
        elif host.uid == 0:
            yield Finding(AREA, "fine", f"root may {what}; so may members of {group}")
        elif int(entry[2]) in host.groups:
            yield Finding(AREA, "fine", f"{host.user} is in the group {group} and may {what}")
        elif host.user in entry[3].split(","):
            yield Finding(
                AREA,
                "warning",
                f"{host.user} was added to the group {group}, but this session began before that",
                f"log in again, or newgrp {group}",
            )
        else:
            yield Finding(
                AREA,
                "warning",
                f"{host.user} is not in the group {group} and may not {what}",
                f"as root: usermod -aG {group} {host.user}; then log in again",
            )


CHECKS = (groups,)
