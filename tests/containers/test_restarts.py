"""What docker does by hand to a container of neurond's: start it again, rename it, pause it, copy it."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.containers.engines import RELEASE
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
from tests.daemon.support import node_of
from tests.harness import Daemon, PrivateEngine, eventually

pytestmark = pytest.mark.docker

AT_ONCE = 10.0
"""Seconds within which neurond has understood what docker did."""
PLAIN = ("--network", "none")
without_cdi = pytest.mark.skipif(
    bool(RELEASE), reason="an engine with CDI keeps a container from coming back: test_cdi.py"
)


def lease_of(daemon: Daemon, container: str) -> dict[str, Any]:
    """Return the lease of a container, {} if it has none."""
    return next((lease for lease in daemon.leases() if lease["container_id"] == container), {})


@contextmanager
def held_by_another(daemon: Daemon, chips: str) -> Iterator[str]:
    """Have a process hold chips, and give its lease."""
    command = ["run", "--chips", chips, "--", "sleep", "600"]
    other = daemon.spawn(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield eventually(lambda: [lease["lease"] for lease in daemon.leases() if lease["pid"] == other.pid])[0]
    finally:
        other.kill()
        other.wait()


# -- started again ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [STUBBORN, POLITE], ids=["deaf", "polite"])
def test_restart_keeps_the_chips(shared_daemon: Daemon, engine: PrivateEngine, command: tuple[str, ...]) -> None:
    """A container that docker restarts has the same chips leased afterwards, and frees them when it ends."""
    container = launch(shared_daemon, "--chips", "4-7", "--name", "again", *command)
    for _ in range(3):
        engine.docker("restart", "--time", "1", container)
        assert is_running(engine, container)
        lease = eventually(lambda: lease_of(shared_daemon, container), AT_ONCE)
        assert (lease["state"], lease["chips"], lease["container"]) == ("active", [4, 5, 6, 7], "again")
        assert shared_daemon.cli("run", "--chips", "5", "--no-wait", "--", "true").returncode == 75
    assert shared_daemon.cli("check").stdout == ""
    engine.docker("kill", container)
    wait_until_free(shared_daemon, AT_ONCE)


def test_restart_is_no_chance_for_those_who_wait(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """A container that docker restarts keeps its lease throughout: its chips go to nobody in between."""
    container = launch(shared_daemon, "--chips", "5", *STUBBORN)
    (before,) = shared_daemon.leases()
    with shared_daemon.client() as client:
        waiting = client.stream("Acquire", chips=[5], wait=60)
        assert "waiting" in next(waiting)
        for _ in range(3):
            engine.docker("restart", "--time", "0", container)
        assert lease_of(shared_daemon, container)["lease"] == before["lease"]
        assert shared_daemon.cli("check").stdout == ""
        assert shared_daemon.cli("container", "stop", "--time", "0", container).returncode == 0
        assert next(waiting)["chips"] == [5]
    assert not [line for line in shared_daemon.logged("lease.revived") if line["lease"] == before["lease"]]


@without_cdi
def test_the_lease_that_ps_shows_names_the_container(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """A container that was started again under another lease is found by that one, and by the one it was made with."""
    container = launch(shared_daemon, "-n", "1", *STUBBORN)
    (first,) = shared_daemon.leases()
    engine.docker("kill", container)
    wait_until_free(shared_daemon)
    engine.docker("start", container)
    second = eventually(lambda: lease_of(shared_daemon, container), AT_ONCE)
    assert second["lease"] != first["lease"]
    assert shared_daemon.cli("container", "logs", first["lease"]).returncode == 0
    done = shared_daemon.cli("container", "stop", "--time", "0", second["lease"])
    assert done.returncode == 0, done.stderr
    wait_until_free(shared_daemon)


@pytest.mark.parametrize("again", [True, False], ids=["failing", "succeeding at last"])
def test_on_failure_is_leased_throughout(shared_daemon: Daemon, engine: PrivateEngine, *, again: bool) -> None:
    """Docker's own restarts of a container that fails are one lease, which ends with the last of them."""
    before = len(shared_daemon.logged("lease.granted"))
    script = f"{'' if again else 'test -e /again && exit 0; : >/again; '}sleep 0.2; exit 3"
    container = launch(shared_daemon, "--all", "--restart", "on-failure:2", *PLAIN, IMAGE, "sh", "-c", script)
    assert shared_daemon.cli("run", "-n", "1", "-w", "20s", "--", "true").returncode == 0  # as soon as it has ended
    found = inspect(engine, container)
    assert (found["State"]["Status"], found["RestartCount"]) == ("exited", 2 if again else 1)
    granted = [line["lease"] for line in shared_daemon.logged("lease.granted")[before:]]
    assert len(granted) == 2
    (end,) = [line for line in shared_daemon.logged("lease.draining") if line["lease"] == granted[0]]
    assert end["reason"] == f"its container exited with {3 if again else 0}"


