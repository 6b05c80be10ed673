"""Every option of `container run` reaches the engine; what is wrong in one is said by its name before anything else."""

import json
import os
import random
import shlex
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from neurond.cli.container_options import OPTIONS, REFUSED, table
from tests.containers.support import IMAGE, STUBBORN, inspect, launch, wait_until_free
from tests.harness import NEUROND, PATIENCE, Daemon, PrivateEngine, short_directory

pytestmark = pytest.mark.docker

README = Path(__file__).parent.parent.parent / "README.md"
RUN = ("container", "run", "-n", "1")

REACHES: dict[str, tuple[str, str, Any]] = {
    "--name": ("all", "Name", "/all"),
    "--rm": ("", "Config/Labels/io.neurond.remove", "yes"),
    "--platform": ("linux/amd64", "Platform", "linux"),
    "--env": ("A=b=c", "Config/Env/1", "A=b=c"),
    "--env-file": ("{directory}/variables", "Config/Env/0", "FROM=file"),
    "--volume": ("{directory}:/v:ro", "HostConfig/Binds", ["{directory}:/v:ro"]),
    "--mount": (
        "type=bind,source={directory},target=/m,readonly",
        "HostConfig/Mounts",
        [{"Type": "bind", "Source": "{directory}", "Target": "/m", "ReadOnly": True}],
    ),
    "--tmpfs": ("/t:size=1m", "HostConfig/Tmpfs", {"/t": "size=1m"}),
    "--workdir": ("/bin", "Config/WorkingDir", "/bin"),
    "--user": ("12:13", "Config/User", "12:13"),
    "--group-add": ("14", "HostConfig/GroupAdd", ["14"]),
    "--hostname": ("inside", "Config/Hostname", "inside"),
    "--add-host": ("there:192.0.2.1", "HostConfig/ExtraHosts", ["there:192.0.2.1"]),
    "--dns": ("192.0.2.2", "HostConfig/Dns", ["192.0.2.2"]),
    "--publish": (
        "127.0.0.1:8080:80/udp",
        "HostConfig/PortBindings",
        {"80/udp": [{"HostIp": "127.0.0.1", "HostPort": "8080"}]},
    ),
    "--network": ("none", "HostConfig/NetworkMode", "none"),
    "--ipc": ("host", "HostConfig/IpcMode", "host"),
    "--pid": ("host", "HostConfig/PidMode", "host"),
    "--shm-size": ("8m", "HostConfig/ShmSize", 8 << 20),
    "--memory": ("0.25g", "HostConfig/Memory", 256 << 20),
    "--memory-reservation": ("32m", "HostConfig/MemoryReservation", 32 << 20),
    "--cpus": ("0.5", "HostConfig/NanoCpus", 500_000_000),
    "--cpuset-cpus": ("0", "HostConfig/CpusetCpus", "0"),
    "--cpu-shares": ("512", "HostConfig/CpuShares", 512),
    "--ulimit": ("nofile=1000:2000", "HostConfig/Ulimits", [{"Name": "nofile", "Soft": 1000, "Hard": 2000}]),
    "--cap-add": ("SYS_PTRACE", "HostConfig/CapAdd", ["SYS_PTRACE"]),
    "--cap-drop": ("CHOWN", "HostConfig/CapDrop", ["CHOWN"]),
    "--security-opt": (
        "seccomp={directory}/profile",
        "HostConfig/SecurityOpt/0",
        'seccomp={"defaultAction": "SCMP_ACT_ALLOW"}',
    ),
    "--entrypoint": ("/bin/sleep", "Config/Entrypoint", ["/bin/sleep"]),
    "--init": ("", "HostConfig/Init", True),
    "--interactive": ("", "Config/OpenStdin", True),
    "--read-only": ("", "HostConfig/ReadonlyRootfs", True),
    "--label": ("a=b=c", "Config/Labels/a", "b=c"),
    "--log-driver": ("json-file", "HostConfig/LogConfig/Type", "json-file"),
    "--log-opt": ("max-size=1m", "HostConfig/LogConfig/Config", {"max-size": "1m"}),
    "--restart": ("on-failure:3", "HostConfig/RestartPolicy", {"Name": "on-failure", "MaximumRetryCount": 3}),
    "--stop-signal": ("SIGUSR1", "Config/StopSignal", "SIGUSR1"),
    "--stop-timeout": ("3", "Config/StopTimeout", 3),
    "--core-numbering": ("global", "Config/Env/-1", "NEURON_RT_VISIBLE_CORES=0,1"),
    "--device": (
        "/dev/null:/dev/x:r",
        "HostConfig/Devices/-1",
        {"PathOnHost": "/dev/null", "PathInContainer": "/dev/x", "CgroupPermissions": "r"},
    ),
}
"""What each option is given, where `docker inspect` shows it, and as what."""

