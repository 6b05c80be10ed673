"""ECS task definitions with a real engine: one lease, several containers, their order and their end."""

import json
import signal
import subprocess
from typing import Any

import pytest

from tests.containers.support import IMAGE, STUBBORN, held, inspect, ours, wait_until_free
from tests.harness import Daemon, PrivateEngine, eventually

pytestmark = pytest.mark.docker

ALL = {"resourceRequirements": [{"type": "NeuronDevice", "value": "ALL"}]}
FOUR = {"resourceRequirements": [{"type": "NeuronDevice", "value": "4"}]}
PROBE = """for i in 2 3; do [ -c /dev/neuron$i ] && (: <> /dev/neuron$i) && echo $i; done
echo cores $NEURON_RT_VISIBLE_CORES"""


def task(*containers: dict[str, Any], **more: Any) -> str:
    """Return a task definition whose containers are of the test's image."""
    defined = [{"image": IMAGE, "stopTimeout": 2, **container} for container in containers]
    return json.dumps({"family": "job", "networkMode": "none", "containerDefinitions": defined, **more})


def sh(script: str) -> list[str]:
    """Return a command that runs a script."""
    return ["sh", "-c", script]


def chip(number: int, inside: str | None = None, *more: int) -> dict[str, Any]:
    """Return what gives a container a chip by its path, under another path inside if one is given, and more chips."""
    device = {"hostPath": f"/dev/neuron{number}"} | ({"containerPath": inside} if inside else {})
    return {"linuxParameters": {"devices": [device, *({"hostPath": f"/dev/neuron{other}"} for other in more)]}}


def test_all_chips_are_one_lease(shared_daemon: Daemon) -> None:
    """A task with NeuronDevice ALL has all chips while it runs, its output and exit code are ours, and then none."""
    script = "ls /dev | grep -c neuron; echo $NEUROND_CHIPS; exit 7"
    done = shared_daemon.cli("task", "run", "-", stdin=task({"name": "a", "command": sh(script), **ALL}))
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == "16\n" + ",".join(map(str, range(16))) + "\n"
    wait_until_free(shared_daemon)


def test_containers_start_in_the_order_of_what_they_depend_on(shared_daemon: Daemon) -> None:
    """Who depends on the success of another starts after it, and the first essential one to end ends the task."""
    definition = task(
        {"name": "main", "command": sh("echo main; exit 3"), **FOUR, "dependsOn": depends("init", "SUCCESS")},
        {"name": "init", "command": sh("sleep 0.3; echo init"), "essential": False},
        {"name": "side", "command": ["sleep", "600"], "essential": False, "dependsOn": depends("main", "START")},
    )
    done = shared_daemon.cli("task", "run", "-", stdin=definition)
    assert (done.returncode, done.stdout) == (3, "init | init\nmain | main\n")
    assert "init has ended with 0" in done.stderr
    wait_until_free(shared_daemon)


def depends(name: str, condition: str) -> list[dict[str, str]]:
    """Return a dependency."""
    return [{"containerName": name, "condition": condition}]


def test_a_container_waits_until_another_is_healthy(shared_daemon: Daemon) -> None:
    """HEALTHY is the engine's word, by the health check of the task definition."""
    check = {"command": ["CMD-SHELL", "test -e /ready"], "interval": 5, "timeout": 2, "retries": 3}
    definition = task(
        {"name": "server", "command": sh("echo up; : > /ready; sleep 600"), "healthCheck": check, **FOUR},
        {"name": "client", "command": sh("echo now"), "dependsOn": depends("server", "HEALTHY")},
    )
    done = shared_daemon.cli("task", "run", "-", stdin=definition)
    assert (done.returncode, done.stdout) == (0, "server | up\nclient | now\n"), done.stderr
    wait_until_free(shared_daemon)


