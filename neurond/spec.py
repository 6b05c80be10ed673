"""A container as people ask for it, and as the engine takes it.

The options mean what they mean to `docker run`; what is wrong in one is said by its name, before anything is done. The
forms are those of the docker command line, the result is the body of the Engine API's POST /containers/create (v1.41).
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

SIZES = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
SECOND = 1_000_000_000
"""The engine counts times in nanoseconds, and processors in billionths."""
EFA_DEVICES = "/dev/infiniband/uverbs"
EFA_ULIMIT, EFA_CAPABILITY, EFA_SHM = "memlock=-1:-1", "IPC_LOCK", "8g"
"""What `--efa` adds beside the devices, as AWS's guides for EFA in containers have it."""
RESTARTS = {"no", "on-failure", "always", "unless-stopped"}


class SpecError(ValueError):
    """An option can't be what was given; the sentence says what is possible."""


class Health(msgspec.Struct, forbid_unknown_fields=True):
    """How the engine finds out whether a container is healthy; times in seconds."""

    test: list[str]
    interval: float = 30
    timeout: float = 5
    retries: int = 3
    start_period: float = 0


class Options(msgspec.Struct, forbid_unknown_fields=True):
    """What a container is made of; None is the engine's default.

    `env`, `labels` and `log_opt` are NAME=VALUE, `volumes` SOURCE:PATH[:ro], `mounts` type=bind,source=...,target=...,
    `tmpfs` PATH[:options], `ulimits` NAME=SOFT[:HARD], `publish` [[IP:]HOSTPORT:]PORT[/udp], `devices`
    NODE[:PATH[:rwm]], `restart` a policy as in on-failure:3. Sizes are bytes or a number with b, k, m or g.
    `entrypoint` replaces that of the image, an empty one removes it. `efa` adds what the Elastic Fabric Adapter takes.
    """

    image: str
    command: list[str] | None = None
    entrypoint: list[str] | None = None
    env: list[str] | None = None
    labels: list[str] | None = None
    volumes: list[str] | None = None
    mounts: list[str] | None = None
    tmpfs: list[str] | None = None
    devices: list[str] | None = None
    privileged: bool | None = None
    ulimits: list[str] | None = None
    cap_add: list[str] | None = None
    cap_drop: list[str] | None = None
    security_opt: list[str] | None = None
    group_add: list[str] | None = None
    workdir: str | None = None
    user: str | None = None
    hostname: str | None = None
    add_host: list[str] | None = None
    dns: list[str] | None = None
    publish: list[str] | None = None
    network: str | None = None
    ipc: str | None = None
    pid: str | None = None
    shm_size: str | None = None
    memory: str | None = None
    memory_reservation: str | None = None
    cpus: str | None = None
    cpuset_cpus: str | None = None
    cpu_shares: int | None = None
    init: bool | None = None
    read_only: bool | None = None
    log_driver: str | None = None
    log_opt: list[str] | None = None
    platform: str | None = None
    stop_signal: str | None = None
    stop_timeout: int | None = None
    restart: str | None = None
    interactive: bool | None = None
    health: Health | None = None
    efa: bool | None = None


class Device(msgspec.Struct, frozen=True):
    """A device node of the host, its path inside and what may be done with it (r, w, m)."""

    node: str
    path: str
    permissions: str = "rw"


