"""On an engine with CDI a lease is a device by its name, and the name goes with the lease."""

import json
import subprocess

import pytest

from tests.containers.engines import RELEASE
from tests.containers.support import IMAGE, STUBBORN, held, inspect, is_running, launch, wait_until_free
from tests.harness import Daemon, PrivateEngine, eventually

pytestmark = pytest.mark.docker

UNRESOLVABLE = "unresolvable CDI devices neurond.io/lease="


def names(engine: PrivateEngine) -> set[str]:
    """Return the names that the engine can resolve."""
    return {
        device["name"]
        for path in engine.cdi.glob("*.json")
        for device in json.loads(path.read_text()).get("devices", ())
    }


def start_by_hand(engine: PrivateEngine, container: str) -> "subprocess.CompletedProcess[str]":
    """Start a container with the docker command, and say how that went."""
    return engine.docker("start", container, check=False)


def test_a_container_is_launched_by_the_name_of_its_lease(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """It has exactly its chips by that name, in both verbs; `cdi list` shows the name, which ends with the lease."""
    launched = launch(docker_daemon, "--chips", "4-7", *STUBBORN)
    wrapped = docker_daemon.cli("docker", "run", "-d", "--network=none", "-n", "1", *STUBBORN, env=docker_env(engine))
    assert wrapped.returncode == 0, wrapped.stderr
    leases = {row["lease"]: row["chips"] for row in docker_daemon.leases()}
    assert sorted(leases.values()) == [[0], [4, 5, 6, 7]]
    for container in (launched, wrapped.stdout.strip()):
        lease = inspect(engine, container)["Config"]["Labels"]["io.neurond.lease"]
        (request,) = inspect(engine, container)["HostConfig"]["DeviceRequests"]
        assert request["DeviceIDs"] == [f"neurond.io/lease={lease}"]
        assert not inspect(engine, container)["HostConfig"]["Devices"]
        listing = engine.docker("exec", container, "ls", "/dev").stdout.split()
        assert sorted(n for n in listing if "neuron" in n) == [f"neuron{chip}" for chip in leases[lease]]
    assert names(engine) == leases.keys()
    listed = json.loads(docker_daemon.cli("cdi", "list", "-j").stdout)
    assert listed == {f"neurond.io/lease={lease}": chips for lease, chips in leases.items()}
    engine.docker("rm", "-f", launched, wrapped.stdout.strip())
    wait_until_free(docker_daemon)
    assert names(engine) == set()


def docker_env(engine: PrivateEngine) -> dict[str, str]:
    """Return an environment in which `docker` is the engine's own, and talks to it."""
    return {"DOCKER_HOST": engine.url, "PATH": engine.programs}


def test_any_lease_is_a_device(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """`docker run --device neurond.io/lease=ID` gives a container the chips of a lease from the command line."""
    lease = docker_daemon.call("Acquire", chips=[3], ttl=60)["lease"]
    shown = engine.docker("run", "--rm", "--network=none", f"--device=neurond.io/lease={lease}", IMAGE, "ls", "/dev")
    assert "neuron3" in shown.stdout.split()
    docker_daemon.call("Release", lease=lease)
    gone = engine.docker(
        *("run", "--rm", "--network=none", f"--device=neurond.io/lease={lease}", IMAGE, "true"), check=False
    )
    assert UNRESOLVABLE + lease in gone.stderr


def test_a_late_start_is_refused_by_the_engine(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """A container that has ended can't be started again, whoever has its chips by then: its name is gone."""
    container = launch(docker_daemon, "-n", "1", IMAGE, "true")
    wait_until_free(docker_daemon)
    other = docker_daemon.call("Acquire", chips=[0], ttl=60)["lease"]
    late = start_by_hand(engine, container)
    assert late.returncode == 1
    assert UNRESOLVABLE in late.stderr
    assert held(docker_daemon) == {0}
    docker_daemon.call("Release", lease=other)
    restarted = engine.docker("restart", container, check=False)
    assert UNRESOLVABLE in restarted.stderr


def test_restart_always_is_taken(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """A container with policy always is started again by the engine after a crash, and keeps its lease throughout."""
    container = launch(docker_daemon, "-n", "1", "--restart", "always", IMAGE, "sh", "-c", "sleep 1; exit 1")
    (lease,) = docker_daemon.leases()
    eventually(lambda: inspect(engine, container)["RestartCount"] >= 2)
    assert [row["lease"] for row in docker_daemon.leases()] == [lease["lease"]]
    assert not docker_daemon.logged("lease.draining")
    engine.docker("stop", "--time", "0", container)
    wait_until_free(docker_daemon)
    assert UNRESOLVABLE in start_by_hand(engine, container).stderr


def test_a_restarted_engine_brings_it_back_on_its_chips(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """With policy always a container has its lease after a restart of the engine, if that brings it back.

    Engine 26 does not (moby 49989: its CDI driver is not there yet when it starts containers): then the lease ends.
    """
    container = launch(docker_daemon, "-n", "1", "--restart", "always", *STUBBORN)
    (before,) = docker_daemon.leases()
    engine.stop()
    assert held(docker_daemon) == {0}
    engine.start()
    if RELEASE == "26":
        wait_until_free(docker_daemon)
        assert not is_running(engine, container)
    else:
        eventually(lambda: is_running(engine, container))
        (after,) = docker_daemon.leases()
        assert (after["lease"], after["state"]) == (before["lease"], "active")


def test_names_outlive_the_daemon(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """While neurond is down, and before it has asked the engine, the names of the leases that live are there."""
    lease = docker_daemon.call("Acquire", count=4, ttl=60)["lease"]
    docker_daemon.kill()
    assert names(engine) == {lease}
    docker_daemon.start()
    assert names(engine) == {lease}
    docker_daemon.call("Release", lease=lease)
    assert names(engine) == set()


def test_a_renamed_chip_is_given_as_a_plain_device(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """A chip under another name inside is mapped by its node, as the lease's name has the usual ones."""
    container = launch(docker_daemon, "--device", "/dev/neuron6:/dev/neuron0", *STUBBORN)
    assert [one["PathInContainer"] for one in inspect(engine, container)["HostConfig"]["Devices"]] == ["/dev/neuron0"]
    assert held(docker_daemon) == {6}


def test_while_names_can_not_be_written_devices_are_plain(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """If names can't be written, containers get their nodes, and the log says so; it goes on when they can be."""
    engine.cdi.rmdir()
    engine.cdi.write_text("in the way")
    try:
        container = launch(docker_daemon, "-n", "1", *STUBBORN)
        assert inspect(engine, container)["HostConfig"]["Devices"]
        assert docker_daemon.logged("cdi.failed")
    finally:
        engine.cdi.unlink()
        engine.cdi.mkdir()
    lease = docker_daemon.call("Acquire", count=1, ttl=60)["lease"]
    assert lease in names(engine)


def test_restart_always_takes_the_name(docker_daemon: Daemon) -> None:
    """A chip that has to be given by its node could be used again whoever has it by then: policy always is refused."""
    done = docker_daemon.cli(
        *("container", "run", "-d", "--restart", "always", "--device", "/dev/neuron6:/dev/neuron0", *STUBBORN)
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "--restart always: a chip has another path inside, so Docker could not be kept from" in done.stderr
    assert not docker_daemon.logged("lease.granted")