def test_what_it_needs_fails(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """If a container that has to succeed does not, the task fails with a sentence, and nothing is left of it."""
    definition = task(
        {"name": "main", "command": ["true"], **FOUR, "dependsOn": depends("init", "SUCCESS")},
        {"name": "init", "command": ["false"], "essential": False},
    )
    done = shared_daemon.cli("task", "run", "-", stdin=definition)
    assert done.returncode == 125
    assert "container main needs init, which ended with 1" in done.stderr
    wait_until_free(shared_daemon)
    assert not ours(engine)


@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_a_container_that_can_not_start_undoes_the_task(
    shared_daemon: Daemon, engine: PrivateEngine, first: bool
) -> None:
    """If one container can't be started, whichever it is, none is left, and no chip is held."""
    containers: list[dict[str, Any]] = [
        {"name": "bad", "command": ["no-such-command"], **FOUR},
        {"name": "good", "command": ["sleep", "600"]},
    ]
    done = shared_daemon.cli("task", "run", "-", stdin=task(*containers[:: 1 if first else -1]))
    assert done.returncode == 127
    assert "executable file not found" in done.stderr
    wait_until_free(shared_daemon)
    assert not ours(engine)


def test_two_containers_share_a_chip_until_the_last_ends(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """Containers that name the same chip have it together; each has only its own, under the path that it asked for."""
    definition = task(
        {"name": "a", "command": sh(PROBE + "; sleep 600"), **chip(2)},
        {"name": "b", "command": ["sleep", "600"], "essential": False, **chip(2, "/dev/neuron0")},
        {"name": "c", "command": sh(PROBE), "essential": False, **chip(3, None, 0, 1)},
    )
    began = shared_daemon.cli("task", "run", "--detach", "-", stdin=definition)
    assert began.returncode == 0, began.stderr
    lease = began.stdout.strip()
    assert held(shared_daemon) == {0, 1, 2, 3}
    rows = {row["task_container"]: row for row in shared_daemon.call("ListContainers")["containers"]}
    assert {name: row["chips"] for name, row in rows.items()} == {"a": [2], "b": [2], "c": [0, 1, 3]}
    eventually(lambda: "cores" in engine.docker("logs", rows["a"]["container_id"]).stdout)
    assert engine.docker("logs", rows["a"]["container_id"]).stdout == "2\ncores\n"
    devices = inspect(engine, rows["b"]["container_id"])["HostConfig"]["Devices"]
    assert [(one["PathInContainer"], one["CgroupPermissions"]) for one in devices] == [("/dev/neuron0", "rwm")]
    engine.docker("kill", rows["b"]["container_id"])
    assert [row["lease"] for row in shared_daemon.leases()] == [lease]
    shared_daemon.call("StopTask", task=lease)
    wait_until_free(shared_daemon)
    assert not any(inspect(engine, row["container_id"])["State"]["Running"] for row in rows.values())


def test_a_task_is_granted_as_a_whole_or_not_at_all(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """While one of the chips is taken, nothing of the task is started; the holder is named."""
    holder = shared_daemon.call("Acquire", chips=[2], ttl=60)["lease"]
    containers = [{"name": f"c{number}", "command": ["true"], **chip(number)} for number in range(4)]
    done = shared_daemon.cli("task", "run", "--no-wait", "-", stdin=task(*containers))
    assert (done.returncode, done.stdout) == (75, "")
    assert holder in done.stderr
    assert held(shared_daemon) == {2}
    assert not ours(engine)
    shared_daemon.call("Release", lease=holder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_stops_all_containers(shared_daemon: Daemon, engine: PrivateEngine, number: signal.Signals) -> None:
    """SIGINT and SIGTERM to the command stop every container of the task."""
    definition = task({"name": "a", "command": ["sleep", "600"], **FOUR}, {"name": "b", "command": ["sleep", "600"]})
    path = shared_daemon.directory / "task.json"
    path.write_text(definition)
    process = shared_daemon.spawn("task", "run", str(path))
    eventually(lambda: len(ours(engine, "--filter", "status=running")) == 2)
    process.send_signal(number)
    process.communicate()
    assert process.returncode == 137  # they do not hear SIGTERM, being process 1
    wait_until_free(shared_daemon)


def test_a_task_survives_its_client(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """When the command is killed the containers go on, and the lease with them."""
    path = shared_daemon.directory / "task.json"
    path.write_text(task({"name": "a", "command": list(STUBBORN[1:]), **FOUR}))
    process = shared_daemon.spawn("task", "run", str(path))
    (container,) = eventually(lambda: ours(engine, "--filter", "status=running"))
    process.kill()
    process.communicate()
    assert held(shared_daemon) == {0, 1, 2, 3}
    assert inspect(engine, container)["State"]["Running"]
    engine.docker("kill", container)
    wait_until_free(shared_daemon)


@pytest.mark.parametrize("point", ["container.created:2", "container.started:1", "container.bound:1"])
def test_a_crash_leaves_what_runs_leased(docker_daemon: Daemon, engine: PrivateEngine, point: str) -> None:
    """After kill -9 of the daemon in the middle of a start, what runs is leased, what does not run is removed."""
    docker_daemon.kill()
    docker_daemon.env["NEUROND_CRASH_AT"] = point
    docker_daemon.start()
    definition = task(
        {"name": "a", "command": list(STUBBORN[1:]), **FOUR},
        {"name": "b", "command": list(STUBBORN[1:]), "dependsOn": depends("a", "START")},
    )
    process = docker_daemon.spawn("task", "run", "/dev/stdin", stdin=-1)
    process.communicate(definition)
    assert docker_daemon.process is not None
    docker_daemon.process.wait(30)
    docker_daemon.env.clear()
    docker_daemon.start()
    running = ours(engine, "--filter", "status=running")
    assert len(running) == 1
    assert held(docker_daemon) == {0, 1, 2, 3}
    eventually(lambda: ours(engine) == running)
    engine.docker("rm", "--force", *running)
    wait_until_free(docker_daemon)


def test_no_container_starts_with_fewer_chips(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """A container that has all chips of its task does not start when one of them has vanished meanwhile."""
    definition = task(
        {"name": "a", "command": sh("sleep 1"), "essential": False},
        {"name": "b", "command": sh("ls /dev | grep -c neuron"), **FOUR, "dependsOn": depends("a", "SUCCESS")},
    )
    process = shared_daemon.spawn("task", "run", "/dev/stdin", stdin=-1)
    assert process.stdin is not None
    process.stdin.write(definition)
    process.stdin.close()
    process.stdin = None
    eventually(lambda: ours(engine, "--filter", "status=running"))
    shared_daemon.call("Simulate", chip=2, action="remove")
    try:
        output, errors = process.communicate(timeout=30)
        assert (process.returncode, output) == (66, "")
        assert "chip 2 has vanished from the host" in errors
        eventually(lambda: not ours(engine))
        eventually(shared_daemon.all_free)
    finally:
        shared_daemon.call("Simulate", chip=2, action="add")
        eventually(lambda: 2 in shared_daemon.states())


def test_a_task_of_an_earlier_daemon_can_be_stopped(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """After a restart of the daemon the task is still there, leased, described, and can be stopped."""
    began = docker_daemon.cli("task", "run", "-d", "-", stdin=task({"name": "a", "command": ["sleep", "600"], **FOUR}))
    docker_daemon.kill()
    docker_daemon.start()
    lease = began.stdout.strip()
    (described,) = json.loads(docker_daemon.cli("task", "describe").stdout)["tasks"]
    assert (described["taskArn"], described["lastStatus"]) == (f"neurond:task/{lease}", "RUNNING")
    assert described["containers"][0]["neuronDeviceIds"] == ["0", "1", "2", "3"]
    docker_daemon.call("StopTask", task=lease)
    wait_until_free(docker_daemon)
    assert not ours(engine, "--filter", "status=running")


@pytest.mark.parametrize(
    ("container", "said"),
    [
        ({**FOUR, "environment": [{"name": "NEURON_RT_VISIBLE_CORES", "value": "0-31"}]}, "names 32 cores"),
        ({**chip(2), "environment": [{"name": "NEURON_RT_VISIBLE_CORES", "value": "9"}]}, "outside the lease"),
        ({**FOUR, "privileged": True}, "can open every chip"),
        ({**chip(99)}, "no chip 99"),
        ({}, "no container of the task asks for a chip"),
    ],
    ids=["cores", "cores of others", "privileged", "no such chip", "no chip"],
)
def test_ways_around_the_lease_are_refused(
    shared_daemon: Daemon, engine: PrivateEngine, container: dict[str, Any], said: str
) -> None:
    """What would get past the lease is refused by name, before anything is leased or made."""
    before = len(shared_daemon.logged("lease.granted"))
    done = shared_daemon.cli("task", "run", "-", stdin=task({"name": "a", "command": ["true"], **container}))
    assert done.returncode in {2, 66}
    assert said in done.stderr
    assert len(shared_daemon.logged("lease.granted")) == before
    assert not ours(engine)


def test_a_chip_that_vanishes_before_its_container_starts(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """A task whose chip is gone when a container of it is to start fails, says why, and leaves nothing running."""
    first = {"name": "first", "command": sh("echo up; sleep 3"), "essential": False, **chip(1, None, 2, 3)}
    side = {"name": "side", "command": ["sleep", "600"], "essential": False}
    main = {"name": "main", "command": ["true"], **chip(0), "dependsOn": depends("first", "COMPLETE")}
    process = docker_daemon.spawn("task", "run", "-", stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(task(first, side, main))
    process.stdin.close()
    process.stdin = None
    assert process.stdout.readline() == "first | up\n"
    assert docker_daemon.cli("simulate", "remove", "0").returncode == 0
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 66
    assert "chip 0 has vanished from the host since it was leased" in errors
    assert not ours(engine)
    eventually(lambda: not docker_daemon.leases())