ELSEWHERE = {
    "--detach": "test_run.py",
    "--pull": "test_image_is_not_there, here",
    "--privileged": "test_ways_around.py",
    "--efa": "test_efa, here",
}
"""Options that make no difference that docker inspect could show, or not everywhere, and where they are tested."""


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """Give a directory with the files that options name."""
    with short_directory() as directory:
        (directory / "variables").write_text("FROM=file\n")
        (directory / "profile").write_text('{"defaultAction":\n"SCMP_ACT_ALLOW"}')
        yield directory


@pytest.fixture(scope="module")
def found(module_daemon: Daemon, engine: PrivateEngine, directory: Path) -> Iterator[dict[str, Any]]:
    """Give what the engine knows of one container that was launched with every option, in its long form."""
    given = {name: text.format(directory=directory) for name, (text, _, _) in REACHES.items()}
    words = [f"{name}={text}" if text else name for name, text in given.items()]
    container = launch(module_daemon, "-n", "1", *words, IMAGE, "600")
    yield inspect(engine, container)
    engine.docker("rm", "--force", container)
    wait_until_free(module_daemon)


def test_no_option_is_left_out() -> None:
    """Each row of the table of options has its test."""
    assert {option.names.split()[-1] for option in OPTIONS} == REACHES.keys() | ELSEWHERE.keys()


@pytest.mark.parametrize("name", REACHES)
def test_option_reaches_the_engine(found: dict[str, Any], directory: Path, name: str) -> None:
    """What is given on the command line is what docker inspect shows, where docker run would have put it."""
    _, where, wanted = REACHES[name]
    value: Any = found
    for key in where.split("/"):
        value = value[int(key) if isinstance(value, list) else key]
    if name.startswith("--cap"):  # newer engines write CAP_SYS_PTRACE
        value = [capability.removeprefix("CAP_") for capability in value]
    assert value == json.loads(json.dumps(wanted).replace("{directory}", str(directory)))


SHORT = {option.names.split()[0]: option.names.split()[1] for option in OPTIONS if " " in option.names}


