"""The ledger and the containers agree again after the daemon, the engine or the journal was lost."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.containers import proxy
from tests.containers.engines import RELEASE, engine_in
from tests.containers.proxy import Proxy
from tests.containers.support import (
    IMAGE,
    POLITE,
    SOON,
    STUBBORN,
    held,
    inspect,
    is_running,
    launch,
    ours,
    wait_for_output,
    wait_until_free,
)
from tests.harness import Daemon, PrivateEngine, eventually, short_directory

pytestmark = pytest.mark.docker

ROUNDS = 15
"""Of launches in which the daemon is killed, each time a bit later; with one that is let finish, they fill the host."""


# -- the daemon is killed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [Daemon.kill, Daemon.stop], ids=["killed", "stopped"])
def test_lease_outlives_the_daemon(
    docker_daemon: Daemon, engine: PrivateEngine, end: Callable[[Daemon], object]
) -> None:
    """The first answer of the next daemon knows the leases of container and process, and no chip of them is given."""
    container = launch(docker_daemon, "-n", "8", *STUBBORN)
    process = docker_daemon.spawn("run", "-n", "4", "--", "sleep", "600")
    try:
        eventually(lambda: [row["name"] for row in docker_daemon.leases()][1:] == ["sleep"])
        eventually(lambda: docker_daemon.leases()[1]["command"] == "sleep 600")
        before = docker_daemon.leases()
        end(docker_daemon)
        docker_daemon.start()
        assert docker_daemon.leases() == before
        assert is_running(engine, container)
        assert process.poll() is None
        assert docker_daemon.cli("container", "run", "--all", "--no-wait", IMAGE, "true").returncode == 75
        assert docker_daemon.call("Acquire", count=4, ttl=60)["chips"] == [12, 13, 14, 15]
    finally:
        process.kill()
        process.communicate()
    engine.docker("kill", container)
    eventually(lambda: held(docker_daemon) == {12, 13, 14, 15}, SOON)


@pytest.mark.parametrize(
    ("end", "reason"),
    [("kill", "its container exited with 137"), ("rm --force", "its container was removed")],
)
def test_container_ended_meanwhile(docker_daemon: Daemon, engine: PrivateEngine, end: str, reason: str) -> None:
    """A lease whose container went while the daemon was away is gone at the first answer, and the log says why."""
    container = launch(docker_daemon, "-n", "4", *STUBBORN)
    (lease,) = docker_daemon.leases()
    docker_daemon.kill()
    engine.docker(*end.split(), container)
    docker_daemon.start()
    assert docker_daemon.all_free()
    (line,) = docker_daemon.logged("lease.draining")
    assert (line["lease"], line["reason"]) == (lease["lease"], reason)


def test_rm_is_kept_after_a_restart(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """A container launched with --rm that ended while the daemon was away is removed by the next one."""
    container = launch(docker_daemon, "-n", "1", "--rm", *STUBBORN)
    docker_daemon.kill()
    engine.docker("kill", container)
    docker_daemon.start()
    eventually(lambda: not ours(engine), SOON)


def test_command_in_the_foreground_says_what_goes_on(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """A command that loses the daemon says that the container goes on, and it does, with its chips."""
    process = docker_daemon.spawn("container", "run", "-n", "1", *POLITE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    docker_daemon.kill()
    _, errors = process.communicate(timeout=20)
    (container,) = ours(engine)
    assert process.returncode == 125
    assert f"container {container[:12]} goes on, and keeps its chips" in errors
    docker_daemon.start()
    assert [lease["container_id"] for lease in docker_daemon.leases()] == [container]
    assert is_running(engine, container)


def test_daemon_killed_during_a_launch(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """At whatever moment of a launch the daemon dies: then all that runs is leased, and all that is leased runs."""

    def agree() -> bool:
        """Tell whether the containers that run are those of the leases."""
        running = engine.docker("ps", "--format", '{{.Label "io.neurond.lease"}}').stdout.split()
        return {lease["lease"] for lease in docker_daemon.leases()} == set(running)

    began = time.monotonic()
    launch(docker_daemon, "-n", "1", *STUBBORN)
    step = (time.monotonic() - began) / ROUNDS  # a busy machine takes its time
    for number in range(ROUNDS):
        launching = docker_daemon.spawn("container", "run", "-n", "1", *(["-d"] if number % 2 else []), *STUBBORN)
        time.sleep(number * step)
        docker_daemon.kill()
        launching.communicate(timeout=20)
        docker_daemon.start()
        eventually(agree)
    eventually(lambda: not ours(engine, "--filter", "status=created"), SOON)
    assert agree()
    assert len(held(docker_daemon)) > 1, "no launch was far enough to be kept"
    engine.docker("kill", *ours(engine, "--filter", "status=running"))
    wait_until_free(docker_daemon)


# -- the engine goes away ---------------------------------------------------------------------------------------------


@contextmanager
def engine_of_its_own(*options: str) -> Iterator[PrivateEngine]:
    """Start an engine that may be killed; whatever is left in it is removed."""
    with short_directory() as directory:
        engine = engine_in(directory)
        engine.options += options
        engine.start()
        engine.make_image()
        yield engine
        assert engine.process is not None
        if engine.process.poll() is not None:
            engine.start()
        left = engine.docker("ps", "--all", "--quiet").stdout.split()
        if left:
            engine.docker("rm", "--force", *left)
        engine.stop()
        mounts = [str(directory / "data"), str(directory / "exec/netns/default")]  # what a killed dockerd leaves
        subprocess.run(["umount", "--lazy", *mounts], capture_output=True, check=False)


@pytest.fixture
def own_engine() -> Iterator[PrivateEngine]:
    """Give an engine that may be killed."""
    with engine_of_its_own() as engine:
        yield engine


@pytest.fixture
def restoring_engine() -> Iterator[PrivateEngine]:
    """Give an engine whose containers go on without it."""
    with engine_of_its_own("--live-restore") as engine:
        yield engine


def test_engine_killed_and_started(make_daemon: Callable[..., Daemon], own_engine: PrivateEngine) -> None:
    """While the engine is away the chips of its containers stay leased; when it is back without them, they end."""
    daemon = make_daemon("trn1.32xlarge", own_engine.url)
    wait_for_output(own_engine, launch(daemon, "-n", "4", *POLITE), "ready")
    before = daemon.leases()
    own_engine.kill()
    eventually(lambda: daemon.logged("engine.failed"))
    assert daemon.leases() == before
    assert len(held(daemon)) == 4
    assert daemon.cli("run", "-n", "4", "--no-wait", "--", "true").returncode == 0
    own_engine.start()  # it ends what it finds running, as live-restore is off
    wait_until_free(daemon)
    assert daemon.cli("container", "run", "--all", "--no-wait", IMAGE, "true").returncode == 0


def test_engine_stopped_and_started(make_daemon: Callable[..., Daemon], own_engine: PrivateEngine) -> None:
    """An engine that is stopped takes its containers with it: their leases end, and launches go on when it is back."""
    daemon = make_daemon("trn1.32xlarge", own_engine.url)
    wait_for_output(own_engine, launch(daemon, "-n", "4", *POLITE), "ready")
    own_engine.stop()
    own_engine.start()
    wait_until_free(daemon)
    assert daemon.cli("container", "run", "--all", "--no-wait", IMAGE, "true").returncode == 0


def test_daemon_started_while_the_engine_is_away(make_daemon: Callable[..., Daemon], own_engine: PrivateEngine) -> None:
    """A daemon that starts before the engine keeps the chips of the containers that it can't ask about."""
    daemon = make_daemon("trn1.32xlarge", own_engine.url)
    wait_for_output(own_engine, launch(daemon, "-n", "4", *POLITE), "ready")
    before = daemon.leases()
    daemon.kill()
    own_engine.kill()
    daemon.start()
    assert daemon.leases() == before
    own_engine.start()
    wait_until_free(daemon)


