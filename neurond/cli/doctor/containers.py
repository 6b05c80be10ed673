"""Docker: whether it answers, names of leases as devices (CDI), and ways around the leases."""

import json
from collections.abc import Iterator
from typing import Any

from neurond.cli.doctor.host import Finding, Host
from neurond.settings.table import cdi_name

AREA = "docker"
HOOK = "/opt/aws/neuron/bin/oci_neuron_hook_wrapper.sh"
DAEMON_JSON = "/etc/docker/daemon.json"
CDI_SINCE = 25


def engine(host: Host) -> Iterator[Finding]:
    """Say whether Docker answers, and which one."""
    if host.docker.refused:
        yield Finding(
            AREA,
            "unseen",
            f"Docker with its device names, runtimes and privileged containers: {host.docker.trouble}",
            "run as root, or as a member of docker",
        )
    elif host.docker.content is None:
        yield Finding(
            AREA,
            "warning",
            f"Docker does not answer: {host.docker.trouble}; only processes can lease chips",
            "systemctl start docker (or install it), if containers are wanted",
        )
    else:
        yield Finding(AREA, "fine", f"Docker answers, version {host.docker.content['version'].get('Version')}")


def cdi(host: Host) -> Iterator[Finding]:
    """Say whether the engine resolves device names, and finds ours."""
    directory = host.settings.cdi_dir
    if host.docker.content is None or not directory:
        return
    directories = host.docker.content["info"].get("CDISpecDirs")
    if not directories:
        major = str(host.docker.content["version"].get("Version", "")).partition(".")[0]
        old = major.isdecimal() and int(major) < CDI_SINCE
        yield Finding(
            AREA,
            "warning",
            "device names (CDI) are off in Docker: leases can't be named in --device",
            f"upgrade Docker to {CDI_SINCE} or newer"
            if old
            else f'put "features": {{"cdi": true}} into {DAEMON_JSON}, then systemctl restart docker',
        )
        return
    yield Finding(AREA, "fine", f"device names (CDI) are on, from {', '.join(directories)}")
    if directory not in directories:
        yield Finding(
            AREA,
            "warning",
            f"neurond writes device names to {directory}, where Docker does not look",
            f'set cdi_dir = "{directories[-1]}" for neurond',
        )


def cdi_file(host: Host) -> Iterator[Finding]:
    """Look for the file of device names."""
    directory, home = host.settings.cdi_dir, host.settings.runtime_dir
    if not directory or host.daemon.content is None:
        return
    path = f"{directory}/{cdi_name(home)}.json"
    text = host.text(path)
    if text is None:
        on = bool(host.docker.content and host.docker.content["info"].get("CDISpecDirs"))
        if on and host.daemon.content["named"]:
            yield Finding(
                AREA,
                "warning",
                f"there are leases with device names, but no {path} that has them",
                "journalctl -u neurond | grep cdi says why it could not be written",
            )
        return
    try:
        kind = json.loads(text)["kind"]
    except (KeyError, TypeError, ValueError):
        yield Finding(AREA, "error", f"{path} is damaged", f"rm {path}, then restart neurond, which writes it anew")
    else:
        yield Finding(AREA, "fine", f"{path} has the device names of leases ({kind})")


def hook(host: Host) -> Iterator[Finding]:
    """Look for AWS's OCI hook, by which a container gets chips that it names in a variable."""
    text = host.text(DAEMON_JSON)
    try:
        settings: Any = json.loads(text) if text and text.strip() else {}
    except ValueError as error:
        yield Finding(
            AREA, "error", f"{DAEMON_JSON} is no JSON ({error}): Docker won't start again", f"correct {DAEMON_JSON}"
        )
        settings = {}
    named = settings if isinstance(settings, dict) else {}
    info = host.docker.content["info"] if host.docker.content else {}
    runtimes = {**(named.get("runtimes") or {}), **(info.get("Runtimes") or {})}
    default = info.get("DefaultRuntime") or named.get("default-runtime")
    if "neuron" in runtimes:
        by_default = ", by default" if default == "neuron" else ""
        yield Finding(
            AREA,
            "warning",
            f"Docker has the runtime neuron{by_default}: AWS_NEURON_VISIBLE_DEVICES gives a container chips unleased",
            f"remove the runtime neuron from {DAEMON_JSON}, then systemctl restart docker",
        )
    if host.path(HOOK).exists():
        yield Finding(AREA, "fine", f"AWS's OCI hook is installed ({HOOK}); it only acts in the runtime neuron")


def privileged(host: Host) -> Iterator[Finding]:
    """Name containers that can open every chip."""
    for one in host.docker.content["containers"] if host.docker.content else ():
        name = str(one.get("Name", "")).lstrip("/") or str(one.get("Id"))[:12]
        if (one.get("HostConfig") or {}).get("Privileged"):
            yield Finding(
                AREA,
                "warning",
                f"the container {name} is privileged: it can open every chip",
                f"start {name} without --privileged, with the chips of a lease (neurond docker run -n N)",
            )


CHECKS = (engine, cdi, cdi_file, hook, privileged)
