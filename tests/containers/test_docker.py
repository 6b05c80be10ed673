"""`neurond docker run` with a real docker, a real engine and the real daemon."""

import time

import pytest

from tests.containers.support import STUBBORN
from tests.harness import Daemon, PrivateEngine, eventually

pytestmark = [pytest.mark.docker, pytest.mark.root]


def docker(daemon: Daemon, engine: PrivateEngine, *arguments: str) -> tuple[int, str, str]:
    """Run `neurond docker` on the tests' engine; return exit code, output and errors."""
    done = daemon.cli("docker", *arguments, env={"DOCKER_HOST": engine.url})
    return done.returncode, done.stdout, done.stderr


def test_a_container_sees_its_chips_and_no_other(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """Docker's own exit code comes through, and the chips are free again when it has ended."""
    script = "cd /dev; echo neuron*; echo $NEUROND_CHIPS; exit 7"
    done = docker(docker_daemon, engine, "run", "-n", "4", "--rm", engine.IMAGE, "sh", "-c", script)
    assert done == (7, "neuron0 neuron1 neuron2 neuron3\n0,1,2,3\n", "")
    eventually(docker_daemon.all_free)


def test_a_device_by_hand_is_a_lease(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """`--device /dev/neuron6:/dev/neuron0` leases chip 6, which is neuron0 inside."""
    words = ["--device", "/dev/neuron6:/dev/neuron0", "--rm", engine.IMAGE, "sh", "-c", "cd /dev; echo neuron*"]
    assert docker(docker_daemon, engine, "run", *words) == (0, "neuron0\n", "")
    assert [row["chips"] for row in docker_daemon.leases(ended=True)] == [[6]]


@pytest.mark.parametrize(
    "words", [["--privileged"], ["-v", "/dev:/d"], ["--gpus", "all"], ["-e", "NEURON_RT_VISIBLE_CORES=9"]]
)
def test_ways_around_the_lease_are_refused(docker_daemon: Daemon, engine: PrivateEngine, words: list[str]) -> None:
    """Before anything is leased, as a usage error."""
    code, out, err = docker(docker_daemon, engine, "run", "--chips", "2", "--rm", *words, engine.IMAGE, "true")
    assert (code, out, bool(err)) == (2, "", True)
    assert docker_daemon.leases(ended=True) == []


def test_a_detached_container_keeps_its_chips(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """The lease goes over from the process of docker to the container, and ends with it."""
    code, out, _ = docker(docker_daemon, engine, "run", "-n1", "-d", "--name", "trainer", *STUBBORN)
    assert (code, len(out)) == (0, 65)
    (lease,) = eventually(lambda: [row for row in docker_daemon.leases() if row["container"] == "trainer"])
    time.sleep(1)
    assert [row["lease"] for row in docker_daemon.leases()] == [lease["lease"]]
    engine.docker("rm", "--force", "trainer")
    eventually(docker_daemon.all_free)


def test_a_created_container_is_started_on_leased_chips(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """`create` and `start` are two commands, and the container has a lease while it runs."""
    assert docker(docker_daemon, engine, "create", "-n1", "--name", "made", *STUBBORN)[0] == 0
    assert docker(docker_daemon, engine, "start", "made")[:2] == (0, "made\n")
    eventually(lambda: [row for row in docker_daemon.leases() if row["container"] == "made"])
    engine.docker("rm", "--force", "made")
    eventually(docker_daemon.all_free)


def test_an_image_that_can_not_be_had_costs_no_chip(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """A missing image is pulled before chips are leased; if that fails, docker has said why, and nothing was leased."""
    env = {"DOCKER_HOST": engine.url}
    failed = docker_daemon.cli("docker", "run", "-n", "1", "localhost:1/no-such:1", "true", env=env)
    assert failed.returncode == 125
    assert "localhost:1" in failed.stderr
    assert not docker_daemon.logged("lease.granted")


def test_a_container_may_use_a_lease_of_the_command_line(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """With the arguments of `env --docker-args` a container has chips by right, and the lease waits for its end."""
    lease = docker_daemon.call("Acquire", chips=[3], ttl=60)["lease"]
    words = docker_daemon.cli("env", lease, "--docker-args").stdout.split()
    container = engine.docker("run", "-d", "--network=none", *words, *STUBBORN).stdout.strip()
    assert docker_daemon.cli("check").returncode == 0
    assert docker_daemon.call("ListChips")["chips"][3]["foreign"] == []
    docker_daemon.call("Release", lease=lease)
    (left,) = docker_daemon.leases()
    assert (left["lease"], left["state"]) == (lease, "draining")
    engine.docker("rm", "-f", container)
    eventually(docker_daemon.all_free)
