"""Others that give out the same chips: Kubernetes, ECS, Slurm."""

import os
from collections.abc import Iterator

from neurond.cli.doctor.host import Finding, Host

AREA = "others"
KUBELET = "/var/lib/kubelet/device-plugins", "/var/lib/kubelet/plugins", "/var/lib/kubelet/plugins_registry"
"""Sockets of device plugins; the last two have those of DRA drivers, AWS's being neuron.aws.com."""
COMM = 15
"""So much of a name is in /proc/PID/comm."""


def kubelet(host: Host) -> Iterator[Finding]:
    """Look for sockets of AWS's device plugin and DRA driver."""
    for directory in KUBELET:
        try:
            names = [name for name in host.names(directory) if "neuron" in name]
        except PermissionError:
            yield Finding(AREA, "unseen", f"the kubelet's plugins in {directory}", "run as root")
            continue
        for name in names:
            yield Finding(
                AREA,
                "error",
                f"Kubernetes gives out the same chips: {directory}/{name}",
                "let one of them do it: stop neurond here, or keep the Neuron plugin off this node",
            )


def processes(host: Host) -> Iterator[Finding]:
    """Look for the agents of ECS and Slurm among the processes."""
    running = set()
    pids = [name for name in host.names("/proc") if name.isdecimal()]
    for pid in pids:
        try:
            running.add((host.text(f"/proc/{pid}/comm") or "").strip())
        except OSError:
            continue  # it has ended
    if host.uid != 0 and "1" not in pids:
        yield Finding(AREA, "unseen", "processes of other users (/proc is mounted with hidepid)", "run as root")
    gres = host.text("/etc/slurm/gres.conf") if os.access(host.path("/etc/slurm"), os.X_OK) else None
    if "slurmd" in running:
        same = gres is not None and "neuron" in gres
        yield Finding(
            AREA,
            "error" if same else "warning",
            "slurmd runs here" + (", and its gres.conf gives out the same chips" if same else ""),
            "let Slurm's prolog lease the chips of a job, or take /dev/neuron* out of gres.conf",
        )
    containers = host.docker.content["containers"] if host.docker.content else ()
    in_container = any(str(one.get("Name", "")).lstrip("/") == "ecs-agent" for one in containers)
    if in_container or "amazon-ecs-init"[:COMM] in running:
        yield Finding(
            AREA,
            "warning",
            "the ECS agent runs here, and places tasks on chips without asking neurond",
            "drain this container instance, or keep task definitions with Neuron devices off it",
        )


CHECKS = (kubelet, processes)
