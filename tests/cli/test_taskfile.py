"""Task definitions as plans: what is read, and what comes out for the daemon."""

import json
from pathlib import Path
from typing import Any

import pytest

from neurond.cli.ecs.placement import Host
from neurond.cli.ecs.text import BadTaskFile
from neurond.cli.taskfile import TaskFile, read_task

FILES = Path(__file__).parent / "tasks"
TRN1 = Host("trn1.32xlarge", "x86_64")
ALL = [{"type": "NeuronDevice", "value": "ALL"}]

Object = dict[str, Any]


def container(name: str = "app", **fields: Any) -> Object:
    """Return a container definition."""
    return {"name": name, "image": "app:1"} | fields


def definition(*containers: Object, **fields: Any) -> Object:
    """Return a task definition of these containers."""
    return {"family": "job", "containerDefinitions": list(containers) or [container()]} | fields


def read(document: Any, host: Host | None = TRN1) -> TaskFile:
    """Read a task definition that is given as a tree."""
    return read_task(json.dumps(document).encode(), host)


def plan(*containers: Object, **fields: Any) -> Object:
    """Return the plan of a task of these containers."""
    return read(definition(*containers, **fields)).plan


def only(**fields: Any) -> Object:
    """Return what is planned for a container with these fields."""
    (planned,) = plan(container(**fields))["containers"]
    return dict(planned)


def options(**fields: Any) -> Object:
    """Return the options of a container with these fields, but for its image."""
    found: Object = only(**fields)["options"]
    assert found.pop("image") == "app:1"
    return found


def notes(*containers: Object, **fields: Any) -> list[str]:
    """Return the notes on a task of these containers."""
    return read(definition(*containers, **fields)).notes


def refusal(document: Any, host: Host | None = TRN1) -> str:
    """Return the sentence by which a task definition is refused."""
    with pytest.raises(BadTaskFile) as caught:
        read(document, host)
    return str(caught.value)


def refused(**fields: Any) -> str:
    """Return the sentence by which a container is refused for these fields, without the path of the container."""
    sentence = refusal(definition(container(**fields)))
    assert sentence.startswith("containerDefinitions[0].")
    return sentence.removeprefix("containerDefinitions[0].")


def devices(*given: Any) -> Object:
    """Return linuxParameters with these devices; a text is a device with a path only."""
    return {"devices": [{"hostPath": entry} if isinstance(entry, str) else entry for entry in given]}


# -- samples ----------------------------------------------------------------------------------------------------------


def test_a_task_that_asks_for_all_chips() -> None:
    """NeuronDevice ALL on managed instances is a lease of every chip, all of it for one container."""
    found = read_task((FILES / "train.json").read_bytes(), TRN1)
    assert found.plan == {
        "name": "train",
        "all": True,
        "containers": [
            {
                "name": "trainer",
                "essential": True,
                "depends_on": [],
                "all_chips": True,
                "chips": None,
                "options": {
                    "image": "registry.example.org/train:7",
                    "command": ["python", "train.py", "--epochs", "3"],
                    "env": ["FI_PROVIDER=efa"],
                    "network": "bridge",
                },
            }
        ],
    }
    paths = [note.partition(":")[0] for note in found.notes]
    assert paths == ["cpu", "memory", "executionRoleArn", "networkMode"]


