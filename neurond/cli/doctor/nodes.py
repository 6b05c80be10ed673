"""The nodes of the chips: who may open them, and which udev rule says so. No node is ever opened."""

import stat
from collections.abc import Iterator

from neurond.cli.doctor import udevrules
from neurond.cli.doctor.chips import indices
from neurond.cli.doctor.host import Finding, Host
from neurond.ledger.words import ranges

AREA = "nodes"
TRIGGER = "udevadm control --reload && udevadm trigger --subsystem-match=neuron_device"
FINAL = 'SUBSYSTEM=="neuron_device", KERNEL=="neuron[0-9]*", GROUP:="neuron", MODE:="0660"'


def rules(host: Host) -> Iterator[Finding]:
    """Say which rule wins, and which stricter one loses to it."""
    if host.simulated:
        return
    outcome = udevrules.evaluate(host)
    mode, group = outcome.expected
    by = " and ".join(dict.fromkeys(one.where for one in (outcome.mode, outcome.group) if one)) or "no rule"
    yield Finding(AREA, "fine", f"udev makes nodes {mode:04o} root:{group} ({by})")
    for loser in outcome.modes:
        if outcome.mode and int(loser.value, 8) & stat.S_IRWXO < mode & stat.S_IRWXO:
            yield Finding(
                AREA,
                "warning",
                f"the rule {loser.where} (mode {loser.value}) loses to {outcome.mode.where} (mode {mode:04o})",
                f"make it final: {FINAL}; then {TRIGGER}",
            )
    if group not in {"root", "0"} and not group.isdecimal() and host.gid_of(group) is None:
        yield Finding(
            AREA, "error", f"the udev rule names the group {group}, which there is not", f"groupadd --system {group}"
        )
    for where in outcome.doubtful:
        yield Finding(
            AREA,
            "unseen",
            f"whether the rule {where} applies depends on more than its file says",
            "udevadm test /sys/class/neuron_device/neuron0",
        )


def nodes(host: Host) -> Iterator[Finding]:
    """Compare the nodes with the rules, and say whether leases can be enforced."""
    found: dict[tuple[int, int], list[int]] = {}
    for index in indices(host):
        node = host.chips / "dev" / f"neuron{index}"
        try:
            status = node.lstat()
        except FileNotFoundError:
            yield Finding(AREA, "error", f"the kernel has chip {index}, but there is no node {node}", TRIGGER)
            continue
        if not stat.S_ISCHR(status.st_mode) and not host.simulated:
            yield Finding(
                AREA, "error", f"{node} is not a character device", f"rm {node}; rmmod neuron && modprobe neuron"
            )
            continue
        found.setdefault((stat.S_IMODE(status.st_mode), status.st_gid), []).append(index)
    outcome = None if host.simulated else udevrules.evaluate(host)
    for (mode, gid), chips in found.items():
        which = f"nodes of chips {ranges(chips)}"
        has = f"{mode:04o} with group {host.group_name(gid)}"
        if mode & stat.S_IRWXO:
            yield Finding(
                AREA,
                "warning",
                f"leases are advisory: everybody can open the {which} ({has})",
                f"to enforce them, as a file in /etc/udev/rules.d: {FINAL}; then {TRIGGER}",
            )
        else:
            yield Finding(AREA, "fine", f"leases are enforced: {which} are shut to others ({has})")
        if outcome is not None and (mode, host.group_name(gid)) != outcome.expected:
            wanted, group = outcome.expected
            yield Finding(
                AREA, "warning", f"{which} are {has}, but the rules say {wanted:04o} with group {group}", TRIGGER
            )


CHECKS = (rules, nodes)
