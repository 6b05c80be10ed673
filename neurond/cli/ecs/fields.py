"""Every field of an ECS task definition, and what becomes of it here.

The table decides what is accepted, and README's table is printed from it, so the two can't differ. Names, types and
limits are those of the API reference of Amazon ECS (RegisterTaskDefinition, version 2014-11-13).
"""

from dataclasses import dataclass
from typing import Any, Literal

from neurond.cli.ecs.text import joined

Verdict = Literal["supported", "noted", "ignored", "refused"]
Kind = Literal["text", "path", "number", "flag", "texts", "map", "object", "objects", "any"]

MOST = 2**31 - 1
NAME = r"[A-Za-z0-9_-]{1,255}"


@dataclass(frozen=True, slots=True)
class Field:
    """What becomes of one field: `why` is the reason of a refusal, or the note; `least` to `most` are for numbers.

    `form` is a regular expression for the whole of a text, and `choices` are all that there are; both hold for each of
    `texts`, which has at most `most`, as have `objects`.
    """

    verdict: Verdict
    why: str = ""
    kind: Kind = "any"
    required: bool = False
    least: int = 0
    most: int = MOST
    form: str = ""
    choices: tuple[str, ...] = ()


def takes(kind: Kind, **rules: Any) -> Field:
    """Return a field that is supported."""
    return Field("supported", kind=kind, **rules)


def notes(why: str, kind: Kind = "any") -> Field:
    """Return a field that changes nothing here, which the user is told."""
    return Field("noted", why, kind)


def ignores(why: str) -> Field:
    """Return a field that has no meaning outside of AWS."""
    return Field("ignored", why)


def refuses(why: str) -> Field:
    """Return a field that is refused unless it asks for nothing."""
    return Field("refused", why)


READ_ONLY = "what describe-task-definition adds"
NOT_CHECKED = "not checked against this host"

TASK = {
    "family": takes("text", required=True, form=NAME),
    "containerDefinitions": takes("objects", required=True, least=1, most=10),
    "volumes": takes("objects"),
    "networkMode": takes("text", choices=("host", "bridge", "none", "awsvpc")),
    "placementConstraints": takes("objects", most=10),
    "instanceRequirements": takes("object"),
    "requiresCompatibilities": takes("texts", choices=("EC2", "FARGATE", "EXTERNAL", "MANAGED_INSTANCES")),
    "runtimePlatform": takes("object"),
    "cpu": notes("not enforced for the task as a whole: give cpu to its containers", "text"),
    "memory": notes("not enforced for the task as a whole: give memory to its containers", "text"),
    "executionRoleArn": notes("not used: images are pulled as Docker on this host is logged in", "text"),
    "taskRoleArn": notes("not used: containers get no credentials from AWS by it", "text"),
    "ephemeralStorage": notes("not enforced: containers write where Docker keeps its data", "object"),
    "tags": ignores("labels of AWS"),
    "taskDefinitionArn": ignores(READ_ONLY),
    "revision": ignores(READ_ONLY),
    "status": ignores(READ_ONLY),
    "requiresAttributes": ignores(READ_ONLY),
    "compatibilities": ignores(READ_ONLY),
    "registeredAt": ignores(READ_ONLY),
    "registeredBy": ignores(READ_ONLY),
    "deregisteredAt": ignores(READ_ONLY),
    "deleteRequestedAt": ignores(READ_ONLY),
    "pidMode": refuses("containers have a PID namespace each: leave it out"),
    "ipcMode": refuses("containers have an IPC namespace each: leave it out"),
    "proxyConfiguration": refuses("there is no App Mesh here: leave it out"),
    "inferenceAccelerators": refuses("Elastic Inference has ended: chips are asked for by resourceRequirements"),
    "enableFaultInjection": refuses("there is no fault injection here: leave it out"),
}