def test_a_task_with_all_that_is_supported() -> None:
    """Each field comes out as docker run's option, in its form."""
    found = read_task((FILES / "serve.json").read_bytes(), TRN1, "5a5a")
    fetch, model, proxy = found.plan.pop("containers")
    assert found.plan == {"name": "serve", "chips": [0]}
    assert fetch["options"] == {"image": "fetch:1", "volumes": ["serve-scratch-5a5a:/out"]}
    assert (fetch["essential"], fetch["chips"]) == (False, None)
    assert model == {
        "name": "model",
        "essential": True,
        "depends_on": [{"container": "fetch", "condition": "SUCCESS"}],
        "chips": [{"chip": 0, "path": "/dev/neuron0", "permissions": "rw"}],
        "all_chips": False,
        "options": {
            "image": "model:1",
            "health": {
                "test": ["CMD-SHELL", "test -e /run/ready || exit 1"],
                "interval": 10,
                "timeout": 5,
                "retries": 3,
                "start_period": 0,
            },
            "command": ["--port", "8000"],
            "entrypoint": ["/bin/serve"],
            "env": ["MODE=fast", "EMPTY="],
            "labels": ["team=speech"],
            "volumes": ["/srv/models:/models:ro", "serve-scratch-5a5a:/in"],
            "tmpfs": ["/run:size=16m,noexec,mode=1777"],
            "ulimits": ["memlock=-1:-1"],
            "cap_add": ["IPC_LOCK"],
            "cap_drop": ["NET_RAW"],
            "workdir": "/srv",
            "user": "1000:1000",
            "shm_size": "64m",
            "memory": "4096m",
            "memory_reservation": "2048m",
            "cpu_shares": 512,
            "hostname": "model",
            "add_host": ["db:10.0.0.9"],
            "dns": ["10.0.0.2"],
            "publish": ["8000/tcp", "9000:9000/udp"],
            "init": True,
            "log_driver": "json-file",
            "log_opt": ["max-size=10m"],
            "read_only": True,
            "stop_timeout": 30,
            "devices": ["/dev/infiniband/uverbs0:/dev/infiniband/uverbs0:rwm"],
        },
    }
    assert proxy["depends_on"] == [{"container": "model", "condition": "HEALTHY"}]
    assert [note.partition(":")[0] for note in found.notes] == ["taskRoleArn", "volumes[1]"]


def test_what_describe_task_definition_prints() -> None:
    """Its wrapping, read-only fields, empty lists and nulls are no hindrance, and no note is made of them."""
    found = read_task((FILES / "described.json").read_bytes(), TRN1)
    (planned,) = found.plan["containers"]
    assert (found.plan["name"], found.plan["chips"], found.notes) == ("embed", [4, 5], [])
    assert [chip["permissions"] for chip in planned["chips"]] == ["rwm", "rwm"]
    assert planned["options"] == {"image": "embed:2"}


def test_path_of_an_error_is_that_in_the_file() -> None:
    """In a wrapped task definition the path begins with taskDefinition."""
    document = {"taskDefinition": definition(container(essential="yes"))}
    assert refusal(document).startswith("taskDefinition.containerDefinitions[0].essential: the text 'yes' stands")


# -- chips ------------------------------------------------------------------------------------------------------------


def test_a_task_without_chips() -> None:
    """A task none of whose containers uses a chip asks for none."""
    assert plan().keys() == {"name", "containers"}


def test_a_number_of_chips() -> None:
    """NeuronDevice takes a number too, which ECS does not."""
    found = plan(container(resourceRequirements=[{"type": "NeuronDevice", "value": "4"}]))
    assert (found["count"], found["containers"][0]["all_chips"]) == (4, True)


@pytest.mark.parametrize("value", ["0", "-1", "2.5", "two", "", "${N}", "99999", "01"])
def test_what_is_no_number_of_chips(value: str) -> None:
    """A value that is neither ALL nor a number of chips is refused."""
    sentence = refused(resourceRequirements=[{"type": "NeuronDevice", "value": value}])
    assert sentence.startswith(f"resourceRequirements[0].value: {value!r} is no number of chips")


@pytest.mark.parametrize(
    ("kind", "value", "sentence"),
    [
        ("NeuronDevice", "all", "value: 'all' is not possible; ECS writes it ALL"),
        ("NeuronDevice", 2, 'value: the number 2 stands where a text belongs: write "2", in quotes'),
        ("neurondevice", "ALL", "type: 'neurondevice' is not possible; ECS writes it NeuronDevice"),
        ("GPU", "1", "type: GPU is not supported"),
        ("InferenceAccelerator", "d", "type: InferenceAccelerator is not supported"),
        ("TPU", "1", "type: there is no type 'TPU'"),
    ],
)
def test_requirements_that_are_refused(kind: str, value: Any, sentence: str) -> None:
    """Another type, or the right one in the wrong case, is refused by name and never dropped."""
    found = refused(resourceRequirements=[{"type": kind, "value": value}])
    assert found.startswith(f"resourceRequirements[0].{sentence}")


