"""`neurond run`: chips for a command, which is then as if neurond had never been there."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.daemon.support import ME, ending, leases_nothing
from tests.harness import NEUROND, PATIENCE, Daemon, eventually

CORES = "NEURON_RT_VISIBLE_CORES"
SHOW = 'echo "$NEUROND_LEASE $NEUROND_CHIPS $NEURON_PROCESS_TAG $NEURON_RT_VISIBLE_CORES"'
REFUSED = 125


@pytest.fixture(autouse=True)
def without_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a setting of the machine that runs the tests out of the way."""
    monkeypatch.delenv(CORES, raising=False)


@pytest.mark.parametrize("code", [0, 1, 2, 75, 125, 255])
def test_the_exit_code_is_that_of_the_command(daemon: Daemon, code: int) -> None:
    """Whatever the command exits with is what `run` exits with, its own codes included; stderr is the command's too."""
    done = daemon.cli("run", "-n", "1", "--", "sh", "-c", f"echo out; echo err >&2; exit {code}")
    assert (done.returncode, done.stdout, done.stderr) == (code, "out\n", "err\n")
    eventually(daemon.all_free)


def test_the_command_keeps_the_pid(daemon: Daemon) -> None:
    """The command runs in the process that was started as neurond, to which the lease is bound."""
    with ending(
        daemon.spawn("run", "-n", "4", "--", "sh", "-c", "echo $$; read line", stdin=subprocess.PIPE)
    ) as command:
        assert command.stdout is not None
        assert int(command.stdout.readline()) == command.pid
        (lease,) = daemon.leases()
        assert (lease["binding"], lease["pid"], lease["chips"]) == ("process", command.pid, [0, 1, 2, 3])
        assert (lease["name"], lease["command"]) == ("sh", "sh -c echo $$; read line")
        command.communicate("go\n")
    assert command.returncode == 0
    eventually(daemon.all_free)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_reaches_the_command(daemon: Daemon, number: signal.Signals) -> None:
    """A signal to `run` is one to the command: it ends by it, and its chips are free."""
    with ending(daemon.spawn("run", "-n", "1", "--", "sleep", "600")) as command:
        eventually(lambda: Path(f"/proc/{command.pid}/comm").read_text() == "sleep\n")
        command.send_signal(number)
        assert command.wait(PATIENCE) == -number
    eventually(daemon.all_free)


def test_the_command_may_handle_signals(daemon: Daemon) -> None:
    """A command that catches SIGTERM ends as it likes."""
    script = "trap 'exit 9' TERM; echo ready; while :; do sleep 0.05; done"
    with ending(daemon.spawn("run", "-n", "1", "--", "sh", "-c", script)) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "ready\n"
        command.terminate()
        assert command.wait(PATIENCE) == 9


@pytest.mark.parametrize("path", ["never-there", "./never-there", "/never/there"])
def test_a_command_that_is_not_there(daemon: Daemon, path: str) -> None:
    """A command that does not exist is exit code 127, and nothing was leased for it."""
    with leases_nothing(daemon):
        done = daemon.cli("run", "-n", "1", "--", path)
    assert done.returncode == 127
    assert done.stderr == f"neurond: {path}: command not found\n"


def test_a_command_that_is_not_executable(daemon: Daemon, tmp_path: Path) -> None:
    """A file that may not be executed is exit code 126, by its path and in PATH, and nothing was leased for it."""
    script = tmp_path / "not-executable"
    script.write_text("#!/bin/sh\n")
    for name in (str(script), script.name):
        with leases_nothing(daemon):
            done = daemon.cli("run", "-n", "1", "--", name, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
        assert done.returncode == 126
        assert done.stderr == f"neurond: {script}: not executable\n"


def test_a_command_that_the_kernel_refuses(daemon: Daemon, tmp_path: Path) -> None:
    """A file that is executable but nothing that the kernel can run is exit code 126, and its chips are free again."""
    script = tmp_path / "script"
    script.write_text("neither a binary nor a script")
    script.chmod(0o755)
    done = daemon.cli("run", "-n", "1", "--", str(script))
    assert done.returncode == 126
    assert done.stderr == f"neurond: {script}: Exec format error\n"
    eventually(daemon.all_free)


def test_the_environment(daemon: Daemon) -> None:
    """The command finds its lease, its chips, its cores with commas, and a tag in its environment, and all else too."""
    daemon.call("Acquire", count=4, ttl=600)
    done = daemon.cli("run", "-n", "4", "--", "sh", "-c", f"{SHOW}; echo $MINE", env={"MINE": "kept"})
    lease = [row["lease"] for row in daemon.leases(ended=True) if row["name"] == "sh"][-1]
    cores = ",".join(map(str, range(8, 16)))
    assert done.stdout == f"{lease} 4,5,6,7 neurond-{lease} {cores}\nkept\n"


def test_own_cores_inside_the_lease_are_kept(daemon: Daemon) -> None:
    """A NEURON_RT_VISIBLE_CORES of the user's own that names cores of the lease stays as it is."""
    done = daemon.cli("run", "-n", "4", "--", "sh", "-c", f"echo ${CORES}", env={CORES: "2-5"})
    assert (done.returncode, done.stdout) == (0, "2-5\n")


@pytest.mark.parametrize(
    ("cores", "said"),
    [
        ("0-8", f"{CORES}=0-8 names cores outside the lease, which has 0-7: unset it"),
        ("99", f"{CORES}=99 names cores outside the lease, which has 0-7: unset it"),
        ("all", f"{CORES}='all' is not a core list such as 4, 4-7 or 4,5,6,7"),
        ("3,2", f"{CORES}='3,2' does not rise"),
    ],
)
def test_own_cores_outside_the_lease_are_refused(daemon: Daemon, cores: str, said: str) -> None:
    """A NEURON_RT_VISIBLE_CORES that contradicts the lease is refused before the command starts; nothing stays held."""
    done = daemon.cli("run", "-n", "4", "--", "echo", "started", env={CORES: cores})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"neurond: {said}")
    eventually(daemon.all_free)


