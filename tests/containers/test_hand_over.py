"""`neurond docker run`: its lease goes from the docker command to the container, whoever dies in between."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.containers.support import IMAGE, POLITE, SOON, STUBBORN, held, is_running, ours, wait_until_free
from tests.harness import NEUROND, PATIENCE, Daemon, PrivateEngine, eventually

pytestmark = pytest.mark.docker

RUN = ("docker", "run", "--network", "none")
SLOW_DOCKER = """#!/bin/sh
echo waiting >"$0.waits"
while [ -e "$0.waits" ]; do sleep 0.02; done
exec {docker} "$@"
"""
"""A docker that does nothing until it is let go."""


def spawn(daemon: Daemon, engine: PrivateEngine, *arguments: str, **kwargs: Any) -> "subprocess.Popen[str]":
    """Start `neurond docker` and go on."""
    env = {"DOCKER_HOST": engine.url, "PATH": engine.programs} | kwargs.pop("env", {})
    return daemon.spawn(*arguments, env=env, **kwargs)


def call(daemon: Daemon, engine: PrivateEngine, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run `neurond docker` to its end."""
    return daemon.cli(*arguments, env={"DOCKER_HOST": engine.url, "PATH": engine.programs})


def bound(daemon: Daemon) -> dict[str, Any]:
    """Return the one lease once a container holds it."""
    return eventually(lambda: [lease for lease in daemon.leases() if lease["binding"] == "container"])[0]


@contextmanager
def slow_docker(engine: PrivateEngine, directory: Path) -> Iterator[tuple[dict[str, str], Path]]:
    """Give an environment in which docker waits before it does anything, and the file that keeps it waiting."""
    program = directory / "docker"
    program.write_text(SLOW_DOCKER.format(docker=shutil.which("docker", path=engine.programs)))
    program.chmod(0o755)
    yield {"PATH": f"{directory}:{engine.programs}"}, directory / "docker.waits"


# -- who holds the lease ----------------------------------------------------------------------------------------------


def test_lease_goes_from_the_command_to_the_container(
    shared_daemon: Daemon, engine: PrivateEngine, tmp_path: Path
) -> None:
    """At first the lease is that of the docker command; when the container runs it is the container's, the same one."""
    with slow_docker(engine, tmp_path) as (env, waits):
        process = spawn(shared_daemon, engine, *RUN, "-n", "4", "--rm", "--name", "job", *POLITE, env=env)
        eventually(waits.exists)
        (before,) = shared_daemon.leases()
        assert (before["binding"], before["pid"], before["chips"]) == ("process", process.pid, [0, 1, 2, 3])
        assert f"process {process.pid}" in shared_daemon.cli("ps").stdout
        waits.unlink()
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    after = bound(shared_daemon)
    assert (after["lease"], after["chips"], after["container"]) == (before["lease"], before["chips"], "job")
    assert "container job" in shared_daemon.cli("ps").stdout
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)  # docker passes it on to the container
    assert process.communicate(timeout=PATIENCE)[0] == "bye\n"
    assert process.returncode == 143
    wait_until_free(shared_daemon)