def test_all_is_for_one_container() -> None:
    """Two containers with NeuronDevice are refused, as ECS does."""
    document = definition(container("a", resourceRequirements=ALL), container("b", resourceRequirements=ALL))
    assert refusal(document) == (
        "containerDefinitions[1].resourceRequirements[0]: only one container of a task can have NeuronDevice, and "
        "containerDefinitions[0].resourceRequirements[0] is there already"
    )


@pytest.mark.parametrize("same", [True, False])
def test_all_and_devices_exclude_each_other(*, same: bool) -> None:
    """NeuronDevice together with a chip in devices is refused, in the same container and in another."""
    by_device = {"linuxParameters": devices("/dev/neuron0")}
    containers = [container("a", resourceRequirements=ALL, **(by_device if same else {}))]
    containers += [] if same else [container("b", **by_device)]
    assert refusal(definition(*containers)).startswith(
        f"containerDefinitions[{len(containers) - 1}].linuxParameters.devices: chips are asked for here and by"
    )


def test_all_goes_with_other_devices() -> None:
    """Nodes that are no chips do not count as chips beside NeuronDevice."""
    found = plan(container(resourceRequirements=ALL, linuxParameters=devices("/dev/infiniband/uverbs0")))
    assert found["all"] is True
    assert found["containers"][0]["options"]["devices"] == ["/dev/infiniband/uverbs0:/dev/infiniband/uverbs0:rwm"]


@pytest.mark.parametrize(
    ("permissions", "letters"),
    [
        (None, "rwm"),
        ([], "rwm"),
        (["read", "write"], "rw"),
        (["write", "read"], "rw"),
        (["mknod", "write", "read"], "rwm"),
        (["read", "read", "write"], "rw"),
    ],
)
def test_permissions(permissions: list[str] | None, letters: str) -> None:
    """Missing and empty permissions are all three, as ECS has it; the order does not matter."""
    found = only(linuxParameters=devices({"hostPath": "/dev/neuron3", "permissions": permissions}))
    assert found["chips"] == [{"chip": 3, "path": "/dev/neuron3", "permissions": letters}]


def test_a_chip_for_reading_only_is_noted() -> None:
    """Permission to read alone is passed on, with a note that the runtime needs more."""
    job = container(linuxParameters=devices({"hostPath": "/dev/neuron3", "permissions": ["read"]}))
    assert plan(job)["containers"][0]["chips"][0]["permissions"] == "r"
    (note,) = notes(job)
    assert note.endswith("linuxParameters.devices: chip 3 is mapped with r only: the runtime needs read and write")


def test_other_devices_for_reading_only_are_not_noted() -> None:
    """What a node that is no chip needs is not ours to say."""
    job = container(linuxParameters=devices({"hostPath": "/dev/fuse", "permissions": ["read"]}))
    assert notes(job) == []
    assert plan(job)["containers"][0]["options"]["devices"] == ["/dev/fuse:/dev/fuse:r"]


def test_permissions_in_capitals_are_refused_with_a_hint() -> None:
    """CloudFormation's spelling gets the right one."""
    sentence = refused(linuxParameters=devices({"hostPath": "/dev/neuron0", "permissions": ["READ"]}))
    assert sentence == "linuxParameters.devices[0].permissions[0]: 'READ' is not possible; ECS writes it read"


def test_efa_beside_chips() -> None:
    """Two chips and two EFA nodes: the chips are leased, the nodes are passed on."""
    given = devices("/dev/neuron0", "/dev/neuron1", "/dev/infiniband/uverbs0", "/dev/infiniband/uverbs1")
    found = plan(container(linuxParameters=given))
    assert found["chips"] == [0, 1]
    assert len(found["containers"][0]["options"]["devices"]) == 2


def test_a_chip_given_twice_is_one() -> None:
    """The same chip twice in a container is mapped once, with the permissions of both."""
    twice = devices(
        {"hostPath": "/dev/neuron2", "permissions": ["read"]}, {"hostPath": "/dev/neuron2", "permissions": ["write"]}
    )
    assert only(linuxParameters=twice)["chips"] == [{"chip": 2, "path": "/dev/neuron2", "permissions": "rw"}]


