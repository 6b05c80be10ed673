"""The driver, the chips that it shows, and who may open their nodes."""

import re
import stat
from collections.abc import Iterable

from neurond.catalog import look_up
from neurond.cli.doctor.findings import ERROR, FINE, WARNING, Finding, Host
from neurond.cli.doctor.rules import winning
from neurond.ledger.words import ranges

ENFORCING = 'SUBSYSTEM=="neuron_device", KERNEL=="neuron[0-9]*", GROUP:="neuron", MODE:="0660"'
SHIPPED = "/usr/share/neurond/udev/60-neurond-enforced.rules"
APPLY = "udevadm control --reload; udevadm trigger --settle -s neuron_device"


def driver(host: Host) -> Iterable[Finding]:
    """Tell whether the driver is loaded, and which."""
    version = host.text("/sys/module/neuron/version")
    modules = (host.text("/proc/modules") or "").splitlines()
    if version is None and not any(line.startswith("neuron ") for line in modules):
        fix = "modprobe neuron; if there is no such module, install the package aws-neuronx-dkms"
        yield Finding("driver", ERROR, "the kernel module neuron is not loaded", fix)
    else:
        yield Finding("driver", FINE, f"the kernel module neuron is loaded, version {version or 'unknown'}")


def count(host: Host) -> Iterable[Finding]:
    """Compare the chips with what the instance type has."""
    indexes = _indexes(host)
    name = host.text("/sys/class/dmi/id/product_name") or ""
    kind = look_up(name)
    have = f"{len(indexes)} chips ({ranges(indexes)})" if indexes else "no chips"
    fix = "dmesg | grep -i neuron tells which chip failed to start; stop and start the instance to get other hardware"
    if not kind.known:
        if not indexes:
            text = f"no chips, and {name or 'this machine'} is no instance type known to have any"
            other = "use an instance type of Inferentia or Trainium; neurond serve --simulate TYPE needs no chips"
            yield Finding("chips", ERROR, text, other)
        else:
            text = f"{have}; how many {name or 'this machine'} should have is not known"
            yield Finding("chips", WARNING, text, "compare with the EC2 page of the instance type")
    elif len(indexes) != kind.chips:
        yield Finding("chips", ERROR, f"{have}, {_an(name)} should have {kind.chips}", fix)
    else:
        yield Finding("chips", FINE, f"{have}, as {_an(name)} should have")
    holes = sorted(set(range(max(indexes, default=-1) + 1)) - set(indexes))
    if holes:
        yield Finding("chips", WARNING, f"the numbering has holes: no chip {ranges(holes)}", fix)


def nodes(host: Host) -> Iterable[Finding]:
    """Compare the nodes' modes with the udev rule that wins, and say how far leases are enforced."""
    rule = winning(host)
    said = ", ".join(f"{key} {got.value} ({got.where})" for key, got in sorted(rule.items()))
    modes: dict[int, list[int]] = {}
    for index in _indexes(host):
        try:
            found = host.path(f"/dev/neuron{index}").stat()
        except FileNotFoundError:
            yield Finding(
                "nodes", ERROR, f"chip {index} has no node /dev/neuron{index}", "udevadm trigger -s neuron_device"
            )
            continue
        modes.setdefault(stat.S_IMODE(found.st_mode), []).append(index)
    wanted = rule["MODE"].value if "MODE" in rule else ""
    for mode, indexes in sorted(modes.items()):
        which = f"the nodes of chips {ranges(indexes)} have mode {mode:04o}"
        # An owner's entry in the access control list shows in the bits of the group, so only those of others tell.
        if re.fullmatch("[0-7]{3,4}", wanted) and (int(wanted, 8) ^ mode) & 0o007:
            text = f"{which}, the rule that wins says {wanted} ({rule['MODE'].where})"
            yield Finding("nodes", WARNING, text, APPLY)
        if mode & 0o006:
            text = f"leases are advisory: {which}, so anybody can open them; rules: {said or 'none'}"
            fix = f"to enforce them, in /etc/udev/rules.d/99-neurond.rules (:= is final): {ENFORCING}"
            if host.path(SHIPPED).exists():
                fix = f"to enforce them: ln -s {SHIPPED} /etc/udev/rules.d/; {APPLY}; systemctl restart neurond"
            yield Finding("nodes", WARNING, text, fix)
        else:
            yield Finding("nodes", FINE, f"leases are enforced: {which}; rules: {said or 'none'}")


def _an(name: str) -> str:
    return f"an {name}" if name.startswith("i") else f"a {name}"


def _indexes(host: Host) -> list[int]:
    found = (re.fullmatch(r"neuron(\d{1,2})", name) for name in host.names("/sys/class/neuron_device"))
    return sorted(int(name[1]) for name in found if name)