def test_short_options_reach_the_engine(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """The short names stand for the same, apart or in one word with the value."""
    words = "-di -eA=1 -e B=2 -v /usr:/a -v/usr:/b -w/bin -u12 -p 80 -m64m -l a=b"
    assert {word[:2] for word in words.split() if word[0] == "-"} | {"-i"} == SHORT.keys()
    done = shared_daemon.cli("container", "run", "-n1", *words.split(), *STUBBORN)
    assert done.returncode == 0, done.stderr
    found = inspect(engine, done.stdout.strip())
    assert found["Config"]["OpenStdin"]
    assert found["Config"]["Env"][:2] == ["A=1", "B=2"]
    assert found["HostConfig"]["Binds"] == ["/usr:/a", "/usr:/b"]
    assert (found["Config"]["WorkingDir"], found["Config"]["User"]) == ("/bin", "12")
    assert (found["HostConfig"]["Memory"], found["Config"]["Labels"]["a"]) == (64 << 20, "b")
    assert "80/tcp" in found["HostConfig"]["PortBindings"]


# -- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--cpus x", "--cpus x: a number of processors, as in 1.5"),
        ("--cpus inf", "--cpus inf: a number"),
        ("--cpus=-1", "--cpus -1: a number"),
        ("--cpu-shares many", "--cpu-shares"),
        ("--stop-timeout soon", "--stop-timeout"),
        ("-m 1q", "--memory 1q: a size is a number of bytes, or one with b, k, m or g"),
        ("--memory=-1", "--memory -1: a size"),
        ("--memory-reservation half", "--memory-reservation half: a size"),
        ("--shm-size 8x", "--shm-size 8x: a size"),
        ("--ulimit nofile", "--ulimit nofile: the form is NAME=SOFT[:HARD]"),
        ("--restart never", "--restart never: no, on-failure[:TIMES], always and unless-stopped are possible"),
        ("--restart on-failure:-1", "--restart on-failure:-1: "),
        ("--restart no:3", "--restart no:3: "),
        ("-p x", "-p x: the form is [[IP:]HOSTPORT:]PORT[/udp]"),
        ("-p 70000", "-p 70000: "),
        ("-p 80-90:80-90", "one port each"),
        ("--mount x", "--mount x: the form is type=bind,source=/data,target=/data[,readonly] (x is not known)"),
        ("--mount type=bind,source=x,target=/x", "a bind mount has a source, which is an absolute path"),
        ("--mount type=bind,source=/x", "--mount type=bind,source=/x: the form"),
        ("--mount type=tmpfs,target=/x,tmpfs-mode=9", "tmpfs-mode is a mode in octal"),
        ("--mount type=tmpfs,target=/x,tmpfs-size=big", "a size is a number of bytes"),
        ("--log-opt =x", "--log-opt =x: the form is NAME=VALUE"),
        ("-l =x", "--label =x: the form is NAME=VALUE"),
        ("-e =x", "'=x' is no environment variable"),
        ("--device ''", "--device : the form is NODE[:PATH[:rwm]]"),
        ("--device a:b:c:d", "--device a:b:c:d: the form"),
        ("-v ''", "-v '': a volume is SOURCE:PATH[:ro]"),
        ("--pull sometimes", "--pull"),
        ("--core-numbering both", "--core-numbering"),
        ("--sysctl a=b", "neurond docker run takes every option of docker's"),
        ("--pids-limit 5", "unrecognized arguments: --pids-limit"),
        ("--health-cmd true", "unrecognized arguments: --health-cmd"),
        ("--memor 1g", "unrecognized arguments: --memor"),
        ("-q", "unrecognized arguments: -q"),
    ],
)
def test_wrong_option_is_refused_by_name(shared_daemon: Daemon, line: str, said: str) -> None:
    """A form that can't be, or an option that is not there, is named and refused with 2, before anything is leased."""
    before = len(shared_daemon.logged("lease.granted"))
    done = shared_daemon.cli(*RUN, *shlex.split(line), IMAGE, "true")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert said in done.stderr
    assert len(shared_daemon.logged("lease.granted")) == before


@pytest.mark.parametrize("names", REFUSED)
def test_refused_option_says_why(shared_daemon: Daemon, names: str) -> None:
    """An option that people know from docker, and that can't be, says so by each of its names, with the reason."""
    for name in names.split():
        for words in ([name, IMAGE], [f"{name}=x", IMAGE]) if name.startswith("--") else ([name, IMAGE],):
            done = shared_daemon.cli(*RUN, *words, "true")
            assert done.returncode == 2
            assert f"{'/'.join(names.split())}: {REFUSED[names]}" in done.stderr


@pytest.mark.parametrize("word", ["-it", "-ti"])
def test_a_terminal_is_docker_runs(shared_daemon: Daemon, word: str) -> None:
    """What everybody types by habit is answered with where to go."""
    done = shared_daemon.cli(*RUN, word, IMAGE, "true")
    assert done.returncode == 2
    assert "neurond docker run -it has one" in done.stderr


def test_the_readme_has_the_table() -> None:
    """What the README says of the options is what the code does with them."""
    assert table() in README.read_text()


def test_image_is_not_there(shared_daemon: Daemon) -> None:
    """With --pull never an image that is not there is not asked for anywhere: 125, and nothing is leased."""
    before = len(shared_daemon.logged("lease.granted"))
    done = shared_daemon.cli(*RUN, "--pull", "never", "localhost:1/no-such:1", "true")
    assert done.returncode == 125
    assert "image localhost:1/no-such:1 is not here, and --pull never" in done.stderr
    assert len(shared_daemon.logged("lease.granted")) == before