def test_a_chip_at_two_places_is_refused() -> None:
    """The same chip under two names, or two chips under one, is refused."""
    sentence = refused(linuxParameters=devices("/dev/neuron2", {"hostPath": "/dev/neuron2", "containerPath": "/dev/x"}))
    assert sentence.startswith("linuxParameters.devices[1].containerPath: chip 2 is mapped twice")
    sentence = refused(
        linuxParameters=devices("/dev/neuron2", {"hostPath": "/dev/neuron3", "containerPath": "/dev/neuron2"})
    )
    assert sentence.startswith("linuxParameters.devices[1].containerPath: another chip is /dev/neuron2")


def test_a_chip_under_another_name() -> None:
    """A chip may be mapped under another path."""
    found = only(linuxParameters=devices({"hostPath": "/dev/neuron4", "containerPath": "/dev/neuron0"}))
    assert found["chips"] == [{"chip": 4, "path": "/dev/neuron0", "permissions": "rwm"}]


def test_containers_share_a_chip() -> None:
    """Two containers that name the same chip share it: the task has one lease, which is noted."""
    both = [
        container("a", linuxParameters=devices("/dev/neuron1", "/dev/neuron0")),
        container("b", linuxParameters=devices("/dev/neuron1")),
    ]
    assert plan(*both)["chips"] == [0, 1]
    assert notes(*both) == ["chip 1 is shared by a and b: the task has one lease"]


def test_chips_of_all_containers_are_one_lease() -> None:
    """One container with a chip and one with two are a single wish for three; it is served whole or not at all."""
    found = plan(
        container("a", linuxParameters=devices("/dev/neuron0")),
        container("b", linuxParameters=devices("/dev/neuron2", "/dev/neuron1")),
        container("sidecar"),
    )
    assert found["chips"] == [0, 1, 2]
    assert [len(c["chips"] or ()) for c in found["containers"]] == [1, 2, 0]


def test_whether_a_chip_exists_is_the_daemons_to_say() -> None:
    """/dev/neuron99 is asked for, as only the daemon knows what there is."""
    assert plan(container(linuxParameters=devices("/dev/neuron99")))["chips"] == [99]


@pytest.mark.parametrize(
    "path",
    [
        "/dev/neuron*",
        "/dev/neuron[0-3]",
        "/dev/neuron0-3",
        "/dev/neuron",
        "/dev/neuron00",
        "/dev/neuron0,1",
        "/dev/neuronALL",
    ],
)
def test_globs_and_ranges_are_no_devices(path: str) -> None:
    """A path that means several chips, or none, is refused with what to write."""
    assert refused(linuxParameters=devices(path)).startswith(
        f"linuxParameters.devices[0].hostPath: {path!r} names no chip"
    )


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/dev/../dev/neuron0", "must be a plain path"),
        ("/dev//neuron0", "must be a plain path"),
        ("/dev/./neuron0", "must be a plain path"),
        ("dev/neuron0", "is no absolute path"),
        ("/dev", "is no device"),
        ("/dev/", "is no device"),
        ("/tmp/neuron0", "is no device"),
        ("/dev/char/243:0", "has a colon"),
        ("/dev/char/x", "is a second name"),
        ("/dev/neuron${N}", "still has a placeholder"),
        ("/dev/{{chip}}", "still has a placeholder"),
    ],
)
def test_devices_that_are_refused(path: str, why: str) -> None:
    """A device has one plain name below /dev: no way round that hides which chip it is."""
    assert why in refused(linuxParameters=devices(path)).partition("hostPath: ")[2]


def test_privileged_needs_all_chips() -> None:
    """A privileged container can open every chip, so its task must hold every chip."""
    sentence = "containerDefinitions[{}].privileged: a privileged container can open every chip: ask for all chips"
    assert refusal(definition(container(privileged=True))).startswith(sentence.format(0))
    one = container(privileged=True, linuxParameters=devices("/dev/neuron0"))
    assert refusal(definition(container("a"), one)).startswith(sentence.format(1))
    four = container(privileged=True, resourceRequirements=[{"type": "NeuronDevice", "value": "4"}])
    assert refusal(definition(four)).startswith(sentence.format(0))
    assert options(privileged=True, resourceRequirements=ALL) == {"privileged": True}
    beside = plan(container("a", privileged=True), container("b", resourceRequirements=ALL))
    assert beside["containers"][0]["options"]["privileged"] is True


