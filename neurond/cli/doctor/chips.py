"""The driver, and its chips against what the instance type should have."""

import re
from collections.abc import Iterator

from neurond.catalog import look_up
from neurond.cli.doctor.host import Finding, Host, read

AREA = "driver"
CHIP = re.compile(r"neuron(0|[1-9][0-9]?)")


def indices(host: Host) -> list[int]:
    """Return the numbers of the chips that the kernel has."""
    directory = host.chips / "sys/class/neuron_device"
    if not directory.is_dir():
        return []
    return sorted(int(found[1]) for entry in directory.iterdir() if (found := CHIP.fullmatch(entry.name)))


def driver(host: Host) -> Iterator[Finding]:
    """Say whether the module is loaded, and will be after a reboot."""
    if host.simulated:
        yield Finding(AREA, "fine", "the daemon simulates its chips; no driver is needed")
        return
    if not host.path("/sys/module/neuron").is_dir():
        yield Finding(
            AREA,
            "error",
            "the kernel module neuron is not loaded",
            "modprobe neuron (package aws-neuronx-dkms); lspci -d 1d0f: tells whether the instance has chips",
        )
        return
    state = re.search(r"^neuron \d+ \d+ \S+ (\S+)", host.text("/proc/modules") or "", re.MULTILINE)
    if state and state[1] != "Live":
        yield Finding(
            AREA, "warning", f"the kernel module neuron is {state[1].lower()}", "wait, then look again; dmesg"
        )
    version = (host.text("/sys/module/neuron/version") or "").strip()
    if re.fullmatch(r"\d+(\.[0-9a-z]+)+", version):
        yield Finding(AREA, "fine", f"the driver is loaded, version {version}")
    else:
        yield Finding(
            AREA,
            "warning",
            f"the driver is loaded, its version reads {version[:30]!r}",
            "modinfo neuron tells which one is installed; install aws-neuronx-dkms anew",
        )
    directories = "/etc/modules-load.d", "/run/modules-load.d", "/usr/lib/modules-load.d", "/lib/modules-load.d"
    names = (f"{one}/{name}" for one in directories for name in host.names(one) if name.endswith(".conf"))
    if not any("neuron" in (host.text(name) or "").split() for name in names):
        yield Finding(
            AREA,
            "warning",
            "nothing loads the driver at boot (it does not load by itself on Trn and Inf2)",
            "echo neuron > /etc/modules-load.d/neuron.conf",
        )


def chips(host: Host) -> Iterator[Finding]:
    """Compare the chips with the catalog, and look for holes in their numbers."""
    there = indices(host)
    product = (read(host.chips / "sys/class/dmi/id/product_name") or "").strip()
    if not product:
        product = (read(host.chips / "sys/devices/virtual/dmi/id/product_name") or "").strip()
    kind = look_up(product)
    if not kind.known:
        yield Finding(
            AREA,
            "warning",
            f"{product or 'this host'} is no instance type that neurond knows; {len(there)} chips are there",
            "chips are then leased one at a time; use an instance type of Neuron, or a newer neurond",
        )
        missing = sorted(set(range(max(there, default=-1) + 1)) - set(there))
    else:
        missing = sorted(set(range(kind.chips)) - set(there))
        if len(there) > kind.chips:
            yield Finding(
                AREA,
                "warning",
                f"{len(there)} chips are there, {product} should have {kind.chips}",
                "tell the project: its catalog may be wrong",
            )
        if not missing:
            yield Finding(AREA, "fine", f"all {kind.chips} chips of {product} are there")
    if missing:
        holes = [index for index in missing if index < max(there, default=-1)]
        text = f"chips {', '.join(map(str, missing))} are missing"
        text += f", {', '.join(map(str, holes))} of them between others (holes)" if holes else ""
        yield Finding(
            AREA, "error", text, "dmesg | grep -i neuron says why; reboot, or stop and start the instance to move it"
        )


CHECKS = (driver, chips)