CONTAINER = {
    "name": takes("text", required=True, form=NAME),
    "image": takes("text", required=True, form=r"[^\s]+"),
    "command": takes("texts"),
    "entryPoint": takes("texts"),
    "environment": takes("objects"),
    "essential": takes("flag"),
    "dependsOn": takes("objects"),
    "healthCheck": takes("object"),
    "mountPoints": takes("objects"),
    "portMappings": takes("objects"),
    "memory": takes("number", least=6),
    "memoryReservation": takes("number", least=6),
    "cpu": takes("number", most=262144),
    "ulimits": takes("objects"),
    "user": takes("text", form=r"[^\s:]+(:[^\s:]+)?"),
    "workingDirectory": takes("path"),
    "dockerLabels": takes("map"),
    "logConfiguration": takes("object"),
    "resourceRequirements": takes("objects"),
    "linuxParameters": takes("object"),
    "readonlyRootFilesystem": takes("flag"),
    "privileged": takes("flag"),
    "hostname": takes("text", form=r"[A-Za-z0-9.-]{1,253}"),
    "extraHosts": takes("objects"),
    "dnsServers": takes("texts", form=r"[0-9A-Fa-f.:]+"),
    "stopTimeout": takes("number", most=86400),
    "startTimeout": notes("not enforced: a dependency is waited for without limit", "number"),
    "versionConsistency": notes("not used: an image that is on this host is taken as it is", "text"),
    "interactive": refuses("a task has no standard input: neurond container run is for that"),
    "pseudoTerminal": refuses("a task has no terminal: neurond container run is for that"),
    "secrets": refuses("neurond reads no secrets of AWS: give the values in environment"),
    "environmentFiles": refuses("neurond reads no files in S3: give the values in environment"),
    "repositoryCredentials": refuses("neurond reads no secrets of AWS: docker login on this host, as root"),
    "firelensConfiguration": refuses("there is no FireLens here: use json-file or journald in logConfiguration"),
    "links": refuses("containers are not linked: use networkMode host, or ports"),
    "volumesFrom": refuses("name the volumes in volumes, and mount them in both containers by mountPoints"),
    "restartPolicy": refuses("neurond does not start a container again: leave it out"),
    "disableNetworking": refuses("use networkMode none, which is for the whole task"),
    "dnsSearchDomains": refuses("neurond has no option for it: put it into the image"),
    "dockerSecurityOptions": refuses("neurond has no option for it: leave it out"),
    "systemControls": refuses("neurond sets no sysctl: set it on the host"),
    "credentialSpecs": refuses("it is for Windows"),
}

LINUX = {
    "devices": takes("objects"),
    "capabilities": takes("object"),
    "sharedMemorySize": takes("number", least=1),
    "initProcessEnabled": takes("flag"),
    "tmpfs": takes("objects"),
    "maxSwap": refuses("neurond sets no limit of swap: leave it out"),
    "swappiness": refuses("neurond sets no swappiness: leave it out"),
}

REQUIREMENTS = {
    "acceleratorManufacturers": takes("texts"),
    "acceleratorNames": takes("texts"),
    "acceleratorCount": takes("object"),
    "allowedInstanceTypes": takes("texts"),
    "excludedInstanceTypes": takes("texts"),
    **{
        key: notes(NOT_CHECKED)
        for key in (
            "vCpuCount",
            "memoryMiB",
            "memoryGiBPerVCpu",
            "cpuManufacturers",
            "instanceGenerations",
            "acceleratorTypes",
            "acceleratorTotalMemoryMiB",
            "bareMetal",
            "burstablePerformance",
            "localStorage",
            "localStorageTypes",
            "totalLocalStorageGB",
            "baselineEbsBandwidthMbps",
            "networkBandwidthGbps",
            "networkInterfaceCount",
            "requireHibernateSupport",
            "spotMaxPricePercentageOverLowestPrice",
            "onDemandMaxPricePercentageOverLowestPrice",
            "maxSpotPriceAsPercentageOfOptimalOnDemandPrice",
        )
    },
}

CAPABILITY = r"[A-Z][A-Z0-9_]*"
ULIMITS = (
    "core cpu data fsize locks memlock msgqueue nice nofile nproc rss rtprio rttime sigpending stack".split()  # noqa: SIM905
)

