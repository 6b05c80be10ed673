"""Two daemons that share an engine: neither takes the other's containers for its own, nor for a stranger's."""

import json
from collections.abc import Iterator

import pytest

from tests.containers.support import IMAGE, POLITE, SOON, STUBBORN, held, is_running, launch, ours, wait_for_output
from tests.harness import Daemon, PrivateEngine, eventually, short_directory

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def pair(engine: PrivateEngine) -> Iterator[tuple[Daemon, Daemon]]:
    """Give two daemons with directories of their own and one engine."""
    with short_directory() as directory:
        daemons = (
            Daemon(directory / "a", "trn1.32xlarge", engine.url),
            Daemon(directory / "b", "inf2.48xlarge", engine.url),
        )
        try:
            yield daemons[0].start(), daemons[1].start()
        finally:
            for daemon in daemons:
                daemon.close()


@pytest.fixture
def daemons(pair: tuple[Daemon, Daemon], engine: PrivateEngine) -> Iterator[tuple[Daemon, Daemon]]:
    """Give the pair; containers are removed afterwards."""
    yield pair
    left = engine.docker("ps", "--all", "--quiet").stdout.split()
    if left:
        engine.docker("rm", "--force", *left, check=False)
    for daemon in pair:
        eventually(daemon.all_free, SOON)


def listed(daemon: Daemon) -> set[str]:
    """Return the names that `container ls` shows."""
    return {row["name"] for row in daemon.call("ListContainers")["containers"]}


def look_twice(daemon: Daemon) -> None:
    """Have the daemon look at all containers, twice."""
    for _ in range(2):
        daemon.call("Check")


def test_each_lists_its_own(daemons: tuple[Daemon, Daemon]) -> None:
    """`container ls` shows the containers of its own daemon, and no other."""
    first, second = daemons
    launch(first, "-n", "1", "--name", "one", *STUBBORN)
    launch(second, "-n", "1", "--name", "two", *STUBBORN)
    for daemon, mine, other in ((first, "one", "two"), (second, "two", "one")):
        assert listed(daemon) == {mine}
        shown = daemon.cli("container", "ls").stdout
        assert mine in shown
        assert other not in shown


def test_neither_manages_the_others(daemons: tuple[Daemon, Daemon], engine: PrivateEngine) -> None:
    """The other's containers can't be stopped or read, by whatever handle."""
    first, second = daemons
    container = launch(first, "-n", "1", "--name", "one", *POLITE)
    wait_for_output(engine, container, "ready")
    (lease,) = first.leases()
    for handle in ("one", container, container[:12], lease["lease"]):
        assert second.cli("container", "stop", handle).returncode == 66
        assert second.cli("container", "logs", handle).returncode == 66
    assert is_running(engine, container)
    assert first.cli("container", "stop", "one").returncode == 0


def test_neither_ends_or_removes_the_others(daemons: tuple[Daemon, Daemon], engine: PrivateEngine) -> None:
    """What one of them runs, has made or is to remove, the other leaves alone, also when it starts anew."""
    first, second = daemons
    running = launch(first, "--rm", "-n", "1", "--name", "one", *STUBBORN)
    made = create(engine, first, "made")
    first.kill()  # so that nobody but the other could remove what has ended
    engine.docker("kill", running)
    engine.docker("wait", running, check=False)
    look_twice(second)
    second.kill()
    second.start()
    look_twice(second)
    assert ours(engine) == {running, made}
    assert second.all_free()
    first.start()
    eventually(lambda: running not in ours(engine), SOON)


def create(engine: PrivateEngine, daemon: Daemon, name: str) -> str:
    """Create a container as one that a crash of this daemon has left behind: made, and never started."""
    home = str(daemon.directory.resolve())
    labels = {"io.neurond.lease": "zzzz-1", "io.neurond.home": home, "io.neurond.name": name}
    options = [f"--label={key}={value}" for key, value in labels.items()]
    return engine.docker("create", f"--name={name}", *options, IMAGE, "true").stdout.strip()


def test_a_container_that_was_only_made_is_its_own_daemons(
    daemons: tuple[Daemon, Daemon], engine: PrivateEngine
) -> None:
    """What was created and never started is removed by the daemon that made it, and by no other."""
    first, second = daemons
    first.kill()
    left = create(engine, first, "left")
    look_twice(second)
    assert ours(engine) == {left}
    first.start()
    eventually(lambda: not ours(engine), SOON)


def test_neither_is_a_stranger_to_the_other(daemons: tuple[Daemon, Daemon], engine: PrivateEngine) -> None:
    """The other's containers are on nodes of the other's, so all chips stay free, and `check` finds nothing."""
    first, second = daemons
    container = launch(first, "--all", IMAGE, "sh", "-c", "exec 3<>/dev/neuron0; echo open; exec sleep 600")
    wait_for_output(engine, container, "open")
    look_twice(second)
    assert second.all_free()
    assert second.cli("check").stdout == ""
    assert json.loads(second.cli("ls", "-j").stdout)[0]["holders"] == []
    assert second.cli("container", "run", "--all", "--no-wait", IMAGE, "true").returncode == 0
    assert held(first) == set(range(16))
    assert is_running(engine, container)


def test_a_journal_that_is_lost_is_not_made_up_from_the_others(
    daemons: tuple[Daemon, Daemon], engine: PrivateEngine
) -> None:
    """A daemon without its journal rebuilds its own leases from containers, and none of the other's."""
    first, second = daemons
    theirs = launch(first, "-n", "4", *STUBBORN)
    mine = launch(second, "-n", "1", *STUBBORN)
    second.kill()
    (second.directory / "journal").unlink()
    second.start()
    assert [row["container_id"] for row in second.leases()] == [mine]
    assert [row["container_id"] for row in first.leases()] == [theirs]
    assert is_running(engine, theirs)