AWAY = 10.0
"""Seconds that an engine is away: twice as long as the daemon takes to look again of its own accord."""


@pytest.mark.parametrize("end", [PrivateEngine.kill, PrivateEngine.stop], ids=["killed", "stopped"])
def test_engine_whose_containers_go_on(
    make_daemon: Callable[..., Daemon], restoring_engine: PrivateEngine, end: Callable[[PrivateEngine], None]
) -> None:
    """With live-restore containers outlive their engine: their leases are theirs while it is away, and afterwards."""
    daemon = make_daemon("trn1.32xlarge", restoring_engine.url)
    container = launch(daemon, "--chips", "0-3", "--name", "lives-on", *POLITE)
    before = daemon.leases()
    pid = inspect(restoring_engine, container)["State"]["Pid"]
    end(restoring_engine)
    waiter = daemon.spawn("run", "--chips", "0", "--", "echo", "served")
    time.sleep(AWAY)
    assert Path("/proc", str(pid)).exists()
    assert daemon.leases()[0] == before[0]
    assert daemon.cli("run", "-n", "4", "--no-wait", "--", "true").returncode == 0
    assert waiter.poll() is None
    restoring_engine.start()
    assert is_running(restoring_engine, container)
    time.sleep(SOON - AWAY)
    assert daemon.leases()[0] == before[0]
    assert waiter.poll() is None
    assert daemon.cli("container", "stop", "lives-on").returncode == 0
    assert waiter.communicate(timeout=SOON)[0] == "served\n"
    wait_until_free(daemon)