OBJECTS: dict[str, dict[str, Field]] = {
    "": TASK,
    "runtimePlatform": {
        "cpuArchitecture": takes("text", choices=("X86_64", "ARM64")),
        "operatingSystemFamily": takes("text"),
    },
    "placementConstraints[]": {
        "type": takes("text", required=True, choices=("memberOf",)),
        "expression": takes("text", most=2000),
    },
    "instanceRequirements": REQUIREMENTS,
    "instanceRequirements.acceleratorCount": {"min": takes("number"), "max": takes("number")},
    "volumes[]": {
        "name": takes("text", required=True, form=NAME),
        "host": takes("object"),
        "dockerVolumeConfiguration": takes("object"),
        "efsVolumeConfiguration": refuses("mount the file system on the host, and give its path in host.sourcePath"),
        "fsxWindowsFileServerVolumeConfiguration": refuses("it is for Windows"),
        "s3filesVolumeConfiguration": refuses("mount the files on the host, and give the path in host.sourcePath"),
        "configuredAtLaunch": refuses("neurond makes no EBS volumes: use host.sourcePath"),
    },
    "volumes[].host": {"sourcePath": takes("path")},
    "volumes[].dockerVolumeConfiguration": {
        "scope": takes("text", choices=("task", "shared")),
        "autoprovision": takes("flag"),
        "driver": takes("text", choices=("local",)),
        "driverOpts": refuses("make the volume by docker volume create, and name it here with scope shared"),
        "labels": refuses("make the volume by docker volume create, and name it here with scope shared"),
    },
    "containerDefinitions[]": CONTAINER,
    "containerDefinitions[].environment[]": {
        "name": takes("text", required=True, form=r"[^=\s]+"),
        "value": takes("text", required=True),
    },
    "containerDefinitions[].dependsOn[]": {
        "containerName": takes("text", required=True),
        "condition": takes("text", required=True, choices=("START", "COMPLETE", "SUCCESS", "HEALTHY")),
    },
    "containerDefinitions[].healthCheck": {
        "command": takes("texts", required=True, least=1),
        "interval": takes("number", least=5, most=300),
        "timeout": takes("number", least=2, most=60),
        "retries": takes("number", least=1, most=10),
        "startPeriod": takes("number", most=300),
    },
    "containerDefinitions[].mountPoints[]": {
        "sourceVolume": takes("text", required=True),
        "containerPath": takes("path", required=True),
        "readOnly": takes("flag"),
    },
    "containerDefinitions[].portMappings[]": {
        "containerPort": takes("number", required=True, least=1, most=65535),
        "hostPort": takes("number", most=65535),
        "protocol": takes("text", choices=("tcp", "udp")),
        "name": ignores("for Service Connect"),
        "appProtocol": ignores("for Service Connect"),
        "containerPortRange": refuses("give each port by containerPort"),
    },
    "containerDefinitions[].ulimits[]": {
        "name": takes("text", required=True, choices=tuple(ULIMITS)),
        "softLimit": takes("number", required=True, least=-1),
        "hardLimit": takes("number", required=True, least=-1),
    },
    "containerDefinitions[].logConfiguration": {
        "logDriver": takes("text", required=True),
        "options": takes("map"),
        "secretOptions": refuses("neurond reads no secrets of AWS: leave it out"),
    },
    "containerDefinitions[].resourceRequirements[]": {
        "type": takes("text", required=True),
        "value": takes("text", required=True),
    },
    "containerDefinitions[].linuxParameters": LINUX,
    "containerDefinitions[].linuxParameters.devices[]": {
        "hostPath": takes("path", required=True),
        "containerPath": takes("path"),
        "permissions": takes("texts", choices=("read", "write", "mknod")),
    },
    "containerDefinitions[].linuxParameters.capabilities": {
        "add": takes("texts", form=CAPABILITY),
        "drop": takes("texts", form=CAPABILITY),
    },
    "containerDefinitions[].linuxParameters.tmpfs[]": {
        "containerPath": takes("path", required=True),
        "size": takes("number", required=True, least=1),
        "mountOptions": takes("texts", form=r"[a-z0-9_]+(=[A-Za-z0-9_.-]+)?"),
    },
    "containerDefinitions[].extraHosts[]": {
        "hostname": takes("text", required=True, form=r"[A-Za-z0-9._-]+"),
        "ipAddress": takes("text", required=True, form=r"[0-9A-Fa-f.:]+"),
    },
}

FIELDS: dict[str, Field] = {
    joined(where, key): field for where, fields in OBJECTS.items() for key, field in fields.items()
}
"""JSON path -> field; `[]` stands for the number in a list."""


def markdown() -> str:
    """Return the table of all fields as README has it: a line for each object and verdict."""
    lines = ["| where | | fields |", "|---|---|---|"]
    for pattern, fields in OBJECTS.items():
        for verdict in ("supported", "noted", "ignored", "refused"):
            grouped: dict[str, list[str]] = {}
            for key, field in fields.items():
                if field.verdict == verdict:
                    grouped.setdefault(field.why, []).append(f"`{key}`")
            if grouped:
                texts = [", ".join(keys) + (f": {why}" if why else "") for why, keys in grouped.items()]
                lines.append(f"| {f'`{pattern}`' if pattern else 'the task'} | {verdict} | {'; '.join(texts)} |")
    return "\n".join(lines) + "\n"
