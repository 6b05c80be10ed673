"""An ECS task definition as a plan: what the daemon's RunTask is asked. Nothing is opened, asked or run here.

Three steps: the text is parsed (ecs.text), every field is held against the table of fields (ecs.check), and then the
rules that hold between fields are applied, which are those of ECS but where a sentence says so.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from neurond.cli.ecs.check import checked, kind_of
from neurond.cli.ecs.options import CHIP, NEURON, Object, health, inside, letters, options
from neurond.cli.ecs.placement import Host, check_host
from neurond.cli.ecs.text import REGISTER, BadTaskFile, joined, parse


@dataclass(frozen=True, slots=True)
class TaskFile:
    """The parameters of RunTask (but for `wait`, `missing_ok` and `detach`), and sentences for the user."""

    plan: Object
    notes: list[str]


def read_task(data: bytes, host: Host | None = None, mark: str = "") -> TaskFile:
    """Read a task definition. Raises BadTaskFile, with the JSON path of what is wrong.

    `host` is what placement is checked against; without it that is noted as not checked. `mark` is added to the names
    of Docker volumes that are this task's alone.
    """
    document, where = unwrapped(parse(data))
    cleaned, notes = checked(document, where)
    notes += check_host(cleaned, where, host)
    task = Task(cleaned, joined(where, "containerDefinitions"), where, mark, notes)
    return TaskFile(task.plan(), notes)


def unwrapped(tree: Any) -> tuple[Any, str]:
    """Return the task definition itself and its JSON path, or say what stands there instead."""
    if isinstance(tree, list):
        raise BadTaskFile("", 'a list stands where {"family": …, "containerDefinitions": […]} belongs: put it into one')
    if not isinstance(tree, dict):
        raise BadTaskFile("", f"{kind_of(tree)} is no task definition")
    if "apiVersion" in tree or "kind" in tree:
        hint = "neurond container run -n N IMAGE, or an ECS task definition"
        raise BadTaskFile("", f"this is a Kubernetes object, which neurond does not run: use {hint}")
    if "services" in tree:
        hint = "an ECS task definition, or neurond container run for each service"
        raise BadTaskFile("", f"this is a compose file, which neurond does not run: use {hint}")
    if "Resources" in tree or "AWSTemplateFormatVersion" in tree or "Properties" in tree:
        raise BadTaskFile("", f"this is a CloudFormation template, and a task definition belongs here: {REGISTER}")
    if "taskDefinition" not in tree:
        return tree, ""
    for key, item in tree.items():
        if key not in {"taskDefinition", "tags"}:
            raise BadTaskFile(key, "no such field beside taskDefinition: only tags may be there")
        if key == "taskDefinition" and isinstance(item, str):
            raise BadTaskFile(key, f"it only names a task definition: {REGISTER}")
    return tree["taskDefinition"], "taskDefinition"


@dataclass(slots=True)
class Task:
    """A task definition of which each field is known to be of its type; `where` is the path of its containers."""

    document: Object
    where: str
    top: str
    mark: str
    notes: list[str]
    volumes: dict[str, str] = field(default_factory=dict)
    """Name -> what Docker is to mount."""

    def plan(self) -> Object:
        """Return the parameters of RunTask. Raises BadTaskFile."""
        containers: list[Object] = self.document["containerDefinitions"]
        self.volumes = dict(self._volumes())
        check_names(containers, self.where)
        check_dependencies(containers, self.where)
        check_host_ports(containers, self.where, host=self.document.get("networkMode") == "host")
        devices = [list(self._chips(container, self._at(i))) for i, container in enumerate(containers)]
        wish = self._wish(containers, devices)
        network = self.document.get("networkMode")
        if network == "awsvpc":
            more = ", and its containers do not share localhost (networkMode host does)" if len(containers) > 1 else ""
            here = joined(self.top, "networkMode")
            self.notes.append(f"{here}: awsvpc is mapped to bridge, as there is no interface for each task{more}")
        planned = [
            {
                "name": container["name"],
                "essential": container.get("essential", True),
                "depends_on": [
                    {"container": on["containerName"], "condition": on["condition"]}
                    for on in container.get("dependsOn", ())
                ],
                "all_chips": bool(container.get("resourceRequirements")),
                "chips": devices[i] or None,
                "options": options(container, self._at(i), network, self.volumes)
                | health(container.get("healthCheck"), f"{self._at(i)}.healthCheck"),
            }
            for i, container in enumerate(containers)
        ]
        return {"name": self.document["family"]} | wish | {"containers": planned}

    def _at(self, number: int) -> str:
        """Return the JSON path of a container."""
        return f"{self.where}[{number}]"

    # -- chips ------------------------------------------------------------------------------------------------------

    def _wish(self, containers: Sequence[Object], devices: Sequence[Sequence[Object]]) -> Object:
        """Return what the task asks for: count, chips, all, or nothing."""
        asked = list(self._requirements(containers))
        if len(asked) > 1:
            sentence = f"only one container of a task can have {NEURON}, and {asked[0][0]} is there already"
            raise BadTaskFile(asked[1][0], sentence)
        with_devices = [f"{self._at(i)}.linuxParameters.devices" for i, given in enumerate(devices) if given]
        if asked and with_devices:
            sentence = f"chips are asked for here and by {asked[0][0]}: a task can do one of the two"
            raise BadTaskFile(with_devices[0], sentence)
        every = asked[0][1] == "ALL" if asked else False
        for i, container in enumerate(containers):
            if container.get("privileged") and not every:
                hint = f"ask for all chips (resourceRequirements, {NEURON}, ALL), or leave it out"
                sentence = f"a privileged container can open every chip: {hint}"
                raise BadTaskFile(f"{self._at(i)}.privileged", sentence)
        if asked:
            return {"all": True} if every else {"count": int(asked[0][1])}
        chips = sorted({entry["chip"] for given in devices for entry in given})
        holders: dict[int, list[str]] = {chip: [] for chip in chips}
        for container, given in zip(containers, devices, strict=True):
            for entry in given:
                holders[entry["chip"]].append(container["name"])
        for chip, names in holders.items():
            if len(names) > 1:
                self.notes.append(f"chip {chip} is shared by {' and '.join(names)}: the task has one lease")
        return {"chips": chips} if chips else {}

    def _requirements(self, containers: Sequence[Object]) -> Iterator[tuple[str, str]]:
        """Yield path and value of each wish for chips in resourceRequirements."""
        for i, container in enumerate(containers):
            for j, requirement in enumerate(container.get("resourceRequirements", ())):
                here = f"{self._at(i)}.resourceRequirements[{j}]"
                check_requirement(requirement, here)
                yield here, requirement["value"]

    def _chips(self, container: Object, where: str) -> Iterable[Object]:
        """Return the chips among the devices of a container, each once, with path and permissions inside."""
        found: dict[int, Object] = {}
        paths: dict[str, int] = {}
        for i, device in enumerate(container.get("linuxParameters", {}).get("devices", ())):
            here = f"{where}.linuxParameters.devices[{i}]"
            chip, path = chip_of(device, here), inside(device)
            if chip is None:
                continue
            entry = found.setdefault(chip, {"chip": chip, "path": path, "permissions": ""})
            if entry["path"] != path:
                sentence = f"chip {chip} is mapped twice, as {entry['path']} and as {path}: keep one"
                raise BadTaskFile(f"{here}.containerPath", sentence)
            if paths.setdefault(path, chip) != chip:
                raise BadTaskFile(f"{here}.containerPath", f"another chip is {path} in this container already")
            entry["permissions"] = "".join(c for c in "rwm" if c in entry["permissions"] + letters(device))
        for chip, entry in found.items():
            if not {"r", "w"} <= set(entry["permissions"]):
                sentence = f"chip {chip} is mapped with {entry['permissions']} only: the runtime needs read and write"
                self.notes.append(f"{where}.linuxParameters.devices: {sentence}")
        return found.values()

    # -- volumes ----------------------------------------------------------------------------------------------------

    def _volumes(self) -> Iterator[tuple[str, str]]:
        """Yield each volume of the task with what Docker is to mount: a path of the host, or the name of a volume."""
        seen = set()
        for i, volume in enumerate(self.document.get("volumes", ())):
            here = f"{joined(self.top, 'volumes')}[{i}]"
            name = volume["name"]
            if name in seen:
                raise BadTaskFile(f"{here}.name", f"a volume {name!r} is there already")
            seen.add(name)
            source = volume.get("host", {}).get("sourcePath")
            docker = volume.get("dockerVolumeConfiguration")
            if source and docker:
                raise BadTaskFile(here, "a volume has host or dockerVolumeConfiguration, not both")
            if source:
                if source.startswith("/dev/neuron"):
                    raise BadTaskFile(f"{here}.host.sourcePath", "a chip is asked for in linuxParameters.devices")
                yield name, source
            elif docker and docker.get("scope") == "shared":
                yield name, name
            else:
                own = "-".join(filter(None, (self.document["family"], name, self.mark)))
                self.notes.append(f"{here}: volume {name} is Docker's {own}, made for this task")
                yield name, own


# -- rules between fields ---------------------------------------------------------------------------------------------


def check_names(containers: Sequence[Object], where: str) -> None:
    """Check that each container has a name of its own, and that one is essential."""
    names = [container["name"] for container in containers]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise BadTaskFile(f"{where}[{i}].name", f"a container {name!r} is there already")
    if not any(container.get("essential", True) for container in containers):
        raise BadTaskFile(where, "at least one container must be essential: the task ends with it")


def check_dependencies(containers: Sequence[Object], where: str) -> None:
    """Check that each dependency can come true."""
    by_name = {container["name"]: container for container in containers}
    for i, container in enumerate(containers):
        for j, on in enumerate(container.get("dependsOn", ())):
            here = f"{where}[{i}].dependsOn[{j}]"
            name, condition = on["containerName"], on["condition"]
            if name not in by_name:
                raise BadTaskFile(f"{here}.containerName", f"no container {name!r} (have {', '.join(by_name)})")
            if condition == "HEALTHY" and not by_name[name].get("healthCheck"):
                raise BadTaskFile(f"{here}.condition", f"HEALTHY needs a healthCheck, which {name} does not have")
            if condition in {"COMPLETE", "SUCCESS"} and by_name[name].get("essential", True):
                hint = f"when {name} ends the task does: set its essential to false"
                raise BadTaskFile(f"{here}.condition", f"{condition} can't be asked of an essential container: {hint}")
    left = {c["name"]: {on["containerName"] for on in c.get("dependsOn", ())} for c in containers}
    while ready := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in ready:
            del left[name]
    for i, container in enumerate(containers):
        if container["name"] in left:
            raise BadTaskFile(f"{where}[{i}].dependsOn", f"{', '.join(left)} wait for each other in a circle")


def check_host_ports(containers: Sequence[Object], where: str, *, host: bool) -> None:
    """Check that no port of the host is asked for twice."""
    taken: dict[tuple[int, str], str] = {}
    for i, container in enumerate(containers):
        for j, port in enumerate(container.get("portMappings", ())):
            number = port["containerPort"] if host else port.get("hostPort")
            key = number, port.get("protocol", "tcp")
            if number and key in taken:
                raise BadTaskFile(f"{where}[{i}].portMappings[{j}]", f"port {number} is {taken[key]}'s already")
            taken[key] = container["name"]


def check_requirement(requirement: Object, where: str) -> None:
    """Check one entry of resourceRequirements."""
    kind, value = requirement["type"], requirement["value"]
    if kind != NEURON:
        if kind.lower() == NEURON.lower():
            raise BadTaskFile(f"{where}.type", f"{kind!r} is not possible; ECS writes it {NEURON}")
        hint = f"{NEURON} is what this host has"
        if kind in {"GPU", "InferenceAccelerator"}:
            raise BadTaskFile(f"{where}.type", f"{kind} is not supported: {hint}")
        raise BadTaskFile(f"{where}.type", f"there is no type {kind!r}: {hint}")
    if value == "ALL":
        return
    if value.upper() == "ALL":
        raise BadTaskFile(f"{where}.value", f"{value!r} is not possible; ECS writes it ALL")
    if not re.fullmatch(r"[1-9][0-9]{0,3}", value):
        raise BadTaskFile(f"{where}.value", f'{value!r} is no number of chips: "ALL", or from "1" on')


def chip_of(device: Object, where: str) -> int | None:
    """Return the number of the chip that a device is, or None if it is none. Raises BadTaskFile."""
    path = device["hostPath"]
    found = CHIP.fullmatch(path)
    if not path.startswith("/dev/"):
        raise BadTaskFile(f"{where}.hostPath", f"{path!r} is no device: it must be below /dev/")
    if not found and re.match(r"/dev/neuron[^a-z_/]|/dev/neuron$", path):
        hint = f"one entry for each, as /dev/neuron0, or resourceRequirements with {NEURON}"
        raise BadTaskFile(f"{where}.hostPath", f"{path!r} names no chip: {hint}")
    if path.startswith(("/dev/char", "/dev/block", "/dev/fd")):
        raise BadTaskFile(f"{where}.hostPath", f"{path!r} is a second name of a device: give its own")
    return int(found[1]) if found else None
