"""The daemon is killed at every point of the life of a container: no container twice, no chip without its lease."""

import signal

import pytest

from neurond.daemon.points import POINTS
from tests.containers.support import IMAGE, STUBBORN, ours, wait_until_free
from tests.harness import PATIENCE, Daemon, PrivateEngine, eventually

pytestmark = pytest.mark.docker

CONTAINER_POINTS = [point for point in POINTS if point.startswith("container.")]
LIVES_ON = {"container.started", "container.bound"}
"""Points at which the container runs, so that it outlives the daemon."""
AT_ITS_END = {"container.ended", "container.removed"}
"""Points that are reached when a container ends by itself."""
WAYS = [("--detach",), (), ("--rm",)]
STORIES = [(point, way) for point in CONTAINER_POINTS for way in WAYS if point != "container.removed"]
STORIES.append(("container.removed", ("--detach", "--rm")))  # one that nobody follows is removed by the daemon itself
"""Each point with each way to launch a container."""


def agrees(daemon: Daemon, engine: PrivateEngine) -> bool:
    """Each running container has a lease on exactly its chips, no other lease is there, and nothing is half made."""
    given = {
        container: sorted(
            int(name.removeprefix("neuron"))
            for name in engine.docker("exec", container, "ls", "/dev", check=False).stdout.split()
            if name.startswith("neuron")
        )
        for container in ours(engine, "--filter", "status=running")
    }
    leased = {lease["container_id"]: (lease["state"], lease["chips"]) for lease in daemon.leases()}
    return leased == {container: ("active", chips) for container, chips in given.items()} and not ours(
        engine, "--filter", "status=created"
    )


@pytest.mark.parametrize(("point", "way"), STORIES, ids=lambda part: part if isinstance(part, str) else " ".join(part))
def test_a_crash_during_the_life_of_a_container(
    shared_daemon: Daemon, engine: PrivateEngine, point: str, way: tuple[str, ...]
) -> None:
    """After a crash, a container runs with a lease on exactly its chips or there is neither; its end frees them."""
    daemon = shared_daemon
    daemon.kill()
    daemon.env = {"NEUROND_CRASH_AT": point}
    daemon.start()
    command = (IMAGE, "true") if point in AT_ITS_END else STUBBORN
    clients = [daemon.spawn("container", "run", "-n", "4", "--name", "job", *way, *command)]
    if point == "container.stopped":
        eventually(lambda: ours(engine, "--filter", "status=running") and agrees(daemon, engine))
        clients.append(daemon.spawn("container", "stop", "--time", "0", "job"))
    assert daemon.process is not None
    assert daemon.process.wait(PATIENCE) == -signal.SIGKILL
    for client in clients:
        client.communicate(timeout=PATIENCE)

    daemon.env = {}
    daemon.start()
    eventually(lambda: agrees(daemon, engine))
    assert len(ours(engine)) <= 1
    assert len(ours(engine, "--filter", "status=running")) == (point in LIVES_ON)
    if point in LIVES_ON:
        assert daemon.cli("container", "stop", "--time", "0", "job").returncode == 0
    wait_until_free(daemon)
    if "--rm" in way:
        eventually(lambda: not ours(engine))
    assert daemon.call("Check") == {"findings": []}
