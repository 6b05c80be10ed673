"""Docker, device names (CDI), and whatever else hands chips to containers."""

import json
import time
from collections.abc import Iterable
from typing import Any

from neurond.cli.doctor.findings import ERROR, FINE, PATIENCE, UNSEEN, WARNING, Failed, Finding, Host

HOOK = "/opt/aws/neuron/bin/oci_neuron_hook_wrapper.sh"
SWITCH_ON = 'add "features": {"cdi": true} to /etc/docker/daemon.json (Engine 25 or later), systemctl restart docker'
NO_HOOK = "launch with neurond, never with --runtime neuron: AWS_NEURON_VISIBLE_DEVICES gives chips past every lease"


def docker(host: Host) -> Iterable[Finding]:
    """Tell whether the Engine answers, takes device names, gives chips by itself, or runs privileged containers."""
    if not host.settings.docker.startswith("unix:"):
        text = f"not seen: Docker at {host.settings.docker}, as only Unix sockets are asked here"
        yield Finding("docker", UNSEEN, text, f"docker --host {host.settings.docker} info")
        return
    try:
        info = host.engine("/info")
        if not isinstance(info, dict) or "ServerVersion" not in info:
            raise ValueError("its answer is no Engine's")
        yield Finding("docker", FINE, f"Docker answers, version {info['ServerVersion']}")
        yield from _settings(host, info)
        yield from _privileged(host)
    except FileNotFoundError:
        text = f"no Docker at {host.docker}: processes can lease chips, containers can't"
        yield Finding("docker", WARNING, text, "install and start docker, if containers are wanted")
    except PermissionError:
        yield Finding("docker", UNSEEN, f"not seen: Docker, as {host.user} may not open {host.docker}", "run as root")
    except TimeoutError:
        text = f"Docker took the call and was silent for {PATIENCE:g} s"
        yield Finding("docker", ERROR, text, "systemctl status docker; a stopped dockerd goes on by kill -CONT")
    except (OSError, ValueError) as error:
        text = f"Docker does not answer at {host.docker}: {getattr(error, 'strerror', None) or error}"
        yield Finding("docker", WARNING, text, "systemctl start docker")


def _settings(host: Host, info: dict[str, Any]) -> Iterable[Finding]:
    directories = info.get("CDISpecDirs") or []
    ours = host.settings.cdi_dir
    if not ours:
        yield Finding("cdi", FINE, 'device names (CDI) are not used, as cdi_dir = ""')
    elif not directories:
        yield Finding("cdi", WARNING, "Docker takes no device names (CDI is off); plain devices are used", SWITCH_ON)
    elif _real(ours) not in map(_real, directories):
        fix = f'add "{ours}" to "cdi-spec-dirs" in /etc/docker/daemon.json, systemctl restart docker'
        yield Finding("cdi", WARNING, f"Docker reads device names from {', '.join(directories)} only", fix)
    elif not host.path(f"{ours}/neurond.json").exists():
        text = f"CDI is on; there is no {ours}/neurond.json"
        yield Finding("cdi", WARNING, text, "start neurond, which writes it; if it runs, see its log for cdi")
    else:
        yield Finding("cdi", FINE, f"CDI is on ({', '.join(directories)}), with {ours}/neurond.json")
    if info.get("DefaultRuntime") == "neuron":
        fix = 'remove "default-runtime": "neuron" from /etc/docker/daemon.json, systemctl restart docker'
        yield Finding("hook", ERROR, "runtime neuron is Docker's default: containers take chips past every lease", fix)
    elif "neuron" in (info.get("Runtimes") or {}):
        yield Finding("hook", WARNING, "Docker has the runtime neuron", NO_HOOK)


def _real(directory: str) -> str:
    """Return a directory's name with /var/run, which is a link, resolved."""
    return directory.rstrip("/").replace("/var/run/", "/run/", 1)


def _privileged(host: Host) -> Iterable[Finding]:
    found: list[str] = []
    deadline = time.monotonic() + 2 * PATIENCE
    for one in host.engine("/containers/json"):
        if time.monotonic() > deadline:
            yield Finding("privileged", UNSEEN, "not seen: all containers, Docker is slow", "try again later")
            break
        try:
            inspected = host.engine(f"/containers/{one['Id']}/json")
        except Failed:
            continue  # it has gone meanwhile
        if (inspected.get("HostConfig") or {}).get("Privileged"):
            found.append(inspected["Name"].lstrip("/"))
    if found:
        text = f"privileged containers can open every chip: {', '.join(found)}"
        yield Finding("privileged", WARNING, text, "run them without --privileged, with the capabilities they need")


def hook(host: Host) -> Iterable[Finding]:
    """Tell whether AWS's hook, or a runtime made with it, is there, also where Docker does not answer."""
    if host.path(HOOK).exists():
        yield Finding("hook", WARNING, f"AWS's OCI hook is installed ({HOOK})", NO_HOOK)
    text = host.text("/etc/docker/daemon.json")
    if text:
        try:
            json.loads(text)
        except ValueError as error:
            yield Finding(
                "docker", ERROR, f"/etc/docker/daemon.json is no JSON: {error}", "correct it: Docker won't start"
            )


def others(host: Host) -> Iterable[Finding]:
    """Tell which other managers of chips run here."""
    running = set(host.commands().values())
    advice = "let one of them manage the chips of this host"
    plugins = [name for name in host.names("/var/lib/kubelet/device-plugins") if "neuron" in name]
    plugins += [name for name in host.names("/var/lib/kubelet/plugins") if "neuron" in name]
    if plugins:
        text = f"Kubernetes gives out the same chips: {', '.join(plugins)} below /var/lib/kubelet"
        yield Finding("others", ERROR, text, f"{advice}: stop neurond, or take Neuron's plugin off this node")
    elif "kubelet" in running:
        yield Finding("others", WARNING, "a kubelet runs here, so far without a Neuron plugin", advice)
    if "amazon-ecs-init" in running:
        text = "the ECS agent runs here and gives out the same chips"
        yield Finding("others", WARNING, text, f"{advice}: systemctl disable --now ecs, or use neurond task run only")
    if "slurmd" in running:
        yield Finding("others", WARNING, "slurmd runs here and may give out the same chips", f"{advice}, see gres.conf")
    if not plugins and not {"kubelet", "amazon-ecs-init", "slurmd"} & running:
        yield Finding("others", FINE, "no kubelet, ECS agent or slurmd runs here")
