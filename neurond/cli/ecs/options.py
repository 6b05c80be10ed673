"""The options of one container of a task, in the form that docker run has for them; see ContainerRun in wire.py."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from neurond.cli.ecs.text import BadTaskFile

Object = dict[str, Any]

LETTERS = {"read": "r", "write": "w", "mknod": "m"}
HOOK = "AWS_NEURON_VISIBLE_DEVICES"
"""Asks AWS's OCI hook for chips, of which no lease would know."""
OURS = "io.neurond."
LOG_DRIVERS = ("json-file", "journald")
INTERVAL, TIMEOUT, RETRIES = 30, 5, 3
"""ECS's defaults of a health check: seconds, seconds, times."""
NEURON = "NeuronDevice"
CHIP = re.compile(r"/dev/neuron(0|[1-9][0-9]{0,3})")


def options(container: Object, where: str, network: str | None, volumes: Mapping[str, str]) -> Object:
    """Return the options of a container that the file gives, in the form that docker run has for them.

    `volumes` gives what is mounted for the name of a volume. Raises BadTaskFile.
    """
    linux = container.get("linuxParameters", {})
    capabilities = linux.get("capabilities", {})
    cpu = container.get("cpu")
    found = {
        "image": container["image"],
        "command": container.get("command"),
        "entrypoint": container.get("entryPoint"),
        "env": list(environment(container, where)),
        "labels": list(labels(container, where)),
        "volumes": mounts(container, where, volumes),
        "tmpfs": [
            ",".join([f"{entry['containerPath']}:size={entry['size']}m", *entry.get("mountOptions", ())])
            for entry in linux.get("tmpfs", ())
        ],
        "ulimits": list(ulimits(container, where)),
        "cap_add": capabilities.get("add"),
        "cap_drop": capabilities.get("drop"),
        "workdir": container.get("workingDirectory"),
        "user": container.get("user"),
        "shm_size": mebibytes(linux.get("sharedMemorySize")),
        "network": "bridge" if network == "awsvpc" else network,
        "memory": mebibytes(container.get("memory")),
        "memory_reservation": mebibytes(container.get("memoryReservation")),
        "cpu_shares": max(2, cpu) if cpu else None,  # the kernel's least, as the agent of ECS has it
        "hostname": container.get("hostname"),
        "add_host": [f"{entry['hostname']}:{entry['ipAddress']}" for entry in container.get("extraHosts", ())],
        "dns": container.get("dnsServers"),
        "publish": ports(container, where, network),
        "init": linux.get("initProcessEnabled"),
        **logs(container.get("logConfiguration"), f"{where}.logConfiguration"),
        "read_only": container.get("readonlyRootFilesystem"),
        "stop_timeout": container.get("stopTimeout"),
        "devices": [
            f"{device['hostPath']}:{inside(device)}:{letters(device)}"
            for device in linux.get("devices", ())
            if not CHIP.fullmatch(device["hostPath"])
        ],
        "privileged": container.get("privileged") or None,
    }
    memory, reserved = container.get("memory"), container.get("memoryReservation")
    if memory is not None and reserved is not None and reserved >= memory:
        sentence = f"{reserved} MiB must be less than memory, which is {memory} MiB"
        raise BadTaskFile(f"{where}.memoryReservation", sentence)
    return {name: value for name, value in found.items() if value is not None and value != []}


def mounts(container: Object, where: str, volumes: Mapping[str, str]) -> list[str]:
    """Return SOURCE:PATH[:ro]."""
    found = {}
    for i, mount in enumerate(container.get("mountPoints", ())):
        here = f"{where}.mountPoints[{i}]"
        if mount["sourceVolume"] not in volumes:
            have = ", ".join(volumes) or "none"
            raise BadTaskFile(f"{here}.sourceVolume", f"no volume {mount['sourceVolume']!r} (volumes: {have})")
        path = mount["containerPath"]
        if path in found:
            raise BadTaskFile(f"{here}.containerPath", f"{path} is mounted twice")
        found[path] = f"{volumes[mount['sourceVolume']]}:{path}" + (":ro" if mount.get("readOnly") else "")
    return list(found.values())