def test_the_hooks_variable_is_refused() -> None:
    """AWS_NEURON_VISIBLE_DEVICES would ask for chips behind the ledger's back."""
    sentence = refused(environment=[{"name": "AWS_NEURON_VISIBLE_DEVICES", "value": "0"}])
    assert sentence.startswith("environment[0].name: AWS_NEURON_VISIBLE_DEVICES asks AWS's hook")


def test_visible_cores_are_passed_on() -> None:
    """NEURON_RT_VISIBLE_CORES is the daemon's to judge."""
    assert options(environment=[{"name": "NEURON_RT_VISIBLE_CORES", "value": "0-3"}]) == {
        "env": ["NEURON_RT_VISIBLE_CORES=0-3"]
    }


# -- between containers -----------------------------------------------------------------------------------------------


def depending(*pairs: tuple[str, str], condition: str = "START", **first: Any) -> Object:
    """Return a task of containers a, b, c, in which the first of each pair depends on the second."""
    return definition(
        *(
            container(
                name,
                dependsOn=[{"containerName": on, "condition": condition} for who, on in pairs if who == name],
                **(first if name == "a" else {}),
            )
            for name in "abc"
        )
    )


def test_dependencies_in_a_circle_are_refused() -> None:
    """Containers that wait for each other, or one for itself, would never start."""
    circle = refusal(depending(("a", "b"), ("b", "c"), ("c", "a")))
    assert circle == "containerDefinitions[0].dependsOn: a, b, c wait for each other in a circle"
    assert "a wait for each other" in refusal(depending(("a", "a")))
    assert read(depending(("a", "b"), ("a", "c"), ("b", "c"))).plan["containers"][0]["depends_on"] == [
        {"container": "b", "condition": "START"},
        {"container": "c", "condition": "START"},
    ]


def test_dependency_on_nobody_is_refused() -> None:
    """A dependency names a container of the task."""
    sentence = refusal(depending(("b", "x")))
    assert sentence == "containerDefinitions[1].dependsOn[0].containerName: no container 'x' (have a, b, c)"


def test_healthy_needs_a_health_check() -> None:
    """HEALTHY can only be asked of a container with a health check."""
    sentence = refusal(depending(("b", "a"), condition="HEALTHY"))
    assert sentence.startswith("containerDefinitions[1].dependsOn[0].condition: HEALTHY needs a healthCheck")
    read(depending(("b", "a"), condition="HEALTHY", healthCheck={"command": ["CMD", "true"]}))


@pytest.mark.parametrize("condition", ["SUCCESS", "COMPLETE"])
def test_an_essential_container_is_not_waited_for_to_end(condition: str) -> None:
    """SUCCESS and COMPLETE can't be asked of an essential container, as the task ends with it."""
    sentence = refusal(depending(("b", "a"), condition=condition))
    assert sentence.startswith(f"containerDefinitions[1].dependsOn[0].condition: {condition} can't be asked")
    read(depending(("b", "a"), condition=condition, essential=False))


def test_condition_in_lower_case_is_refused_with_a_hint() -> None:
    """A condition in the wrong case gets the right one."""
    assert refusal(depending(("b", "a"), condition="healthy")).endswith(
        "'healthy' is not possible; ECS writes it HEALTHY"
    )


def test_names_are_unique_and_one_is_essential() -> None:
    """Two containers of a name, or none that is essential, are refused."""
    assert refusal(definition(container("a"), container("a"))) == (
        "containerDefinitions[1].name: a container 'a' is there already"
    )
    assert "at least one container must be essential" in refusal(definition(container(essential=False)))


def test_a_task_has_one_to_ten_containers() -> None:
    """None and eleven are refused, as ECS does."""
    assert "it has 0 entries, and 1 to 10 belong here" in refusal({"family": "job", "containerDefinitions": []})
    assert "it has 11 entries" in refusal(definition(*(container(f"c{n}") for n in range(11))))


# -- network ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "network"), [("host", "host"), ("bridge", "bridge"), ("none", "none"), ("awsvpc", "bridge")]
)
def test_network_modes(mode: str, network: str) -> None:
    """A network mode is Docker's of that name, but for awsvpc, which is mapped to bridge with a note."""
    document = definition(networkMode=mode)
    assert read(document).plan["containers"][0]["options"]["network"] == network
    assert [note.partition(":")[0] for note in read(document).notes] == (["networkMode"] if mode == "awsvpc" else [])