# -- EFA --------------------------------------------------------------------------------------------------------------


@contextmanager
def efa() -> Iterator[None]:
    """Make a node such as the EFA driver does; its number is that of /dev/null."""
    folder = Path("/dev/infiniband")
    folder.mkdir()
    try:
        os.mknod(folder / "uverbs0", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        yield
    finally:
        shutil.rmtree(folder)


def test_efa(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """--efa adds the adapter's devices and the memory that it takes; what the user says himself counts more.

    On a host without the adapter it is refused with the reason, before anything is leased.
    """
    assert not Path("/dev/infiniband").exists(), "a host with EFA: this test would take its devices away"
    before = len(shared_daemon.logged("lease.granted"))
    done = shared_daemon.cli(*RUN, "--efa", IMAGE, "true")
    assert done.returncode == 2
    assert "--efa: this host has no /dev/infiniband/uverbs*: is the EFA driver loaded?" in done.stderr
    assert len(shared_daemon.logged("lease.granted")) == before
    with efa():
        check_efa(shared_daemon, engine)


def check_efa(shared_daemon: Daemon, engine: PrivateEngine) -> None:
    """Look at what containers get with --efa."""
    done = shared_daemon.cli("container", "run", "-d", "-n", "1", "--efa", *STUBBORN)
    if done.returncode == 0:
        limits = inspect(engine, done.stdout.strip())["HostConfig"]["Ulimits"]
        assert limits == [{"Name": "memlock", "Soft": -1, "Hard": -1}]
        engine.docker("kill", done.stdout.strip())
    else:  # a machine on which not even Docker may lift that limit
        assert "error setting rlimit type 8: operation not permitted" in done.stderr
    wait_until_free(shared_daemon)

    limit = ["--ulimit", "memlock=65536"]
    plain = inspect(engine, launch(shared_daemon, "-n", "1", "--efa", *limit, *STUBBORN))["HostConfig"]
    assert "/dev/infiniband/uverbs0" in [device["PathInContainer"] for device in plain["Devices"]]
    assert [capability.removeprefix("CAP_") for capability in plain["CapAdd"]] == ["IPC_LOCK"]
    assert plain["Ulimits"] == [{"Name": "memlock", "Soft": 65536, "Hard": 65536}]
    assert plain["ShmSize"] == 8 << 30
    own = [*limit, "--shm-size", "1g", "--cap-add", "SYS_PTRACE"]
    given = inspect(engine, launch(shared_daemon, "-n", "1", "--efa", *own, *STUBBORN))["HostConfig"]
    assert given["ShmSize"] == 1 << 30
    assert {capability.removeprefix("CAP_") for capability in given["CapAdd"]} == {"SYS_PTRACE", "IPC_LOCK"}
    listing = engine.docker("exec", shared_daemon.leases()[0]["container_id"], "ls", "/dev/infiniband", "/dev").stdout
    assert {"uverbs0", "neuron0"} <= set(listing.split())


# -- standard input ---------------------------------------------------------------------------------------------------


def run_with(daemon: Daemon, stdin: Any, *arguments: str) -> "subprocess.CompletedProcess[bytes]":
    """Run a container with bytes, or a file, as its standard input."""
    given = {"input": stdin} if isinstance(stdin, bytes) else {"stdin": stdin}
    env = os.environ | {"NEUROND_HOST": daemon.address}
    return subprocess.run([*NEUROND, *RUN, *arguments], env=env, capture_output=True, timeout=60, check=False, **given)


@pytest.mark.parametrize(
    "content",
    [b"", b"no newline", bytes(range(256)) * 5, random.Random(2).randbytes(1 << 20)],
    ids=["nothing", "no newline", "all bytes", "1 MiB"],
)
def test_input_is_exact(shared_daemon: Daemon, content: bytes) -> None:
    """With -i the container reads what the command reads, byte by byte, and its end."""
    done = run_with(shared_daemon, content, "-i", IMAGE, "cat")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == content


def test_input_comes_when_it_is_typed(shared_daemon: Daemon) -> None:
    """A line is passed on when it is written, and the answer comes before the next one."""
    process = shared_daemon.spawn(*RUN, "-i", IMAGE, "sh", "-c", "while read line; do echo [$line]; done", stdin=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    for word in ("one", "two"):
        process.stdin.write(f"{word}\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"[{word}]\n"
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0


def test_container_that_wants_no_more_input(shared_daemon: Daemon) -> None:
    """A container that ends while input is being sent ends the command, with its own code, however much is left."""
    with subprocess.Popen(["/usr/bin/yes"], stdout=PIPE) as endless:
        done = run_with(shared_daemon, endless.stdout, "-i", IMAGE, "sh", "-c", "head -c 5; exit 9")
        assert (done.returncode, done.stdout, done.stderr) == (9, b"y\ny\ny", b"")
        done = run_with(shared_daemon, endless.stdout, "-i", IMAGE, "sh", "-c", "sleep 1; exit 8")  # that reads nothing
        assert (done.returncode, done.stdout, done.stderr) == (8, b"", b"")
        endless.kill()
    wait_until_free(shared_daemon)


def test_input_is_left_alone_without_i(shared_daemon: Daemon, tmp_path: Path) -> None:
    """Without -i the container has no input, and the command's own is not read: the next one in a script has it."""
    (tmp_path / "lines").write_text("one\ntwo\n")
    with (tmp_path / "lines").open("rb") as lines:
        done = run_with(shared_daemon, lines, IMAGE, "cat")
        assert (done.returncode, done.stdout) == (0, b"")
        assert os.lseek(lines.fileno(), 0, os.SEEK_CUR) == 0
        done = run_with(shared_daemon, lines, "-i", IMAGE, "cat")
        assert done.stdout == b"one\ntwo\n"


# -- how it ends ------------------------------------------------------------------------------------------------------

HEARS = "trap 'echo usr1; exit 3' USR1; trap 'echo term; exit 4' TERM; echo ready; while :; do sleep 0.02; done"


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, None], ids=["SIGINT", "SIGTERM", "container stop"])
def test_stop_signal(shared_daemon: Daemon, end: signal.Signals | None) -> None:
    """The signal of --stop-signal asks the container to end: on Ctrl-C, on SIGTERM, and on `container stop`."""
    options = ["--stop-signal", "USR1", "--name", "hears"]
    process = shared_daemon.spawn(*RUN, *options, IMAGE, "sh", "-c", HEARS)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    if end is None:
        assert shared_daemon.cli("container", "stop", "hears").returncode == 0
    else:
        process.send_signal(end)
    output, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, output) == (3, "usr1\n")


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, None], ids=["SIGINT", "SIGTERM", "container stop"])
def test_stop_timeout(shared_daemon: Daemon, end: signal.Signals | None) -> None:
    """One that hears nothing is killed after --stop-timeout, not sooner, and not only after docker's ten seconds."""
    options = ["--stop-timeout", "1", "--name", "deaf"]
    process = shared_daemon.spawn(*RUN, *options, IMAGE, "sh", "-c", "echo ready; exec sleep 600")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    before = time.monotonic()
    if end is None:
        assert shared_daemon.cli("container", "stop", "deaf").returncode == 0
    else:
        process.send_signal(end)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 137
    assert 1 <= time.monotonic() - before < 9


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["no-such-command"], 127),
        (["/no/such/command"], 127),
        (["/etc"], 126),
        (["sh", "-c", "exit 125"], 125),
        (["sh", "-c", "kill -TERM $$; sleep 1"], 143),
        (["sh", "-c", "sh -c 'kill -9 $$'; exit $?"], 137),
        (["sh", "-c", "sh -c 'kill -USR1 $$'; exit $?"], 138),
    ],
)
def test_exit_code_is_dockers(shared_daemon: Daemon, engine: PrivateEngine, command: list[str], code: int) -> None:
    """The exit code is the one that docker run has for the same command."""
    init = ["--init"] if "TERM" in command[-1] else []
    done = shared_daemon.cli(*RUN, *init, IMAGE, *command)
    theirs = engine.docker("run", "--rm", "--network=none", *init, IMAGE, *command, check=False)
    assert (done.returncode, theirs.returncode) == (code, code), done.stderr + theirs.stderr
