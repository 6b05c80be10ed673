"""Containers that were given chips behind neurond's back."""

import os
import stat
from pathlib import Path

import pytest

from neurond.client import NeurondError
from neurond.host.docker import Engine
from tests.containers.support import SOON
from tests.daemon.support import node_of
from tests.harness import Daemon, PrivateEngine, eventually

pytestmark = pytest.mark.docker


def start(engine: PrivateEngine, *options: str) -> str:
    """Start a container with plain docker, and return its id."""
    return engine.docker("run", "-d", "--network=none", *options, engine.IMAGE, "sleep", "600").stdout.strip()


def test_a_strangers_container_makes_its_chip_foreign(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """A container that docker gave a chip, opened or not, is seen, named and respected until it has ended."""
    container = start(engine, "--name=stranger", f"--device={node_of(docker_daemon, 3)}:/dev/accel0")
    eventually(lambda: docker_daemon.states()[3] == "foreign", SOON)
    with pytest.raises(NeurondError, match=rf"in use without a lease by pid \d+ .*container {container[:12]}"):
        docker_daemon.call("Acquire", chips=[3])
    assert container[:12] in docker_daemon.cli("ls", "3").stdout
    assert "not leased, but in use" in docker_daemon.cli("check").stdout
    engine.docker("kill", container)
    eventually(docker_daemon.all_free, SOON)
    assert docker_daemon.cli("check").stdout == ""


def test_a_process_in_a_strangers_container_is_named_once(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """A chip that is open in a stranger's container shows the process with its container."""
    node = node_of(docker_daemon, 0)
    command = ["sh", "-c", "exec 3<>/dev/neuron0; exec sleep 600"]
    engine.docker("run", "-d", "--network=none", f"--device={node}:/dev/neuron0", engine.IMAGE, *command)
    docker_daemon.cli("check")
    (holder,) = docker_daemon.call("ListChips")["chips"][0]["foreign"]
    assert holder["command"] == "sleep 600"
    assert len(holder["container_id"]) == 64


def test_adopt_takes_a_running_container_over(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """An adopted container has a lease on exactly its chips, which ends with it and survives a crash of the daemon."""
    devices = [f"--device={node_of(docker_daemon, chip)}" for chip in (5, 6)]
    container = start(engine, "--name=old", *devices)
    done = docker_daemon.cli("adopt", "--container", "old")
    assert done.returncode == 0, done.stderr
    (lease,) = docker_daemon.leases()
    assert (lease["lease"], lease["chips"], lease["container"]) == (done.stdout.strip(), [5, 6], "old")
    docker_daemon.kill()
    docker_daemon.start()
    assert [row["lease"] for row in docker_daemon.leases()] == [lease["lease"]]
    assert docker_daemon.cli("check").stdout == ""
    assert docker_daemon.cli("adopt", "--container", "old").returncode == 75
    assert docker_daemon.cli("adopt", "--container", "nothing").returncode == 66
    engine.docker("rm", "--force", container)
    eventually(docker_daemon.all_free, SOON)


def test_a_privileged_container_is_recognised(engine: PrivateEngine) -> None:
    """A container that could open every device is told from one that could not.

    It is only created: not every kernel lets it start.
    """
    for options, privileged in (["--privileged"], True), ([], False):
        container = engine.docker("create", *options, engine.IMAGE, "true").stdout.strip()
        found = Engine(engine.url).inspect(container)
        assert found is not None
        assert found.privileged == privileged
        engine.docker("rm", container)


def test_a_plain_container_is_no_stranger(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """A container without chips of ours is left alone."""
    start(engine, "--device=/dev/null:/dev/neuron0")
    assert docker_daemon.cli("check").stdout == ""
    assert set(docker_daemon.states().values()) == {"free"}


@pytest.fixture
def nodes(docker_daemon: Daemon, run_dir: Path) -> Path:
    """Give a directory that has nodes of the chips 4 and 5 and no others, besides a file."""
    directory = run_dir / "some"
    directory.mkdir()
    for chip in (4, 5):
        os.mknod(directory / f"accel{chip}", 0o666 | stat.S_IFCHR, Path(node_of(docker_daemon, chip)).stat().st_rdev)
    (directory / "readme").write_text("nothing")
    return directory


def check_only_these_are_foreign(daemon: Daemon, chips: set[int], container: str) -> None:
    """Check that these chips, and no others, are seen to be used by this container, and are not given out."""

    def foreign() -> set[int]:
        return {chip for chip, state in daemon.states().items() if state == "foreign"}

    eventually(lambda: foreign() == chips, SOON)
    for chip in chips:
        assert container[:12] in daemon.cli("ls", str(chip)).stdout
        refused = daemon.cli("run", "--chips", str(chip), "--no-wait", "--", "true")
        assert refused.returncode == 75
        assert "in use without a lease by" in refused.stderr
    others = set(range(16)) - chips
    assert all(daemon.call("Acquire", chips=[chip], ttl=60) for chip in others)
    assert foreign() == chips


def test_a_directory_of_nodes_is_as_good_as_nodes(docker_daemon: Daemon, engine: PrivateEngine, nodes: Path) -> None:
    """A container that was given a directory of devices has the chips whose nodes are in it, and no others."""
    container = start(engine, f"--device={nodes}:/dev/chips")
    assert "accel4" in engine.docker("exec", container, "ls", "/dev/chips").stdout
    check_only_these_are_foreign(docker_daemon, {4, 5}, container)


def test_a_rule_for_the_major_is_as_good_as_all_nodes(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """A container that may open every device of the chips' major, by a rule of its cgroup, has all of them."""
    major = docker_daemon.call("ListChips")["chips"][0]["device"].partition(":")[0]
    container = start(engine, f"--device-cgroup-rule=c {major}:* rwm")
    check_only_these_are_foreign(docker_daemon, set(range(16)), container)


def test_a_rule_for_one_chip_is_as_good_as_its_node(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """A container whose cgroup allows the numbers of one chip has that chip."""
    device = docker_daemon.call("ListChips")["chips"][7]["device"]
    container = start(engine, f"--device-cgroup-rule=c {device} rw")
    check_only_these_are_foreign(docker_daemon, {7}, container)


@pytest.mark.parametrize("rule", ["c OTHER:* rwm", "b MAJOR:* rwm", "c MAJOR:* m"], ids=["major", "block", "mknod"])
def test_a_rule_that_opens_no_chip_is_no_use(docker_daemon: Daemon, engine: PrivateEngine, rule: str) -> None:
    """A rule for another major, for block devices, or to make nodes only makes nobody a stranger."""
    major = docker_daemon.call("ListChips")["chips"][0]["device"].partition(":")[0]
    start(engine, f"--device-cgroup-rule={rule.replace('OTHER', str(int(major) + 1)).replace('MAJOR', major)}")
    assert docker_daemon.cli("check").stdout == ""
    assert set(docker_daemon.states().values()) == {"free"}


def test_a_container_on_a_lease_of_the_shell_is_no_stranger(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """`docker run $(neurond env ID --docker-args)` uses the lease's chips by right, and no longer than it lasts."""
    lease = docker_daemon.call("Acquire", chips=[3], ttl=60)["lease"]
    container = start(engine, *docker_daemon.cli("env", lease, "--docker-args").stdout.split())
    assert docker_daemon.cli("check").stdout == ""
    docker_daemon.call("Release", lease=lease)
    check_only_these_are_foreign(docker_daemon, {3}, container)