def test_awsvpc_with_several_containers_says_what_they_lose() -> None:
    """Containers of an awsvpc task share localhost, and here they don't."""
    (note,) = notes(container("a"), container("b"), networkMode="awsvpc")
    assert "do not share localhost" in note


@pytest.mark.parametrize(
    ("mode", "port", "published"),
    [
        ("bridge", {"containerPort": 80}, ["80/tcp"]),
        ("bridge", {"containerPort": 80, "hostPort": 0}, ["80/tcp"]),
        ("bridge", {"containerPort": 80, "hostPort": 8080}, ["8080:80/tcp"]),
        ("bridge", {"containerPort": 53, "hostPort": 53, "protocol": "udp"}, ["53:53/udp"]),
        ("awsvpc", {"containerPort": 80, "hostPort": 80}, ["80:80/tcp"]),
        ("host", {"containerPort": 80, "hostPort": 80}, []),
        ("host", {"containerPort": 80}, []),
    ],
)
def test_ports(mode: str, port: Object, published: list[str]) -> None:
    """A port of the host that is 0 or absent is any that is free; with the host's network there is none to publish."""
    found = plan(container(portMappings=[port]), networkMode=mode)["containers"][0]["options"]
    assert found.get("publish", []) == published


@pytest.mark.parametrize("mode", ["host", "awsvpc"])
def test_ports_must_agree(mode: str) -> None:
    """With networkMode host and awsvpc a port of the host is that of the container."""
    document = definition(container(portMappings=[{"containerPort": 80, "hostPort": 8080}]), networkMode=mode)
    assert refusal(document).startswith(f"containerDefinitions[0].portMappings[0].hostPort: with networkMode {mode}")


def test_no_network_no_ports() -> None:
    """Ports with networkMode none are refused."""
    document = definition(container(portMappings=[{"containerPort": 80}]), networkMode="none")
    assert "a container has no ports" in refusal(document)


def test_a_port_of_the_host_is_taken_once() -> None:
    """The same port of the host twice is refused; that of another protocol is another."""

    def ports(protocol: str) -> Object:
        return definition(
            container("a", portMappings=[{"containerPort": 80, "hostPort": 80}]),
            container("b", portMappings=[{"containerPort": 81, "hostPort": 80, "protocol": protocol}]),
        )

    assert refusal(ports("tcp")) == "containerDefinitions[1].portMappings[0]: port 80 is a's already"
    read(ports("udp"))


# -- volumes ----------------------------------------------------------------------------------------------------------


def mounted(volume: Object, **mount: Any) -> Object:
    """Return a task with a volume that is mounted at /data."""
    point = {"sourceVolume": "v", "containerPath": "/data"} | mount
    return definition(container(mountPoints=[point]), volumes=[{"name": "v"} | volume])


@pytest.mark.parametrize(
    ("volume", "source"),
    [
        ({"host": {"sourcePath": "/srv/data"}}, "/srv/data"),
        ({"host": {"sourcePath": "/srv/data/"}}, "/srv/data"),
        ({"host": {}}, "job-v-77"),
        ({}, "job-v-77"),
        ({"dockerVolumeConfiguration": {"scope": "task", "driver": "local"}}, "job-v-77"),
        ({"dockerVolumeConfiguration": {"scope": "shared", "autoprovision": True}}, "v"),
    ],
)
def test_volumes(volume: Object, source: str) -> None:
    """A volume is a path of the host, or Docker's; one without a path is the task's own, with a name of its own."""
    found = read_task(json.dumps(mounted(volume)).encode(), TRN1, "77").plan
    assert found["containers"][0]["options"]["volumes"] == [f"{source}:/data"]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/srv/../etc", "must be a plain path"),
        ("../etc", "is no absolute path"),
        ("srv", "is no absolute path"),
        ("", "is no absolute path"),
        ("/srv:/etc", "has a colon"),
        ("C:\\data", "is no absolute path"),
        ("/dev/neuron0", "a chip is asked for in linuxParameters.devices"),
    ],
)
def test_paths_of_the_host_that_are_refused(path: str, why: str) -> None:
    """A path of the host is absolute and leads nowhere else."""
    sentence = refusal(mounted({"host": {"sourcePath": path}}))
    assert sentence.startswith("volumes[0].host.sourcePath: ")
    assert why in sentence