def test_killed_docker_leaves_container_and_lease(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """A docker command that is killed right after the start leaves a container that runs, and is leased."""
    process = spawn(shared_daemon, engine, *RUN, "-n", "4", "--name", "alone", *STUBBORN)
    eventually(lambda: ours(engine, "--filter", "status=running"))
    process.kill()
    process.communicate()
    lease = bound(shared_daemon)
    for _ in range(5):
        assert [one["lease"] for one in shared_daemon.leases()] == [lease["lease"]]
        time.sleep(0.2)
    assert is_running(engine, "alone")
    assert shared_daemon.cli("check").stdout == ""
    engine.docker("kill", "alone")
    wait_until_free(shared_daemon)


def test_docker_killed_at_any_moment(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """Whenever the docker command is killed: what runs is leased with its chips, and what is leased runs."""
    for number in range(12):
        process = spawn(shared_daemon, engine, *RUN, "-n", "1", *(["-d"] if number % 3 == 0 else []), *STUBBORN)
        time.sleep(0.1 + number * 0.04)
        process.kill()
        process.communicate()

    def agree() -> bool:
        """Compare the leases with the containers that run."""
        running = engine.docker("ps", "--format", '{{.Label "io.neurond.lease"}}').stdout.split()
        return sorted(lease["lease"] for lease in shared_daemon.leases()) == sorted(running)

    eventually(agree, SOON)
    assert shared_daemon.cli("check").stdout == ""


def test_detached_again_and_again(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """With -d the command is gone at once: no other request gets the chips before the container has them."""
    for number in range(5):
        assert call(shared_daemon, engine, *RUN, "-d", "--all", "--name", f"job{number}", *STUBBORN).returncode == 0
        assert shared_daemon.cli("run", "-n", "1", "--no-wait", "--", "true").returncode == 75
        assert bound(shared_daemon)["container"] == f"job{number}"
        engine.docker("kill", f"job{number}")
        wait_until_free(shared_daemon)


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "patience"),
    [
        (("no-such-image:1",), 125, 3),
        (("-v", "/etc:relative", IMAGE, "true"), 125, 3),
        (("--rm", IMAGE, "no-such-command"), 127, 3),
        (("--no-such-flag=1", IMAGE, "true"), 125, 3),
        ((IMAGE, "no-such-command"), 127, SOON),
        ((IMAGE, "/bin"), 126, SOON),
    ],
    ids=["no image", "bad mount", "no command, --rm", "bad flag", "no command", "not executable"],
)
def test_docker_that_fails_frees_the_chips(
    shared_daemon: Daemon, engine: PrivateEngine, words: tuple[str, ...], code: int, patience: float
) -> None:
    """A docker command that fails has docker's code, and its chips are free: later only where a container is left."""
    done = call(shared_daemon, engine, *RUN, "--pull=never", "-n", "4", *words)
    assert done.returncode == code, done.stderr
    assert done.stderr
    wait_until_free(shared_daemon, patience)
    assert not ours(engine, "--filter", "status=running")


# -- create, then start -----------------------------------------------------------------------------------------------


def test_created_container_keeps_its_chips_for_later(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """What `docker create` made has its chips until it is started by hand and ends, also if the daemon dies twice."""
    options = ["--network", "none", "--chips", "4-7", "--name", "later"]
    assert call(docker_daemon, engine, "docker", "create", *options, *STUBBORN).returncode == 0
    lease = bound(docker_daemon)
    for begin in (False, True):
        docker_daemon.kill()
        if begin:
            engine.docker("start", "later")
        docker_daemon.start()
        assert [(one["lease"], one["state"]) for one in docker_daemon.leases()] == [(lease["lease"], "active")]
        assert docker_daemon.cli("run", "--chips", "5", "--no-wait", "--", "true").returncode == 75
        time.sleep(6)  # a look or two of the daemon's own
        assert held(docker_daemon) == {4, 5, 6, 7}
    assert is_running(engine, "later")
    engine.docker("kill", "later")
    wait_until_free(docker_daemon)


def test_created_container_that_is_removed_frees_its_chips(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """What was created and is removed without ever being started holds nothing any more."""
    command = ["docker", "create", "--network", "none", "-n", "1", "--name", "never", *STUBBORN]
    assert call(shared_daemon, engine, *command).returncode == 0
    assert bound(shared_daemon)["container"] == "never"
    engine.docker("rm", "never")
    wait_until_free(shared_daemon)


# -- the daemon dies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("detach", [[], ["-d"]], ids=["foreground", "detached"])
@pytest.mark.parametrize("back", ["before the container", "after the container"])
def test_daemon_dies_before_the_container_starts(
    docker_daemon: Daemon, engine: PrivateEngine, tmp_path: Path, detach: list[str], back: str
) -> None:
    """The daemon is killed when the command has its lease and no container yet: at its first answer all is leased."""
    with slow_docker(engine, tmp_path) as (env, waits):
        process = spawn(docker_daemon, engine, *RUN, *detach, "-n", "4", "--name", "job", *STUBBORN, env=env)
        eventually(waits.exists)
        (lease,) = docker_daemon.leases()
        docker_daemon.kill()
        if back == "before the container":
            docker_daemon.start()
            assert [one["lease"] for one in docker_daemon.leases()] == [lease["lease"]]
        waits.unlink()
        eventually(lambda: ours(engine, "--filter", "status=running"))
        if detach:
            process.communicate(timeout=PATIENCE)
        if back == "after the container":
            docker_daemon.start()
    assert [one["lease"] for one in docker_daemon.leases()] == [lease["lease"]]
    assert docker_daemon.cli("run", "--chips", "0", "--no-wait", "--", "true").returncode == 75
    after = bound(docker_daemon)
    assert (after["lease"], after["container"]) == (lease["lease"], "job")
    assert docker_daemon.cli("check").stdout == ""
    engine.docker("kill", "job")
    process.communicate(timeout=PATIENCE)
    wait_until_free(docker_daemon)


@pytest.mark.parametrize("detach", [[], ["-d"]], ids=["foreground", "detached"])
def test_daemon_dies_at_the_hand_over(docker_daemon: Daemon, engine: PrivateEngine, detach: list[str]) -> None:
    """The daemon is killed at the moment at which it hands the lease over, and goes on with that when it is back."""
    docker_daemon.kill()
    docker_daemon.env = {"NEUROND_CRASH_AT": "lease.bound"}
    docker_daemon.start()
    process = spawn(docker_daemon, engine, *RUN, *detach, "-n", "4", "--name", "job", *STUBBORN)
    assert docker_daemon.process is not None
    assert docker_daemon.process.wait(PATIENCE) == -signal.SIGKILL
    if detach:
        process.communicate(timeout=PATIENCE)
    docker_daemon.env = {}
    docker_daemon.start()
    assert [lease["chips"] for lease in docker_daemon.leases()] == [[0, 1, 2, 3]]
    assert bound(docker_daemon)["container"] == "job"
    engine.docker("kill", "job")
    process.communicate(timeout=PATIENCE)
    wait_until_free(docker_daemon)


def test_daemon_that_stands_still(docker_daemon: Daemon, engine: PrivateEngine, tmp_path: Path) -> None:
    """A daemon that hears of command and container only when both have long changed still hands the lease over."""
    with slow_docker(engine, tmp_path) as (env, waits):
        process = spawn(docker_daemon, engine, *RUN, "-d", "-n", "4", "--name", "job", *STUBBORN, env=env)
        eventually(waits.exists)
        docker_daemon.process.send_signal(signal.SIGSTOP)  # type: ignore[union-attr]
        try:
            waits.unlink()
            process.communicate(timeout=PATIENCE)
            time.sleep(1)
        finally:
            docker_daemon.process.send_signal(signal.SIGCONT)  # type: ignore[union-attr]
    assert docker_daemon.cli("run", "--chips", "0", "--no-wait", "--", "true").returncode == 75
    assert bound(docker_daemon)["container"] == "job"
    engine.docker("kill", "job")
    wait_until_free(docker_daemon)


def test_label_without_the_chips_is_no_claim(docker_daemon: Daemon, engine: PrivateEngine, tmp_path: Path) -> None:
    """A container that only carries the labels of a lease does not take it from the command that holds it."""
    with slow_docker(engine, tmp_path) as (env, waits):
        process = spawn(docker_daemon, engine, *RUN, "-n", "1", "--name", "job", *STUBBORN, env=env)
        eventually(waits.exists)
        (lease,) = docker_daemon.leases()
        labels = [f"--label=io.neurond.lease={lease['lease']}", f"--label=io.neurond.home={docker_daemon.directory}"]
        engine.docker("run", "--detach", "--network=none", *labels, *STUBBORN)
        assert docker_daemon.cli("check").stdout == ""
        assert [row["binding"] for row in docker_daemon.leases()] == ["process"]
        waits.unlink()
        assert bound(docker_daemon)["container"] == "job"
    engine.docker("kill", "job")
    process.communicate(timeout=PATIENCE)
    wait_until_free(docker_daemon)


def test_container_that_ended_unseen(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """Command and container both ended while the daemon was away: nothing is leased when it is back."""
    assert call(docker_daemon, engine, *RUN, "-d", "-n", "4", "--name", "job", *STUBBORN).returncode == 0
    docker_daemon.kill()
    engine.docker("kill", "job")
    docker_daemon.start()
    wait_until_free(docker_daemon)


# -- the terminal -----------------------------------------------------------------------------------------------------


def test_terminal_is_the_containers(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """With -it on a terminal the container has one, and what is typed reaches it."""
    script = "test -t 0 && test -t 1 && echo a-terminal; read line; echo got $line; exit 7"
    words = [*NEUROND, *RUN, "-n", "1", "--rm", "-it", IMAGE, "sh", "-c", f"'{script}'"]
    env = {"NEUROND_HOST": shared_daemon.address, "DOCKER_HOST": engine.url, "PATH": engine.programs}
    command = ["script", "--quiet", "--return", "--command", " ".join(words), "/dev/null"]
    done = subprocess.run(
        command, env=os.environ | env, input="typed\n", capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 7, done.stdout
    assert "a-terminal" in done.stdout
    assert "got typed" in done.stdout
    wait_until_free(shared_daemon)