def inside(device: Object) -> str:
    """Return the path of a device in the container."""
    return str(device.get("containerPath") or device["hostPath"])


def letters(device: Object) -> str:
    """Return the permissions as Docker writes them; all if none are given, as ECS has it."""
    given = device.get("permissions") or LETTERS
    return "".join(letter for word, letter in LETTERS.items() if word in given)


def environment(container: Object, where: str) -> Iterator[str]:
    """Yield NAME=VALUE."""
    for i, entry in enumerate(container.get("environment", ())):
        if entry["name"] == HOOK:
            hint = f"use resourceRequirements with {NEURON}, or linuxParameters.devices"
            sentence = f"{HOOK} asks AWS's hook for chips behind neurond's back: {hint}"
            raise BadTaskFile(f"{where}.environment[{i}].name", sentence)
        yield f"{entry['name']}={entry['value']}"


def labels(container: Object, where: str) -> Iterator[str]:
    """Yield NAME=VALUE."""
    for name, value in container.get("dockerLabels", {}).items():
        if name.startswith(OURS) or not name or "=" in name:
            sentence = f"labels that begin with {OURS} are neurond's own" if name.startswith(OURS) else "no such name"
            raise BadTaskFile(f"{where}.dockerLabels.{name}", sentence)
        yield f"{name}={value}"


def ulimits(container: Object, where: str) -> Iterator[str]:
    """Yield NAME=SOFT:HARD."""
    for i, limit in enumerate(container.get("ulimits", ())):
        soft, hard = limit["softLimit"], limit["hardLimit"]
        if hard != -1 and (soft > hard or soft == -1):
            raise BadTaskFile(f"{where}.ulimits[{i}].softLimit", f"{soft} is more than hardLimit, which is {hard}")
        yield f"{limit['name']}={soft}:{hard}"


def ports(container: Object, where: str, network: str | None) -> list[str]:
    """Return the ports to publish, as [HOST:]CONTAINER/PROTOCOL; without HOST Docker takes one that is free."""
    found = []
    for i, port in enumerate(container.get("portMappings", ())):
        here = f"{where}.portMappings[{i}]"
        outer, inner = port.get("hostPort", 0), port["containerPort"]
        if network == "none":
            raise BadTaskFile(here, "with networkMode none a container has no ports")
        if network in {"host", "awsvpc"} and outer not in {0, inner}:
            sentence = f"with networkMode {network} it must be containerPort, {inner}, or left out"
            raise BadTaskFile(f"{here}.hostPort", sentence)
        if network != "host":
            found.append((f"{outer}:" if outer else "") + f"{inner}/{port.get('protocol', 'tcp')}")
    return found


def health(check: Object | None, where: str) -> Object:
    """Return a health check in Docker's form, times in seconds."""
    if not check:
        return {}
    kind, *command = check["command"]
    if kind not in {"CMD", "CMD-SHELL"} or not command or (kind == "CMD-SHELL" and len(command) > 1):
        raise BadTaskFile(f"{where}.command", '["CMD-SHELL", "one command line"] or ["CMD", "program", …] belongs here')
    return {
        "health": {
            "test": check["command"],
            "interval": check.get("interval", INTERVAL),
            "timeout": check.get("timeout", TIMEOUT),
            "retries": check.get("retries", RETRIES),
            "start_period": check.get("startPeriod", 0),
        }
    }


def logs(configuration: Object | None, where: str) -> Object:
    """Return log_driver and log_opt."""
    if not configuration:
        return {}
    driver = configuration["logDriver"]
    if driver not in LOG_DRIVERS:
        hint = f"use {' or '.join(LOG_DRIVERS)}, or leave logConfiguration out"
        raise BadTaskFile(f"{where}.logDriver", f"{driver} is not supported: {hint}")
    return {
        "log_driver": driver,
        "log_opt": [f"{name}={value}" for name, value in configuration.get("options", {}).items()],
    }


def mebibytes(number: int | None) -> str | None:
    """Return a size in MiB as docker run takes it."""
    return None if number is None else f"{number}m"