@pytest.mark.parametrize(
    ("volume", "path"),
    [
        ({"efsVolumeConfiguration": {"fileSystemId": "fs-1"}}, "efsVolumeConfiguration"),
        ({"configuredAtLaunch": True}, "configuredAtLaunch"),
        ({"dockerVolumeConfiguration": {"driver": "rexray/ebs"}}, "dockerVolumeConfiguration.driver"),
        ({"dockerVolumeConfiguration": {"driverOpts": {"o": "x"}}}, "dockerVolumeConfiguration.driverOpts"),
    ],
)
def test_volumes_that_are_refused(volume: Object, path: str) -> None:
    """Volumes of AWS's services, and of other drivers, are refused by name."""
    assert refusal(mounted(volume)).startswith(f"volumes[0].{path}: ")


def test_mount_of_an_unknown_volume() -> None:
    """What is mounted has to be among the volumes."""
    assert refusal(mounted({}, sourceVolume="w")) == (
        "containerDefinitions[0].mountPoints[0].sourceVolume: no volume 'w' (volumes: v)"
    )


def test_mount_paths() -> None:
    """Two mounts at one place, and a place that is no plain path, are refused."""
    point = {"sourceVolume": "v", "containerPath": "/data"}
    twice = definition(container(mountPoints=[point, point]), volumes=[{"name": "v"}])
    assert refusal(twice).endswith("mountPoints[1].containerPath: /data is mounted twice")
    assert "must be a plain path" in refusal(mounted({}, containerPath="/data/.."))


# -- one container ----------------------------------------------------------------------------------------------------


def test_what_is_not_given_is_left_out() -> None:
    """The options of a container hold nothing that the file does not say."""
    assert options() == {}


@pytest.mark.parametrize(("units", "shares"), [(1, 2), (2, 2), (1024, 1024)])
def test_cpu_units_are_shares(units: int, shares: int) -> None:
    """CPU units are Docker's shares, of which the kernel has at least 2."""
    assert options(cpu=units) == {"cpu_shares": shares}


def test_reservation_is_less_than_the_limit() -> None:
    """A reservation of all the memory, or more, is refused."""
    assert refused(memory=64, memoryReservation=64).startswith("memoryReservation: 64 MiB must be less than memory")


@pytest.mark.parametrize(
    ("field", "value", "fine"),
    [
        ("interval", 4, False), ("interval", 5, True), ("interval", 300, True), ("interval", 301, False),
        ("timeout", 1, False), ("timeout", 2, True), ("timeout", 60, True), ("timeout", 61, False),
        ("retries", 0, False), ("retries", 1, True), ("retries", 10, True), ("retries", 11, False),
        ("startPeriod", -1, False), ("startPeriod", 0, True), ("startPeriod", 300, True), ("startPeriod", 301, False),
    ],
)  # fmt: skip
def test_limits_of_a_health_check(field: str, value: int, *, fine: bool) -> None:
    """The times of a health check have ECS's limits."""
    check = {"command": ["CMD", "true"], field: value}
    if fine:
        assert value in only(healthCheck=check)["options"]["health"].values()
    else:
        assert refused(healthCheck=check).startswith(f"healthCheck.{field}: {value} is not possible: ")


@pytest.mark.parametrize(
    "command", [[], ["curl", "x"], ["CMD"], ["CMD-SHELL", "a", "b"], ["CMD-SHELL, curl"], ["NONE"]]
)
def test_command_of_a_health_check(command: list[str]) -> None:
    """The command says how it is to be run."""
    assert refused(healthCheck={"command": command}).startswith("healthCheck.command: ")


@pytest.mark.parametrize("driver", ["awslogs", "awsfirelens", "splunk", "syslog", "JSON-FILE"])
def test_log_drivers_that_are_refused(driver: str) -> None:
    """Log drivers but json-file and journald are refused by name."""
    sentence = refused(logConfiguration={"logDriver": driver, "options": {"awslogs-group": "x"}})
    assert sentence.startswith(f"logConfiguration.logDriver: {driver} is not supported: use json-file or journald")