@pytest.mark.parametrize(("options", "code"), [((), 75), (("-E", "9"), 9), (("--conflict-exit-code=0",), 0)])
def test_no_wait_fails_at_once(daemon: Daemon, options: tuple[str, ...], code: int) -> None:
    """With --no-wait, chips in use are exit code 75 or that of -E, at once, and the holder is named."""
    lease = daemon.call("Acquire", all=True, ttl=600)["lease"]
    began = time.monotonic()
    with leases_nothing(daemon):
        done = daemon.cli("run", "-n", "1", "--no-wait", *options, "--", "echo", "started")
    assert time.monotonic() - began < PATIENCE / 2
    assert (done.returncode, done.stdout) == (code, "")
    assert f"held: 0-15 by {ME} (lease {lease}, since" in done.stderr


def test_a_wait_that_runs_out_has_the_code_of_e(daemon: Daemon) -> None:
    """-E holds for a wait that runs out as well, but for no other failure."""
    daemon.call("Acquire", all=True, ttl=600)
    assert daemon.cli("run", "-n", "1", "-w", "50ms", "-E", "9", "--", "true").returncode == 9
    assert daemon.cli("run", "-n", "3", "-E", "9", "--", "true").returncode == 2
    assert daemon.cli("run", "--chips", "77", "-E", "9", "--", "true").returncode == 66


def test_without_options_it_waits(daemon: Daemon) -> None:
    """By default `run` waits for chips in use, says on stderr for whom, and then starts the command."""
    lease = daemon.call("Acquire", all=True, ttl=600)["lease"]
    with ending(daemon.spawn("run", "--chips", "3", "--", "sh", "-c", "echo $NEUROND_CHIPS")) as waiting:
        assert waiting.stderr is not None
        assert f"neurond: waiting: chip 3 asked, 0 free; held: 0-15 by {ME} (lease {lease}" in waiting.stderr.readline()
        daemon.call("Release", lease=lease)
        assert waiting.communicate(timeout=PATIENCE)[0] == "3\n"


