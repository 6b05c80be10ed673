"""`container run`: options mean what they mean to docker run, and output and exit code are the container's own."""

import os
import random
import shlex
import subprocess
from contextlib import ExitStack
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

import neurond
from neurond.client import NeurondError
from neurond.settings.table import Settings
from tests.containers.support import IMAGE, STUBBORN, held, inspect, is_running, launch, ours, wait_until_free
from tests.daemon.support import ME, Raw, leases_nothing, wait_in_line
from tests.harness import NEUROND, Daemon, PrivateEngine, eventually

pytestmark = pytest.mark.docker

MOST_WAITING = Settings().most_waiting
RUN = ("container", "run", "-n", "1")
SOURCES = str(Path(neurond.__file__).parents[1])


def shell(daemon: Daemon, script: str, *options: str, env: dict[str, str] | None = None) -> str:
    """Run a script in a container with these options, and return what it writes."""
    done = daemon.cli(*RUN, *options, IMAGE, "sh", "-c", script, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


# -- output and exit code ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 7, 125, 255])
def test_exit_code_is_the_containers(shared_daemon: Daemon, code: int) -> None:
    """The exit code of the command is that of the container, whatever it is."""
    done = shared_daemon.cli(*RUN, IMAGE, "sh", "-c", f"exit {code}")
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_stdout_and_stderr_are_kept_apart(shared_daemon: Daemon) -> None:
    """What the container writes to stdout and to stderr comes out where it belongs, and nothing is added."""
    done = shared_daemon.cli(*RUN, IMAGE, "sh", "-c", "echo out; echo err >&2; echo more")
    assert (done.returncode, done.stdout, done.stderr) == (0, "out\nmore\n", "err\n")


@pytest.mark.parametrize(
    "content",
    [bytes(range(256)) * 3, b"no newline", b"\n\n\n", b"", random.Random(1).randbytes(5 << 20)],
    ids=["all bytes", "no newline", "newlines", "nothing", "5 MiB"],
)
def test_output_is_exact(shared_daemon: Daemon, tmp_path: Path, content: bytes) -> None:
    """Output arrives byte by byte as it was written, on both streams, however much it is."""
    (tmp_path / "content").write_bytes(content)
    command = [*RUN, "-v", f"{tmp_path}:/data:ro", IMAGE, "sh", "-c", "cat /data/content; cat /data/content >&2"]
    env = os.environ | {"NEUROND_HOST": shared_daemon.address}
    done = subprocess.run([*NEUROND, *command], env=env, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0
    assert done.stdout == content
    assert done.stderr == content


def test_output_comes_while_the_container_runs(shared_daemon: Daemon) -> None:
    """Output is shown when it is written, even half a line, not when the container ends."""
    process = shared_daemon.spawn(*RUN, "--name", "half", IMAGE, "sh", "-c", "echo -n half; exec sleep 600")
    assert process.stdout is not None
    assert process.stdout.read(4) == "half"
    assert shared_daemon.cli("container", "stop", "--time", "0", "half").returncode == 0
    process.communicate(timeout=20)
    assert process.returncode == 137


# -- the container and its lease --------------------------------------------------------------------------------------


def test_detached_container_holds_its_lease(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """With -d the id is printed, and the lease lives until the container ends."""
    done = shared_daemon.cli("container", "run", "-d", "-n", "1", *STUBBORN)
    container = done.stdout.strip()
    assert (done.returncode, done.stderr) == (0, "")
    assert is_running(engine, container)
    (lease,) = shared_daemon.leases()
    assert (lease["state"], lease["binding"], lease["container_id"]) == ("active", "container", container)
    engine.docker("kill", container)
    wait_until_free(shared_daemon)


@pytest.mark.parametrize("detach", [[], ["--detach"]], ids=["foreground", "detached"])
def test_rm_removes_the_container(shared_daemon: Daemon, engine: PrivateEngine, detach: list[str]) -> None:
    """With --rm the container is removed when it has ended, as are its anonymous volumes."""
    options = [*detach, "--rm", "-n", "1", "-v", "/anonymous"]
    assert shared_daemon.cli("container", "run", *options, IMAGE, "true").returncode == 0
    eventually(lambda: not ours(engine))
    assert engine.docker("volume", "ls", "--quiet").stdout == ""
    wait_until_free(shared_daemon)


def test_ended_container_stays_and_holds_nothing(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """Without --rm the ended container is kept with its logs, and holds no chip."""
    done = shared_daemon.cli("container", "run", "--all", "--name", "kept", IMAGE, "sh", "-c", "echo said; exit 3")
    assert done.returncode == 3
    wait_until_free(shared_daemon)
    assert shared_daemon.cli("container", "run", "--all", "--no-wait", IMAGE, "true").returncode == 0
    state = inspect(engine, "kept")["State"]
    assert (state["Status"], state["ExitCode"]) == ("exited", 3)
    assert shared_daemon.cli("container", "logs", "kept").stdout == "said\n"


def test_default_name_is_made_of_the_lease(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """A container without --name is called neurond-LEASE, and carries neurond's labels."""
    container = launch(shared_daemon, "--chips", "4-7", *STUBBORN)
    (lease,) = shared_daemon.leases()
    found = inspect(engine, container)
    assert found["Name"] == f"/neurond-{lease['lease']}"
    labels = {"io.neurond.lease": lease["lease"], "io.neurond.owner": "0", "io.neurond.chips": "4,5,6,7"}
    assert labels.items() <= found["Config"]["Labels"].items()


def test_name_is_the_leases_too(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """--name is the name of the container and of the lease."""
    container = launch(shared_daemon, "-n", "1", "--name", "mine", *STUBBORN)
    (lease,) = shared_daemon.leases()
    assert inspect(engine, container)["Name"] == "/mine"
    assert (lease["name"], lease["container"]) == ("mine", "mine")


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "script", "output"),
    [
        ("-e 'A=b c' --env EMPTY=", 'echo "[$A][$EMPTY]${EMPTY+set}"', "[b c][]set\n"),
        ("-e OWN", 'echo "$OWN"', "from outside\n"),
        ("-e OWN=given", 'echo "$OWN"', "given\n"),
        ("-e NOT_THERE", 'echo "${NOT_THERE-unset}"', "unset\n"),
        ("-w /bin", "pwd", "/bin\n"),
        ("-u 12:13", "id -u; id -g", "12\n13\n"),
        ("--ulimit nofile=1000:2000", "ulimit -Sn; ulimit -Hn", "1000\n2000\n"),
        ("--ulimit=nofile=1000", "ulimit -Sn; ulimit -Hn", "1000\n1000\n"),
        ("--network none", "ls /sys/class/net", "lo\n"),
    ],
)
def test_option_takes_effect_inside(shared_daemon: Daemon, options: str, script: str, output: str) -> None:
    """An option has, inside the container, the effect that it has with docker run."""
    assert shell(shared_daemon, script, *shlex.split(options), env={"OWN": "from outside"}) == output


@pytest.mark.parametrize(
    ("options", "where", "value"),
    [
        ("--shm-size 8m", "HostConfig.ShmSize", 8 << 20),
        ("--shm-size 12345678", "HostConfig.ShmSize", 12345678),
        ("--network host", "HostConfig.NetworkMode", "host"),
        ("--network none", "HostConfig.NetworkMode", "none"),
        ("--ipc host", "HostConfig.IpcMode", "host"),
        ("--label a=b=c", "Config.Labels.a", "b=c"),
        ("--label alone", "Config.Labels.alone", ""),
        ("--cap-add IPC_LOCK --cap-add SYS_PTRACE", "HostConfig.CapAdd", ["IPC_LOCK", "SYS_PTRACE"]),
        ("-u 12", "Config.User", "12"),
        ("-w /bin", "Config.WorkingDir", "/bin"),
        ("--ulimit nofile=1000:2000", "HostConfig.Ulimits", [{"Name": "nofile", "Soft": 1000, "Hard": 2000}]),
    ],
)
def test_option_reaches_the_engine(
    shared_daemon: Daemon, engine: PrivateEngine, options: str, where: str, value: object
) -> None:
    """An option arrives where docker run would have put it."""
    done = shared_daemon.cli("container", "run", "-n", "1", *options.split(), IMAGE, "true")
    assert done.returncode == 0, done.stderr
    found: Any = inspect(engine, next(iter(ours(engine))))
    found = reduce(lambda part, key: part[key], where.split("."), found)
    if where == "HostConfig.CapAdd":  # newer engines write CAP_IPC_LOCK
        found = [capability.removeprefix("CAP_") for capability in found]
    assert found == value


def test_shm_is_as_large_as_asked_for(shared_daemon: Daemon) -> None:
    """/dev/shm has the size of --shm-size inside."""
    (mount,) = [
        line for line in shell(shared_daemon, "cat /proc/mounts", "--shm-size", "8m").splitlines() if "shm" in line
    ]
    assert "size=8192k" in mount


def test_env_file(shared_daemon: Daemon, tmp_path: Path) -> None:
    """Variables come from files, with comments left out and names alone passed on; -e has the last word."""
    (tmp_path / "one").write_text("# a comment\n\nA=1\nB= two words \nOWN\nNOT_THERE\n")
    (tmp_path / "two").write_text("A=2\nC=3=4\r\n")
    files = ["--env-file", str(tmp_path / "one"), "--env-file", str(tmp_path / "two"), "-e", "B=given"]
    script = 'echo "[$A][$B][$C][$OWN]${NOT_THERE-unset}"'
    assert shell(shared_daemon, script, *files, env={"OWN": "own"}) == "[2][given][3=4][own]unset\n"


@pytest.mark.parametrize("source", ["{}/data", "./data", "../{name}/data"], ids=["absolute", "relative", "parent"])
def test_volume(shared_daemon: Daemon, tmp_path: Path, source: str) -> None:
    """A directory is mounted, also one named relative to where the command is called; :ro keeps it as it is."""
    (tmp_path / "data").mkdir()
    path = source.format(tmp_path, name=tmp_path.name)
    for mode, script in (("", "echo written >/data/file"), (":ro", "cat /data/file; ! echo more >/data/file")):
        command = [*RUN, "-v", f"{path}:/data{mode}", IMAGE, "sh", "-c", script]
        process = shared_daemon.spawn(*command, cwd=tmp_path, env={"PYTHONPATH": SOURCES})
        output, errors = process.communicate(timeout=30)
        assert process.returncode == 0, errors
    assert output == "written\n"
    assert "Read-only file system" in errors
    assert (tmp_path / "data/file").read_text() == "written\n"


def test_named_volume_outlives_the_container(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """A named volume keeps what was written to it, and --rm does not take it away."""
    try:
        shell(shared_daemon, "echo kept >/data/file", "--rm", "-v", "kept:/data")
        assert shell(shared_daemon, "cat /data/file", "--rm", "-v", "kept:/data") == "kept\n"
    finally:
        eventually(lambda: not ours(engine))
        engine.docker("volume", "rm", "kept")


@pytest.mark.parametrize(
    ("options", "command", "output"),
    [
        ([], ["given"], "image's given\n"),
        (["--entrypoint", "/bin/sh"], ["-c", "echo replaced"], "replaced\n"),
        (["--entrypoint", ""], ["echo", "removed"], "removed\n"),
        (["--entrypoint="], ["echo", "removed"], "removed\n"),
    ],
    ids=["image's", "replaced", "removed", "removed by ="],
)
def test_entrypoint(
    shared_daemon: Daemon, engine: PrivateEngine, options: list[str], command: list[str], output: str
) -> None:
    """The image's entry point is used, replaced or removed."""
    made = engine.docker("create", IMAGE, "true").stdout.strip()
    engine.docker("commit", "--change", 'ENTRYPOINT ["echo", "image\'s"]', made, "neurond-entry:1")
    engine.docker("rm", made)
    done = shared_daemon.cli(*RUN, *options, "neurond-entry:1", *command)
    assert (done.returncode, done.stdout) == (0, output), done.stderr


@pytest.mark.parametrize(
    ("options", "cores"),
    [
        ("", "unset"),
        ("--core-numbering none", "unset"),
        ("--core-numbering global", "8,9,10,11,12,13,14,15"),
        ("--core-numbering local", "0,1,2,3,4,5,6,7"),
        ("-e NEURON_RT_VISIBLE_CORES=9-10", "9-10"),
        ("-e NEURON_RT_VISIBLE_CORES=0-3 --core-numbering global", "0-3"),
    ],
)
def test_environment_tells_of_the_lease(shared_daemon: Daemon, engine: PrivateEngine, options: str, cores: str) -> None:
    """Inside are the lease and its chips; core numbers only if asked for, or the user's own if they fit the lease."""
    script = 'echo "$NEUROND_LEASE $NEUROND_CHIPS $NEURON_PROCESS_TAG ${NEURON_RT_VISIBLE_CORES-unset}"'
    command = ["--chips", "4-7", *options.split(), IMAGE, "sh", "-c", script]
    output = shared_daemon.cli("container", "run", *command).stdout
    (container,) = ours(engine)
    lease = inspect(engine, container)["Config"]["Labels"]["io.neurond.lease"]
    assert output == f"{lease} 4,5,6,7 neurond-{lease} {cores}\n"


def test_arguments_pass_untouched(shared_daemon: Daemon) -> None:
    """What stands after the image belongs to the command, even if it looks like an option or has odd characters."""
    given = ["--rm", "-n", "5", "--wait", "-e", "X=Y", "two  words", "", '"quoted"', "$HOME", "a\nb", "--", "-", "ünï"]
    done = shared_daemon.cli(*RUN, IMAGE, "sh", "-c", 'for each; do echo "[$each]"; done', "sh", *given)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "".join(f"[{each}]\n" for each in given)


# -- waiting ----------------------------------------------------------------------------------------------------------


def test_wait_is_served_when_chips_are_free(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """A launch waits for chips in use, says why, and goes on as soon as they are free."""
    holder = launch(shared_daemon, "-n", "1", "--name", "holder", *STUBBORN)
    waiter = shared_daemon.spawn("container", "run", "--all", "--wait", "1m", IMAGE, "echo", "served")
    assert waiter.stderr is not None
    assert "waiting: all 16 chips asked, 15 free" in waiter.stderr.readline()
    assert [lease["state"] for lease in shared_daemon.leases()] == ["active", "queued"]
    engine.docker("kill", holder)
    output, _ = waiter.communicate(timeout=30)
    assert (waiter.returncode, output) == (0, "served\n")
    wait_until_free(shared_daemon)


@pytest.mark.parametrize(
    ("options", "code"),
    [("--no-wait", 75), ("--wait 100ms", 75), ("--no-wait -E 9", 9), ("--wait 0.1 -E 0", 0)],
)
def test_no_capacity_has_its_own_code(shared_daemon: Daemon, engine: PrivateEngine, options: str, code: int) -> None:
    """Chips that are not to be had, at once or in time, give 75 or the code of -E, and no container."""
    holder = launch(shared_daemon, "--chips", "0", *STUBBORN)
    done = shared_daemon.cli("container", "run", "--all", *options.split(), IMAGE, "true")
    assert (done.returncode, done.stdout) == (code, "")
    assert "held: 0 by root" in done.stderr
    assert ours(engine) == {holder}
    assert held(shared_daemon) == {0}


def test_waiter_that_is_killed_leaves_the_queue(shared_daemon: Daemon) -> None:
    """A launch that waits and is killed is forgotten, and does not start a container later."""
    launch(shared_daemon, "--chips", "0", *STUBBORN)
    waiter = shared_daemon.spawn("container", "run", "--all", IMAGE, "true")
    eventually(lambda: len(shared_daemon.leases()) == 2)
    waiter.kill()
    waiter.communicate()
    eventually(lambda: [lease["state"] for lease in shared_daemon.leases()] == ["active"])


# -- on the wire ------------------------------------------------------------------------------------------------------


def test_a_run_without_more_has_to_detach(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """RunContainer without `more` and without `detach` is refused, as its output could go nowhere; either is enough."""
    with leases_nothing(shared_daemon), pytest.raises(NeurondError, match="call it with more") as refused:
        shared_daemon.call("RunContainer", image=IMAGE, count=1, command=["true"])
    assert refused.value.kind == "InvalidRequest"
    assert ours(engine) == set()
    reply = shared_daemon.call("RunContainer", image=IMAGE, count=1, command=["sleep", "600"], detach=True)
    assert is_running(engine, reply["container_id"])
    with shared_daemon.client() as client:
        *_, last = client.stream("RunContainer", image=IMAGE, count=1, command=["sh", "-c", "exit 3"])
    assert last["exit_code"] == 3


def test_launches_that_wait_are_limited_too(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """A launch counts among the requests of its user that wait: one too many is refused, whichever kind it is."""
    held = docker_daemon.call("Acquire", all=True, ttl=600)["lease"]
    wish: dict[str, Any] = {"image": IMAGE, "count": 1, "wait": 600, "command": ["true"], "detach": True}
    with ExitStack() as stack:
        first = stack.enter_context(Raw(docker_daemon))
        first.send("RunContainer", **wish)
        eventually(lambda: len(docker_daemon.leases()) == 2)
        for _ in range(MOST_WAITING - 1):
            wait_in_line(stack.enter_context(Raw(docker_daemon)), count=1, wait=600)
        calls: list[tuple[str, dict[str, Any]]] = [("RunContainer", wish), ("Acquire", {"count": 1, "wait": 600})]
        for method, parameters in calls:
            with pytest.raises(NeurondError, match=f"{MOST_WAITING} requests of {ME} wait already") as refused:
                docker_daemon.call(method, **parameters)
            assert refused.value.kind == "NoCapacity"
        assert ours(engine) == set()
        docker_daemon.call("Release", lease=held)
        assert first.expect()["container_id"]