@without_cdi
@pytest.mark.parametrize("policy", ["always", "unless-stopped"])
@pytest.mark.parametrize("verb", [("container", "run", "-d"), ("docker", "run", "-d")], ids=" ".join)
def test_restart_for_ever_takes_cdi(
    shared_daemon: Daemon, engine: PrivateEngine, verb: tuple[str, ...], policy: str
) -> None:
    """On an engine without CDI a policy that starts a container on chips of others is refused, with the reason."""
    options = ["-n", "1", "--restart", policy, *STUBBORN]
    done = shared_daemon.cli(*verb, *options, env={"DOCKER_HOST": engine.url, "PATH": engine.programs})
    assert done.returncode == 2
    assert f"--restart {policy}: Docker would start the container again after its chips went to somebody" in done.stderr
    assert "no CDI" in done.stderr
    assert "use on-failure[:TIMES]" in done.stderr
    assert not ours(engine)
    assert shared_daemon.all_free()


@without_cdi
def test_started_again_on_free_chips(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """An exited container that is kept holds nothing; started by hand, it takes its own chips again."""
    container = launch(shared_daemon, "--chips", "8-11", "--name", "kept", *STUBBORN)
    engine.docker("kill", container)
    wait_until_free(shared_daemon)
    engine.docker("start", container)
    lease = eventually(lambda: lease_of(shared_daemon, container), AT_ONCE)
    assert (lease["chips"], lease["owner"], lease["container"]) == ([8, 9, 10, 11], "root", "kept")
    assert held(shared_daemon) == {8, 9, 10, 11}
    assert shared_daemon.cli("check").stdout == ""
    engine.docker("rm", "--force", container)
    wait_until_free(shared_daemon, AT_ONCE)


@without_cdi
def test_started_again_on_chips_of_another(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """Started by hand when its chips are leased to another, it is named by check, log and ls; the lease is left."""
    container = launch(shared_daemon, "--chips", "4-7", "--name", "late", *STUBBORN)
    engine.docker("kill", container)
    wait_until_free(shared_daemon)
    with held_by_another(shared_daemon, "4-7") as other:
        engine.docker("start", container)
        eventually(lambda: "conflict: container late" in shared_daemon.cli("check").stdout, AT_ONCE)
        done = shared_daemon.cli("check")
        assert done.returncode == 1
        belongs = f"container late was started again on chips 4-7, which belong to {other} (root) now"
        assert f"conflict: {belongs}" in done.stdout
        assert f"chip 4 is leased to root ({other}), but in use by" in done.stdout
        line = shared_daemon.logged("container.conflict")[-1]
        assert (line["container"], line["chips"], other in line["leases"]) == ("late", [4, 5, 6, 7], True)
        assert f"late in container {container[:12]}" in shared_daemon.cli("ls", "4").stdout
        assert [lease["lease"] for lease in shared_daemon.leases()] == [other]
        assert is_running(engine, container)
        engine.docker("kill", container)
        eventually(lambda: shared_daemon.cli("check").returncode == 0, AT_ONCE)
    wait_until_free(shared_daemon)


@without_cdi
def test_in_part_on_chips_of_another(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """If one of its chips is another's, it gets no lease on the rest, which is withheld as long as it runs."""
    container = launch(shared_daemon, "--chips", "4-7", *STUBBORN)
    engine.docker("kill", container)
    wait_until_free(shared_daemon)
    with held_by_another(shared_daemon, "7"):
        engine.docker("start", container)
        eventually(lambda: shared_daemon.states()[4] == "foreign", AT_ONCE)
        assert [shared_daemon.states()[chip] for chip in (4, 5, 6, 7)] == ["foreign"] * 3 + ["leased"]
        assert shared_daemon.cli("run", "--chips", "4", "--no-wait", "--", "true").returncode == 75
        engine.docker("kill", container)
    wait_until_free(shared_daemon, AT_ONCE)


@without_cdi
def test_conflict_that_ends_becomes_a_lease(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """When the other lease has ended, the container that was started again gets its own."""
    container = launch(shared_daemon, "--chips", "0", *STUBBORN)
    engine.docker("kill", container)
    wait_until_free(shared_daemon)
    with held_by_another(shared_daemon, "0"):
        engine.docker("start", container)
        eventually(lambda: "conflict" in shared_daemon.cli("check").stdout, AT_ONCE)
    eventually(lambda: lease_of(shared_daemon, container), SOON)
    assert shared_daemon.cli("check").stdout == ""


@without_cdi
def test_stop_conflicts(make_daemon: Callable[..., Daemon], engine: PrivateEngine) -> None:
    """With `serve --stop-conflicts`, a container that was started on chips of another is stopped; the lease is not."""
    daemon = make_daemon("trn1.32xlarge", engine.url, "--stop-conflicts")
    container = launch(daemon, "--chips", "0", "--name", "late", *POLITE)
    engine.docker("kill", container)
    wait_until_free(daemon)
    try:
        with held_by_another(daemon, "0") as other:
            engine.docker("start", container)
            eventually(lambda: not is_running(engine, container), AT_ONCE)
            assert daemon.logged("container.conflict")[-1]["follows"] == "stopping it"
            eventually(lambda: daemon.cli("check").returncode == 0, AT_ONCE)
            assert [lease["lease"] for lease in daemon.leases()] == [other]
        engine.docker("start", container)
        eventually(lambda: lease_of(daemon, container), AT_ONCE)
    finally:
        engine.docker("rm", "--force", container)


# -- another name -----------------------------------------------------------------------------------------------------


def test_rename(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """A renamed container is shown by its new name, and is stopped by that, and by its lease."""
    container = launch(shared_daemon, "-n", "1", "--name", "old", *PLAIN, *STUBBORN)
    for name in ("new", "newer"):
        engine.docker("rename", container, name)
        eventually(lambda name=name: [lease["container"] for lease in shared_daemon.leases()] == [name], AT_ONCE)  # type: ignore[misc]
        assert f"container {name}" in shared_daemon.cli("ps").stdout
        assert name in shared_daemon.cli("container", "ls").stdout.split()
    assert shared_daemon.cli("container", "stop", "old").returncode == 66
    (lease,) = shared_daemon.leases()
    assert shared_daemon.cli("container", "logs", lease["lease"]).returncode == 0
    assert shared_daemon.cli("container", "stop", "--time", "0", "newer").returncode == 0
    wait_until_free(shared_daemon, AT_ONCE)


def test_rename_survives_the_daemon(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """A container that was renamed while the daemon was away keeps its lease, under the new name."""
    container = launch(docker_daemon, "-n", "4", "--name", "old", *PLAIN, *STUBBORN)
    docker_daemon.kill()
    engine.docker("rename", container, "new")
    docker_daemon.start()
    eventually(lambda: [lease["container"] for lease in docker_daemon.leases()] == ["new"], AT_ONCE)
    assert docker_daemon.cli("container", "stop", "--time", "0", "new").returncode == 0
    wait_until_free(docker_daemon, AT_ONCE)


def test_two_that_change_names(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """Two containers that swap their names keep their own chips: an id counts, not a name."""
    containers = {chip: launch(shared_daemon, "--chips", chip, "--name", chip * 2, *PLAIN, *STUBBORN) for chip in "01"}
    for before, after in (("00", "swap"), ("11", "00"), ("swap", "11")):
        engine.docker("rename", before, after)
    wanted = {containers["0"]: ("11", [0]), containers["1"]: ("00", [1])}

    def found() -> dict[str, tuple[str, list[int]]]:
        return {lease["container_id"]: (lease["container"], lease["chips"]) for lease in shared_daemon.leases()}

    eventually(lambda: found() == wanted, AT_ONCE)
    engine.docker("kill", "11")
    eventually(lambda: held(shared_daemon) == {1}, AT_ONCE)


def test_renamed_container_is_removed_at_its_end(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """--rm holds for a container by any name."""
    container = launch(shared_daemon, "-n", "1", "--rm", "--name", "old", *PLAIN, *STUBBORN)
    engine.docker("rename", container, "new")
    engine.docker("kill", container)
    eventually(lambda: not ours(engine), SOON)


# -- paused, updated --------------------------------------------------------------------------------------------------


def test_paused_container_is_leased_after_a_crash(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """A container that was paused while the daemon was away, or before, keeps its lease."""
    container = launch(docker_daemon, "--chips", "0-3", *STUBBORN)
    docker_daemon.kill()
    engine.docker("pause", container)
    docker_daemon.start()
    assert held(docker_daemon) == {0, 1, 2, 3}
    assert docker_daemon.cli("check").stdout == ""
    engine.docker("unpause", container)
    engine.docker("kill", container)
    wait_until_free(docker_daemon, AT_ONCE)


def test_stop_ends_a_paused_container(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """A paused container can be stopped, and frees its chips then."""
    container = launch(shared_daemon, "-n", "1", *POLITE)
    wait_for_output(engine, container, "ready")
    engine.docker("pause", container)
    assert shared_daemon.cli("container", "stop", "--time", "1", container).returncode == 0
    wait_until_free(shared_daemon, AT_ONCE)


def test_update_changes_no_lease(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """`docker update` of a limit or the policy leaves the lease as it is; the policy that is in force counts."""
    container = launch(shared_daemon, "-n", "1", *PLAIN, IMAGE, "sh", "-c", "test -e /again || : >/again; sleep 2")
    before = shared_daemon.leases()
    engine.docker("update", "--cpu-shares", "512", "--restart", "on-failure:1", container)
    assert shared_daemon.cli("check").stdout == ""
    assert shared_daemon.leases() == before
    engine.docker("exec", container, "kill", "-9", "1", check=False)  # process 1 does not hear it from within
    engine.docker("update", "--restart", "always", container)
    eventually(lambda: inspect(engine, container)["RestartCount"] >= 1)
    assert [(lease["lease"], lease["state"]) for lease in shared_daemon.leases()] == [(before[0]["lease"], "active")]
    engine.docker("update", "--restart", "no", container)
    wait_until_free(shared_daemon)


# -- copied -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(shared_daemon: Daemon, engine: PrivateEngine) -> Iterator[str]:
    """Give a running container of neurond's, of whose labels an image `copy:1` has a copy."""
    container = launch(shared_daemon, "--chips", "0-3", "--rm", "--name", "first", *STUBBORN)
    engine.docker("commit", container, "copy:1")
    yield container
    left = engine.docker("ps", "--all", "--quiet").stdout.split()
    if left:
        engine.docker("rm", "--force", *left, check=False)
    engine.docker("rmi", "copy:1")


@pytest.mark.parametrize("name", ["second", "first"], ids=["another name", "the same name"])
def test_copy_is_no_container_of_neuronds(shared_daemon: Daemon, engine: PrivateEngine, copied: str, name: str) -> None:
    """A container of an image that was made from a leased one has no lease by that, and is not removed at its end."""
    if name == "first":
        engine.docker("kill", copied)
        wait_until_free(shared_daemon)
        eventually(lambda: not ours(engine))
    before = shared_daemon.leases()
    copy = engine.docker("run", "--detach", *PLAIN, "--name", name, "copy:1", "sleep", "600").stdout.strip()
    made = engine.docker("create", *PLAIN, "copy:1", "true").stdout.strip()
    assert inspect(engine, copy)["Config"]["Labels"]["io.neurond.lease"]
    assert shared_daemon.cli("check").stdout == ""
    assert shared_daemon.leases() == before
    engine.docker("kill", copy)
    for _ in range(3):
        assert shared_daemon.cli("check").stdout == ""
    assert shared_daemon.leases() == before
    assert {copy, made} <= ours(engine)


def test_launched_copy_has_labels_of_its_own(shared_daemon: Daemon, engine: PrivateEngine, copied: str) -> None:
    """A copy of a container with --rm that is launched without it is kept at its end."""
    done = shared_daemon.cli("container", "run", "-n", "1", "--name", "kept", *PLAIN, "copy:1", "true")
    assert done.returncode == 0, done.stderr
    for _ in range(3):
        assert shared_daemon.cli("check").stdout == ""
    assert ours(engine) == {copied, inspect(engine, "kept")["Id"]}


def test_copy_that_is_only_made_is_kept(shared_daemon: Daemon, engine: PrivateEngine, copied: str) -> None:
    """A container that somebody creates of a copy, even by the name of the first, is not taken for half a launch."""
    engine.docker("kill", copied)
    wait_until_free(shared_daemon)
    eventually(lambda: not ours(engine))
    made = engine.docker("create", *PLAIN, "--name", "first", "copy:1", "true").stdout.strip()
    for _ in range(3):
        assert shared_daemon.cli("check").stdout == ""
    assert ours(engine) == {made}


def test_copy_with_the_chips_is_a_stranger(shared_daemon: Daemon, engine: PrivateEngine, copied: str) -> None:
    """A copy that was given a chip of the first by hand does not share its lease: it is named as what it is."""
    device = f"--device={node_of(shared_daemon, 0)}:/dev/neuron0"
    copy = engine.docker("run", "--detach", *PLAIN, device, "copy:1", "sleep", "600").stdout.strip()
    eventually(lambda: shared_daemon.cli("check").returncode == 1, AT_ONCE)
    assert f"container {copy[:12]}" in shared_daemon.cli("check").stdout
    assert [lease["container_id"] for lease in shared_daemon.leases()] == [copied]
