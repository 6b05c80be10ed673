"""From the start of a container to its end, whoever ends it: neurond, docker, or the command line in the foreground."""

import grp
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests.containers.support import (
    IMAGE,
    POLITE,
    STUBBORN,
    held,
    inspect,
    is_running,
    launch,
    ours,
    wait_for_output,
    wait_until_free,
)
from tests.harness import Daemon, PrivateEngine, eventually

pytestmark = pytest.mark.docker

AS_NOBODY = """
import os, sys
import neurond.cli.containers
neurond.cli.containers.run_parser().format_help()
os.setgroups([int(gid) for gid in sys.argv[1].split(",") if gid])
os.setgid(65534)
os.setuid(65534)
sys.exit(neurond.cli.main(sys.argv[2:]))
"""
"""The command line as a user without rights; all modules are read before, as that user may not be able to."""


# -- stop -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "handle",
    [
        lambda lease: lease["container"],
        lambda lease: lease["container_id"],
        lambda lease: lease["container_id"][:12],
        lambda lease: lease["lease"],
    ],
    ids=["name", "id", "id prefix", "lease"],
)
def test_stop(docker_daemon: Daemon, engine: PrivateEngine, handle: Callable[[dict[str, str]], str]) -> None:
    """A container is stopped by its name, its id or the beginning of that, or its lease; others go on."""
    other = launch(docker_daemon, "-n", "1", *STUBBORN)
    container = launch(docker_daemon, "-n", "1", *POLITE)
    wait_for_output(engine, container, "ready")
    (lease,) = [lease for lease in docker_daemon.leases() if lease["container_id"] == container]
    done = docker_daemon.cli("container", "stop", handle(lease))
    assert (done.returncode, done.stdout) == (0, f"{handle(lease)}\n"), done.stderr
    assert inspect(engine, container)["State"]["ExitCode"] == 143
    eventually(lambda: [lease["container_id"] for lease in docker_daemon.leases()] == [other])