def create_body(
    options: Options, chips: Iterable[Device] = (), cdi: Sequence[str] = (), env: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the body of a create request: the options, these chips by node or by CDI name, more NAME=VALUE.

    Raises SpecError.
    """
    exposed, bound = ports(options.publish or ())
    devices = [*chips, *(device(text) for text in options.devices or ())]
    host: dict[str, Any] = {
        "Binds": [volume for volume in options.volumes or () if ":" in volume],
        "Mounts": [mount(text) for text in options.mounts or ()],
        "Tmpfs": dict(text.partition(":")[::2] for text in options.tmpfs or ()),
        "Devices": [
            {"PathOnHost": one.node, "PathInContainer": one.path, "CgroupPermissions": one.permissions}
            for one in devices
        ],
        "DeviceRequests": [{"Driver": "cdi", "DeviceIDs": list(cdi)}] if cdi else [],
        "Privileged": bool(options.privileged),
        "Ulimits": [ulimit(text) for text in options.ulimits or ()],
        "CapAdd": options.cap_add or [],
        "CapDrop": options.cap_drop or [],
        "SecurityOpt": options.security_opt or [],
        "GroupAdd": options.group_add or [],
        "ExtraHosts": options.add_host or [],
        "Dns": options.dns or [],
        "PortBindings": bound,
        "NetworkMode": options.network or "default",
        "IpcMode": options.ipc or "",
        "PidMode": options.pid or "",
        "ShmSize": size("shm-size", options.shm_size),
        "Memory": size("memory", options.memory),
        "MemoryReservation": size("memory-reservation", options.memory_reservation),
        "NanoCpus": _cpus(options.cpus),
        "CpusetCpus": options.cpuset_cpus or "",
        "CpuShares": options.cpu_shares or 0,
        "ReadonlyRootfs": bool(options.read_only),
        "RestartPolicy": restart_policy(options.restart or "no"),
    }
    if options.init is not None:
        host["Init"] = options.init
    if options.log_driver or options.log_opt:
        host["LogConfig"] = {"Type": options.log_driver or "", "Config": pairs("log-opt", options.log_opt or ())}
    body: dict[str, Any] = {
        "Image": options.image,
        "Cmd": options.command or None,
        "Env": [*(options.env or ()), *env],
        "Labels": pairs("label", options.labels or ()),
        "Volumes": {volume: {} for volume in options.volumes or () if ":" not in volume},
        "WorkingDir": options.workdir or "",
        "User": options.user or "",
        "Hostname": options.hostname or "",
        "ExposedPorts": exposed,
        "AttachStdout": True,
        "AttachStderr": True,
        "AttachStdin": bool(options.interactive),
        "OpenStdin": bool(options.interactive),
        "StdinOnce": bool(options.interactive),
        "HostConfig": host,
    }
    if options.entrypoint is not None:
        body["Entrypoint"] = options.entrypoint or [""]
    if options.stop_signal:
        body["StopSignal"] = options.stop_signal
    if options.stop_timeout is not None:
        body["StopTimeout"] = options.stop_timeout
    if options.health is not None:
        body["Healthcheck"] = _health(options.health)
    return body


# -- the forms of single options ------------------------------------------------------------------------------------


def pairs(option: str, texts: Iterable[str]) -> dict[str, str]:
    """Read NAME=VALUE, or NAME alone for an empty value."""
    found = dict(text.partition("=")[::2] for text in texts)
    if "" in found:
        raise SpecError(f"--{option} ={found['']}: the form is NAME=VALUE")
    return found


def size(option: str, text: str | None) -> int:
    """Read a size into bytes, 0 for none."""
    if text is None:
        return 0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([bkmgt]?)b?", text.strip().lower(), re.ASCII)
    if not found:
        raise SpecError(f"--{option} {text}: a size is a number of bytes, or one with b, k, m or g, as in 8g")
    return int(float(found[1]) * SIZES[found[2]])


def ulimit(text: str) -> dict[str, Any]:
    """Read NAME=SOFT[:HARD]."""
    found = re.fullmatch(r"([a-z]+)=(-1|\d+)(?::(-1|\d+))?", text, re.ASCII)
    if not found:
        raise SpecError(f"--ulimit {text}: the form is NAME=SOFT[:HARD], as in memlock=-1:-1")
    return {"Name": found[1], "Soft": int(found[2]), "Hard": int(found[3] or found[2])}


def device(text: str) -> Device:
    """Read NODE[:PATH[:PERMISSIONS]] or NODE:PERMISSIONS, as docker does."""
    node, *rest = text.split(":")
    permissions = rest.pop() if rest and re.fullmatch("[rwm]+", rest[-1]) else "rwm"
    if not node or len(rest) > 1:
        raise SpecError(f"--device {text}: the form is NODE[:PATH[:rwm]], as in /dev/fuse:/dev/fuse:rw")
    return Device(node, rest[0] if rest and rest[0] else node, permissions)


def restart_policy(text: str) -> dict[str, Any]:
    """Read a restart policy."""
    name, colon, times = text.partition(":")
    if name not in RESTARTS or (colon and (name != "on-failure" or not times.isdecimal())):
        raise SpecError(f"--restart {text}: no, on-failure[:TIMES], always and unless-stopped are possible")
    return {"Name": name, "MaximumRetryCount": int(times or 0)}


def ports(texts: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read [[IP:]HOSTPORT:]PORT[/udp]; return what the engine calls ExposedPorts and PortBindings."""
    exposed: dict[str, Any] = {}
    bound: dict[str, Any] = {}
    for text in texts:
        found = re.fullmatch(r"(?:(?:(\[[0-9a-fA-F:]+\]|[0-9.]+):)?(\d*):)?(\d+)(?:/(tcp|udp|sctp))?", text, re.ASCII)
        if not found or not 0 < int(found[3]) < 1 << 16 or int(found[2] or 0) >= 1 << 16:
            raise SpecError(f"-p {text}: the form is [[IP:]HOSTPORT:]PORT[/udp], one port each, as in 8080:80")
        inside = f"{found[3]}/{found[4] or 'tcp'}"
        exposed[inside] = {}
        bound.setdefault(inside, []).append({"HostIp": (found[1] or "").strip("[]"), "HostPort": found[2] or ""})
    return exposed, bound


def mount(text: str) -> dict[str, Any]:
    """Read type=bind|volume|tmpfs,source=...,target=...[,readonly][,...] as docker's --mount has it."""
    names = {"src": "source", "dst": "target", "destination": "target", "ro": "readonly"}
    given: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        given[names.get(name, name)] = value if equals else "true"
    kind = given.pop("type", "volume")
    made: dict[str, Any] = {"Type": kind, "Target": given.pop("target", ""), "Source": given.pop("source", "")}
    made["ReadOnly"] = given.pop("readonly", "false") in {"true", "1"}
    if "bind-propagation" in given and kind == "bind":
        made["BindOptions"] = {"Propagation": given.pop("bind-propagation")}
    if kind == "tmpfs":
        made["TmpfsOptions"] = {"SizeBytes": size("mount tmpfs-size", given.pop("tmpfs-size", None))}
        if "tmpfs-mode" in given:
            mode = given.pop("tmpfs-mode")
            if not re.fullmatch("[0-7]{1,5}", mode, re.ASCII):
                raise SpecError(f"--mount {text}: tmpfs-mode is a mode in octal, as in 1777")
            made["TmpfsOptions"]["Mode"] = int(mode, 8)
    if kind == "volume" and given.pop("volume-nocopy", "false") in {"true", "1"}:
        made["VolumeOptions"] = {"NoCopy": True}
    if kind not in {"bind", "volume", "tmpfs"} or not made["Target"].startswith("/") or given:
        wrong = f" ({next(iter(given))} is not known)" if given else ""
        raise SpecError(f"--mount {text}: the form is type=bind,source=/data,target=/data[,readonly]{wrong}")
    if kind == "bind" and not made["Source"].startswith("/"):
        raise SpecError(f"--mount {text}: a bind mount has a source, which is an absolute path")
    return made


def _cpus(text: str | None) -> int:
    if text is None:
        return 0
    if not re.fullmatch(r"\d{1,6}(\.\d{0,9})?|\.\d{1,9}", text, re.ASCII):
        raise SpecError(f"--cpus {text}: a number of processors, as in 1.5")
    return int(float(text) * SECOND)


def _health(health: Health) -> dict[str, Any]:
    return {
        "Test": health.test,
        "Interval": int(health.interval * SECOND),
        "Timeout": int(health.timeout * SECOND),
        "Retries": health.retries,
        "StartPeriod": int(health.start_period * SECOND),
    }