@pytest.mark.parametrize("verb", [("run", "-n", "1", "true"), ("acquire", "-n", "1"), ("ls",), ("ps",), ("watch",)])
def test_without_a_daemon(run_dir: Path, verb: tuple[str, ...]) -> None:
    """Where no daemon answers, every verb is exit code 69 with the address and a hint."""
    address = f"unix://{run_dir}/neurond.sock"
    done = subprocess.run(
        [*NEUROND, *verb], env=os.environ | {"NEUROND_HOST": address}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (69, "")
    path = run_dir / "neurond.sock"
    assert done.stderr.startswith(
        f"neurond: neurond does not answer at {path}: No such file or directory; is it running"
    )


def test_a_daemon_that_was_killed(fresh: Daemon) -> None:
    """Where a daemon left its socket behind, the hint says that it has crashed."""
    fresh.kill()
    done = fresh.cli("run", "-n", "1", "true")
    assert done.returncode == 69
    assert "it has stopped or crashed" in done.stderr


def test_options_before_the_verb(daemon: Daemon) -> None:
    """The address may stand before the verb in each form that options have; what is missing or unknown is named."""
    for form in (
        ["-H", f"unix://{daemon.socket}"],
        ["--host", f"unix://{daemon.socket}"],
        [f"--host=unix://{daemon.socket}"],
    ):
        assert daemon.cli(*form, "version").returncode == 0
    nowhere = daemon.cli("--host=unix:///nowhere/x.sock", "ls")
    assert (nowhere.returncode, "/nowhere/x.sock" in nowhere.stderr) == (69, True)
    for words, said in ((["-H"], "-H takes an address"), (["-x", "ls"], "no option '-x' before the verb")):
        wrong = daemon.cli(*words)
        assert (wrong.returncode, said in wrong.stderr) == (2, True)


@pytest.mark.parametrize("verb", ["container ls", "container logs x", "container stop x", "task describe"])
def test_only_what_launches_fails_with_125(daemon: Daemon, verb: str) -> None:
    """Without Docker, a verb that only looks at containers or stops them fails with 1; 125 is of those that launch."""
    assert daemon.cli(*verb.split()).returncode == 1
    assert daemon.cli("container", "run", "-n", "1", "image").returncode == 125


def test_an_address_that_is_none(daemon: Daemon) -> None:
    """An address of another kind is exit code 69, with an example."""
    done = daemon.cli("-H", "tcp://localhost", "run", "-n", "1", "true")
    assert done.returncode == 69
    assert "'tcp://localhost' is no address of a daemon: it looks like unix:///run/neurond/neurond.sock" in done.stderr


def test_the_command_gets_the_usual_signal_dispositions(daemon: Daemon) -> None:
    """Python ignores SIGPIPE; the command does not, so that pipelines in it end as they do in a shell."""
    done = daemon.cli("run", "-n", "1", "--", "sh", "-c", "yes | head -1; grep SigIgn: /proc/self/status")
    assert done.stderr == ""
    first, ignored = done.stdout.splitlines()
    assert first == "y"
    mask = int(ignored.split()[1], 16)
    assert not mask & (1 << signal.SIGPIPE - 1)
    assert not mask & (1 << signal.SIGXFSZ - 1)


def test_no_descriptor_is_left_to_the_command(daemon: Daemon) -> None:
    """The command has stdin, stdout and stderr, and no connection to the daemon."""
    done = daemon.cli("run", "-n", "1", "--", "sh", "-c", "ls /proc/$$/fd; true")
    assert done.stdout.split() == ["0", "1", "2"]


@pytest.mark.parametrize("arguments", [("-n", "1"), ("-n", "1", "--")])
def test_without_a_command(daemon: Daemon, arguments: tuple[str, ...]) -> None:
    """`run` without a command is exit code 2, with an example."""
    with leases_nothing(daemon):
        done = daemon.cli("run", *arguments)
    assert done.returncode == 2
    assert "neurond run -n 1 -- python train.py" in done.stderr


def test_options_after_the_command_are_its_own(daemon: Daemon) -> None:
    """What follows the command is the command's, with and without `--`."""
    for dashes in ((), ("--",)):
        done = daemon.cli("run", "-n", "1", *dashes, "echo", "-n", "4", "--chips", "--", "-h")
        assert done.stdout == "4 --chips -- -h"


def test_a_name_of_its_own(daemon: Daemon) -> None:
    """--name replaces the name of the command in lists."""
    assert daemon.cli("run", "-n", "1", "--name", "night run", "--", "true").returncode == 0
    assert daemon.leases(ended=True)[-1]["name"] == "night run"


def test_many_at_once_share_the_host(fresh: Daemon) -> None:
    """Twenty commands that want four chips each all get their turn, and no two of them the same chip at a time."""
    script = "echo start $NEUROND_CHIPS; sleep 0.05; echo end $NEUROND_CHIPS"
    commands = [fresh.spawn("run", "-n", "4", "--", "sh", "-c", script) for _ in range(20)]
    outputs = [command.communicate(timeout=PATIENCE)[0].split() for command in commands]
    assert [command.returncode for command in commands] == [0] * 20
    assert {chips for _, chips, *_ in outputs} <= {"0,1,2,3", "4,5,6,7", "8,9,10,11", "12,13,14,15"}
    held: dict[str, list[int]] = {}
    over = 0
    with fresh.client() as client:
        for reply in client.stream("Watch", since=1):
            event, data = reply["event"]["event"], reply["event"]["data"]
            if event == "lease.granted":
                held[data["lease"]["id"]] = data["lease"]["chips"]
                taken = [chip for chips in held.values() for chip in chips]
                assert len(taken) == len(set(taken))
            elif event == "lease.ended":
                del held[data["id"]]
                over += 1
                if over == len(commands):
                    break
    assert held == {}