def test_journald() -> None:
    """The journal is fine as a log driver."""
    assert options(logConfiguration={"logDriver": "journald"}) == {"log_driver": "journald"}


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"ulimits": [{"name": "nofile", "softLimit": 9, "hardLimit": 8}]}, "ulimits[0].softLimit"),
        ({"ulimits": [{"name": "nofile", "softLimit": -1, "hardLimit": 8}]}, "ulimits[0].softLimit"),
        ({"ulimits": [{"name": "files", "softLimit": 1, "hardLimit": 8}]}, "ulimits[0].name"),
        ({"linuxParameters": {"capabilities": {"add": ["ipc_lock"]}}}, "linuxParameters.capabilities.add[0]"),
        ({"dockerLabels": {"io.neurond.lease": "x"}}, "dockerLabels.io.neurond.lease"),
        ({"dockerLabels": {"a=b": "x"}}, "dockerLabels.a=b"),
        ({"dockerLabels": {"a": 1}}, "dockerLabels.a"),
        ({"environment": [{"name": "A=B", "value": ""}]}, "environment[0].name"),
        ({"environment": [{"name": "A", "value": 1}]}, "environment[0].value"),
        ({"environment": [{"name": "A", "value": "a\0b"}]}, "environment[0].value"),
        ({"environment": [{"name": "A", "value": "\ud800"}]}, "environment[0].value"),
        ({"environment": [{"name": "A"}]}, "environment[0].value"),
        ({"environment": {"A": "b"}}, "environment"),
        ({"command": "python train.py"}, "command"),
        ({"command": [1]}, "command[0]"),
        ({"image": "${IMAGE}"}, "image"),
        ({"image": "{{ image }}"}, "image"),
        ({"image": "<ACCOUNT>.dkr.ecr.eu-north-1.amazonaws.com/x"}, "image"),
        ({"image": "my image"}, "image"),
        ({"image": ""}, "image"),
        ({"image": None}, "image"),
        ({"name": "my app"}, "name"),
        ({"memory": "512"}, "memory"),
        ({"memory": 512.0}, "memory"),
        ({"memory": True}, "memory"),
        ({"memory": 10**30}, "memory"),
        ({"essential": "true"}, "essential"),
        ({"essential": 1}, "essential"),
        ({"workingDirectory": "srv"}, "workingDirectory"),
        ({"stopTimeout": -1}, "stopTimeout"),
        ({"portMappings": [{"containerPort": "80"}]}, "portMappings[0].containerPort"),
        ({"portMappings": [{"containerPort": 65536}]}, "portMappings[0].containerPort"),
        ({"linuxParameters": []}, "linuxParameters"),
        ({"linuxParameters": {"tmpfs": [{"containerPath": "/x"}]}}, "linuxParameters.tmpfs[0].size"),
        ({"linuxParameters": {"devices": [7]}}, "linuxParameters.devices[0]"),
        ({"linuxParameters": {"devices": [{}]}}, "linuxParameters.devices[0].hostPath"),
        ({"pseudoTerminal": True}, "pseudoTerminal"),
        ({"interactive": True}, "interactive"),
    ],
)
def test_values_that_are_refused(fields: Object, path: str) -> None:
    """A value that ECS or Docker would not take is refused with its path."""
    assert refused(**fields).startswith(f"{path}: ")


def test_a_number_in_quotes_gets_a_hint() -> None:
    """Where ECS has a whole number, one in quotes is refused with what to write."""
    assert refused(memory="512") == (
        "memory: the text '512' stands where a whole number belongs: write 512, without quotes"
    )


def test_a_capability_in_dockers_spelling_gets_a_hint() -> None:
    """A capability is written in capitals."""
    assert refused(linuxParameters={"capabilities": {"add": ["cap_ipc_lock"]}}).endswith(": write IPC_LOCK")


def test_a_shells_variables_in_a_command_are_no_placeholders() -> None:
    """`${...}` is a placeholder in an image, and a shell's own in a command."""
    assert options(command=["sh", "-c", "echo ${HOME}"]) == {"command": ["sh", "-c", "echo ${HOME}"]}