def test_container_that_ends_while_its_engine_is_away(
    make_daemon: Callable[..., Daemon], restoring_engine: PrivateEngine
) -> None:
    """Nobody can say that it has ended while the engine is away, so its chips are kept; then they are free."""
    daemon = make_daemon("trn1.32xlarge", restoring_engine.url)
    container = launch(daemon, "--chips", "0-3", *STUBBORN)
    pid = inspect(restoring_engine, container)["State"]["Pid"]
    restoring_engine.kill()
    os.kill(pid, signal.SIGKILL)
    time.sleep(2)  # it is gone by then, and the daemon has looked
    assert held(daemon) == {0, 1, 2, 3}
    restoring_engine.start()
    wait_until_free(daemon)
    assert daemon.logged("lease.draining")[-1]["reason"].startswith("its container exited with")


@pytest.mark.skipif(bool(RELEASE), reason="an engine with CDI keeps it from coming back: test_cdi.py")
def test_updated_to_restart_for_ever(make_daemon: Callable[..., Daemon], own_engine: PrivateEngine) -> None:
    """A policy that docker was told later brings a container back on chips of another: that is said at once."""
    daemon = make_daemon("trn1.32xlarge", own_engine.url)
    container = launch(daemon, "--chips", "0", "--name", "back", *STUBBORN)
    own_engine.docker("update", "--restart", "always", container)
    own_engine.docker("stop", "--time", "0", container)
    wait_until_free(daemon)
    other = daemon.spawn("run", "--chips", "0", "--", "sleep", "600")
    try:
        (lease,) = eventually(daemon.leases)
        own_engine.stop()
        own_engine.start()
        eventually(lambda: is_running(own_engine, container))
        eventually(lambda: f"which belong to {lease['lease']} (root) now" in daemon.cli("check").stdout, SOON)
        assert [row["lease"] for row in daemon.leases()] == [lease["lease"]]
    finally:
        other.kill()
        other.communicate()


# -- the journal is damaged -------------------------------------------------------------------------------------------


def damage_middle(content: bytes) -> bytes:
    """Overwrite the middle third with garbage."""
    third = len(content) // 3
    return content[:third] + b"\xff" * third + content[2 * third :]


@pytest.mark.parametrize(
    "damage",
    [damage_middle, lambda content: b"\xff" * len(content), lambda _: b""],
    ids=["middle", "all of it", "emptied"],
)
def test_lease_is_rebuilt_from_its_container(
    docker_daemon: Daemon, engine: PrivateEngine, damage: Callable[[bytes], bytes]
) -> None:
    """Where the journal can't be read, the lease of a running container is rebuilt, and the bad file is kept."""
    container = launch(docker_daemon, "--chips", "4-7", "--name", "mine", *STUBBORN)
    before = docker_daemon.leases()
    docker_daemon.kill()
    journal = docker_daemon.directory / "journal"
    damaged = damage(journal.read_bytes())
    journal.write_bytes(damaged)
    docker_daemon.start()
    same = ("lease", "state", "chips", "uid", "owner", "binding", "name", "container", "container_id")
    assert [[lease[key] for key in same] for lease in docker_daemon.leases()] == [
        [lease[key] for key in same] for lease in before
    ]
    assert [path.read_bytes() for path in docker_daemon.directory.glob("journal.*")] == [damaged]
    assert docker_daemon.logged("journal.kept_aside")
    assert docker_daemon.cli("container", "run", "--chips", "4-7", "--no-wait", IMAGE, "true").returncode == 75
    engine.docker("kill", container)
    wait_until_free(docker_daemon)


def test_lease_of_a_container_that_can_not_be_asked_about_is_rebuilt_later(
    proxied: Daemon, between: Proxy, engine: PrivateEngine
) -> None:
    """Without a journal, and with an engine that fails on a container, what that has open is not given away."""
    command = [IMAGE, "sh", "-c", "exec 3<>/dev/neuron4; echo open; exec sleep 600"]
    container = launch(proxied, "--chips", "4-7", "--name", "mine", *command)
    wait_for_output(engine, container, "open")
    proxied.kill()
    (proxied.directory / "journal").write_bytes(b"")
    inspection = rf"/containers/{container}/json"
    between.set(inspection, proxy.fails)
    proxied.start()
    assert proxied.states()[4] == "foreign"
    assert proxied.cli("run", "--chips", "4-7", "--no-wait", "--", "true").returncode == 75
    between.set(inspection, None)
    (lease,) = eventually(proxied.leases, SOON)
    assert (lease["container_id"], lease["chips"]) == (container, [4, 5, 6, 7])
    eventually(lambda: proxied.cli("check").stdout == "")