def test_stop_kills_after_the_grace(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """A container that does not hear SIGTERM gets the grace, then SIGKILL."""
    container = launch(docker_daemon, "-n", "1", *STUBBORN)
    before = time.monotonic()
    assert docker_daemon.cli("container", "stop", "--time", "1", container).returncode == 0
    assert time.monotonic() - before >= 1
    assert inspect(engine, container)["State"]["ExitCode"] == 137
    wait_until_free(docker_daemon)


def test_daemon_answers_during_a_stop(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """A stop that takes its time holds up nobody else."""
    container = launch(docker_daemon, "-n", "1", *STUBBORN)
    stopping = docker_daemon.spawn("container", "stop", "--time", "2", container)
    before = time.monotonic()
    assert docker_daemon.cli("container", "run", "-n", "1", IMAGE, "true").returncode == 0
    assert time.monotonic() - before < 2
    assert is_running(engine, container)
    stopping.communicate(timeout=20)
    assert stopping.returncode == 0


def test_stop_of_what_is_not_there(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """A container that neurond did not launch is none of its business: 66."""
    engine.docker("run", "--detach", "--network", "none", "--name", "stranger", *STUBBORN)
    for name in ("stranger", "nothing"):
        done = docker_daemon.cli("container", "stop", name)
        assert done.returncode == 66
        assert f"no container '{name}' launched by neurond" in done.stderr
    assert is_running(engine, "stranger")


# -- ended by somebody else -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["kill", "rm --force", "stop --time 0"])
def test_end_from_outside_frees_the_chips(docker_daemon: Daemon, engine: PrivateEngine, end: str) -> None:
    """A container that docker ends gives its chips back within seconds."""
    container = launch(docker_daemon, "-n", "4", *STUBBORN)
    engine.docker(*end.split(), container)
    wait_until_free(docker_daemon, 5)


def test_paused_container_keeps_its_chips(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """A paused container holds its chips, and gives them back when it ends after all."""
    container = launch(docker_daemon, "-n", "1", "--name", "paused", *STUBBORN)
    engine.docker("pause", container)
    # The end of a second container makes neurond look at both.
    assert docker_daemon.cli("container", "run", "-n", "1", IMAGE, "true").returncode == 0
    eventually(lambda: [(lease["name"], lease["state"]) for lease in docker_daemon.leases()] == [("paused", "active")])
    assert json.loads(docker_daemon.cli("container", "ls", "-j").stdout)[0]["status"] == "paused"
    engine.docker("unpause", container)
    engine.docker("kill", container)
    wait_until_free(docker_daemon)


# -- the command line in the foreground -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_signal_stops_the_container(docker_daemon: Daemon, engine: PrivateEngine, number: signal.Signals) -> None:
    """A signal to the command stops the container; its last words are heard, and its exit code is the command's."""
    process = docker_daemon.spawn("container", "run", "-n", "1", *POLITE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output, errors) == (143, "bye\n", "")
    assert not ours(engine, "--filter", "status=running")
    wait_until_free(docker_daemon)


def test_signal_stops_a_deaf_container(docker_daemon: Daemon) -> None:
    """A container that does not hear SIGTERM is killed in the end, and the exit code says so: 137."""
    process = docker_daemon.spawn("container", "run", "-n", "1", IMAGE, "sh", "-c", "echo ready; exec sleep 600")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 137
    wait_until_free(docker_daemon)


def test_killed_command_leaves_the_container(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """A command that is killed leaves its container running, and the chips leased until it ends."""
    process = docker_daemon.spawn("container", "run", "-n", "4", "--name", "alone", *POLITE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.kill()
    process.communicate()
    # The end of a second container makes neurond look at both.
    assert docker_daemon.cli("container", "run", "-n", "1", IMAGE, "true").returncode == 0
    eventually(lambda: [(lease["name"], lease["state"]) for lease in docker_daemon.leases()] == [("alone", "active")])
    assert is_running(engine, "alone")
    assert len(held(docker_daemon)) == 4
    assert docker_daemon.cli("container", "stop", "alone").returncode == 0
    wait_until_free(docker_daemon)


# -- ls and logs ------------------------------------------------------------------------------------------------------


def test_ls(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """Containers that live are listed, with -a also those that ended; -q gives ids, -j objects."""
    running = launch(docker_daemon, "--chips", "4-7", "--name", "running", *STUBBORN)
    assert docker_daemon.cli("container", "run", "-n", "1", "--name", "ended", IMAGE, "false").returncode == 1
    engine.docker("run", "--detach", "--network", "none", "--name", "stranger", *STUBBORN)
    eventually(lambda: len(docker_daemon.leases()) == 1)
    (lease,) = docker_daemon.leases()

    header, row = docker_daemon.cli("container", "ls").stdout.splitlines()
    assert header.split() == ["CONTAINER", "NAME", "IMAGE", "STATUS", "LEASE", "CHIPS", "OWNER"]
    assert row.split() == [running[:12], "running", IMAGE, "running", lease["lease"], "4-7", "root"]
    assert docker_daemon.cli("container", "ls", "-q").stdout == f"{running[:12]}\n"
    assert "exited (1)" in docker_daemon.cli("container", "ls", "-a").stdout
    rows = {row["name"]: row for row in json.loads(docker_daemon.cli("container", "ls", "-a", "-j").stdout)}
    assert rows.keys() == {"running", "ended"}
    assert rows["running"] | {"lease": lease["lease"], "chips": [4, 5, 6, 7], "exit_code": None} == rows["running"]
    assert rows["ended"] | {"lease": None, "chips": [], "status": "exited", "exit_code": 1} == rows["ended"]


def test_ls_of_nothing(docker_daemon: Daemon) -> None:
    """Without containers there is nothing to print, and as JSON an empty list."""
    assert docker_daemon.cli("container", "ls", "-a").stdout == ""
    assert docker_daemon.cli("container", "ls", "-q").stdout == ""
    assert json.loads(docker_daemon.cli("container", "ls", "-j").stdout) == []


def test_logs(docker_daemon: Daemon) -> None:
    """Output is printed whole or from its end on, each stream to its own."""
    script = "echo one; echo two; echo three; echo four >&2"
    assert (
        docker_daemon.cli("container", "run", "-n", "1", "--name", "talks", IMAGE, "sh", "-c", script).returncode == 0
    )
    done = docker_daemon.cli("container", "logs", "talks")
    assert (done.returncode, done.stdout, done.stderr) == (0, "one\ntwo\nthree\n", "four\n")
    done = docker_daemon.cli("container", "logs", "--tail", "2", "talks")
    assert len((done.stdout + done.stderr).splitlines()) == 2
    assert docker_daemon.cli("container", "logs", "--tail", "0", "talks").stdout == ""
    assert docker_daemon.cli("container", "logs", "nobody").returncode == 66


def test_logs_follow(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """With -f the output is followed until the container ends."""
    container = launch(docker_daemon, "-n", "1", *POLITE)
    wait_for_output(engine, container, "ready")
    assert docker_daemon.cli("container", "logs", container).stdout == "ready\n"
    process = docker_daemon.spawn("container", "logs", "-f", container)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert docker_daemon.cli("container", "stop", container).returncode == 0
    output, _ = process.communicate(timeout=20)
    assert (process.returncode, output) == (0, "bye\n")


# -- who may ----------------------------------------------------------------------------------------------------------


def as_nobody(daemon: Daemon, *arguments: str, groups: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
    """Run the command line as the user nobody, in these groups only."""
    daemon.directory.parent.chmod(0o755)
    daemon.socket.chmod(0o666)
    gids = ",".join(str(grp.getgrnam(name).gr_gid) for name in groups)
    env = os.environ | {"NEUROND_HOST": daemon.address}
    command = [sys.executable, "-c", AS_NOBODY, gids, "container", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "arguments",
    [("run", "-n", "1", IMAGE, "true"), ("stop", "roots"), ("logs", "roots")],
    ids=lambda arguments: arguments[0],
)
def test_containers_take_the_group_docker(
    docker_daemon: Daemon, engine: PrivateEngine, arguments: tuple[str, ...]
) -> None:
    """Who is not in the group docker may neither start nor stop a container, nor read its output: 77."""
    container = launch(docker_daemon, "-n", "1", "--name", "roots", *STUBBORN)
    done = as_nobody(docker_daemon, *arguments)
    assert done.returncode == 77, done.stderr
    assert "nobody may not start containers: that takes the group docker" in done.stderr
    assert ours(engine) == {container}
    assert is_running(engine, container)


@pytest.mark.parametrize("verb", ["stop", "logs"])
def test_containers_of_others_are_left_alone(docker_daemon: Daemon, engine: PrivateEngine, verb: str) -> None:
    """The group docker is not enough to stop somebody else's container or read its output: 77."""
    launch(docker_daemon, "-n", "1", "--name", "roots", *STUBBORN)
    done = as_nobody(docker_daemon, verb, "roots", groups=("docker",))
    assert done.returncode == 77, done.stderr
    assert "container roots was launched by somebody else" in done.stderr
    assert is_running(engine, "roots")


def test_anyone_may_list(docker_daemon: Daemon) -> None:
    """Who can open the socket may see which containers there are."""
    launch(docker_daemon, "-n", "1", "--name", "roots", *STUBBORN)
    done = as_nobody(docker_daemon, "ls")
    assert done.returncode == 0
    assert "roots" in done.stdout
