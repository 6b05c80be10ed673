"""The settings of a daemon: what it starts with, what a reload applies, and what becomes of files that are wrong."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from neurond.client import NeurondError
from tests.daemon.support import NEURON, Raw, as_nobody, holding, node_of, wait_in_line
from tests.harness import NEUROND, PATIENCE, Daemon, eventually

OTHERS = NEURON - 1
"""The id of another group, which these tests name in /etc/group."""


class Configured:
    """A daemon with a file of settings of its own."""

    def __init__(self, daemon: Daemon, file: Path) -> None:
        self.daemon = daemon
        self.file = file

    def write(self, text: str) -> None:
        """Write the file."""
        self.file.write_text(text)

    def reload(self, text: str | None = None) -> str:
        """Have the settings read again, with this in the file; return what systemd is told of it at the end."""
        if text is not None:
            self.write(text)
        with told_by(self.daemon) as told:
            before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
            os.kill(self.daemon.pid, signal.SIGHUP)
            begun, ended = next(told), next(told)
        assert begun["RELOADING"] == "1"
        assert before <= int(begun["MONOTONIC_USEC"]) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        assert ended["READY"] == "1"
        return ended["STATUS"]

    def setting(self, key: str) -> dict[str, Any]:
        """Return what the daemon says of one setting."""
        rows: list[dict[str, Any]] = self.daemon.call("ListSettings")["settings"]
        return next(row for row in rows if row["key"] == key)


@contextmanager
def told_by(daemon: Daemon) -> Iterator[Iterator[dict[str, str]]]:
    """Hear what a daemon tells systemd, message by message."""
    path = daemon.directory.with_name(daemon.directory.name + ".notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(path))
        heard.settimeout(PATIENCE)

        def messages() -> Iterator[dict[str, str]]:
            while True:
                yield dict(line.split("=", 1) for line in heard.recv(4096).decode().splitlines())

        try:
            yield messages()
        finally:
            path.unlink()


@pytest.fixture
def configured(run_dir: Path) -> Iterator[Configured]:
    """Give a daemon, not yet started, on a simulated host, and its file of settings."""
    file = run_dir / "etc/neurond.toml"
    file.parent.mkdir()
    file.write_text("")
    daemon = Daemon(run_dir / "0", "trn1.32xlarge", None, "--config", str(file))
    yield Configured(daemon, file)
    daemon.close()


# -- the start --------------------------------------------------------------------------------------------------------


def test_a_daemon_starts_with_what_its_files_say(configured: Configured) -> None:
    """Files, environment and command line are what is in force, by their precedence; `neurond config` says where."""
    configured.write('longest_ttl = "1h"\nmost_waiting = 5\nsimulate = "inf2.48xlarge"\n')
    snippets = configured.file.parent / "conf.d"
    snippets.mkdir()
    (snippets / "site.toml").write_text("most_waiting = 6\nstuck_after = 7\n")
    daemon = configured.daemon
    daemon.env["NEUROND_SERVE_STUCK_AFTER"] = "8s"
    daemon.start()
    assert len(daemon.states()) == 16  # of the trn1.32xlarge of the command line
    printed = daemon.cli("config").stdout
    for key, value, origin in (
        ("longest_ttl", '"1h"', f"{configured.file}:1"),
        ("most_waiting", "6", f"{snippets}/site.toml:1"),
        ("stuck_after", '"8s"', "environment NEUROND_SERVE_STUCK_AFTER"),
        ("simulate", '"trn1.32xlarge"', "command line --simulate"),
        ("log_level", '"info"', "default"),
    ):
        assert f"{key} = {value} # {origin}" in [" ".join(line.split()) for line in printed.splitlines()]
    assert daemon.call("ListSettings")["files"] == [str(configured.file), f"{snippets}/site.toml"]


def test_a_file_alone_makes_a_daemon(run_dir: Path) -> None:
    """All that has to be said to a daemon can stand in its file."""
    file = run_dir / "neurond.toml"
    directory = run_dir / "0"
    file.write_text(f'runtime_dir = "{directory}"\nsimulate = "inf2.48xlarge"\ndocker = "unix:///nowhere.sock"\n')
    daemon = Daemon(directory)
    daemon.arguments = ["--config", str(file)]
    try:
        daemon.start()
        assert len(daemon.states()) == 12
        assert daemon.call("Describe")["engine"] == "unix:///nowhere.sock"
    finally:
        daemon.close()


def test_a_wrong_file_keeps_a_daemon_from_starting(configured: Configured) -> None:
    """With anything wrong in the files there is no daemon: exit code 1 and a sentence for each finding."""
    configured.write('log_levl = "info"\nstuck_after = "x"\n')
    command = [*NEUROND, "serve", *configured.daemon.arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert [line.split(": ")[1] for line in done.stderr.splitlines()] == [f"{configured.file}:{n}" for n in (1, 2)]
    assert not configured.daemon.directory.exists()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--stuck-after=soon", "neurond: --stuck-after soon: a time from"),
        (
            "--docker=docker.sock",
            "neurond: --docker docker.sock: an address is of the form unix:///var/run/docker.sock",
        ),
        ("--simulate=trn9", "neurond: --simulate trn9: choose one of inf1.xlarge"),
        ("--log-level=loud", "invalid choice: 'loud'"),
        ("--simulate=", "--simulate: of which instance type?"),
    ],
)
def test_a_wrong_option_is_wrong_usage(configured: Configured, option: str, said: str) -> None:
    """What is wrong in the command line is exit code 2, by the name of the option."""
    command = [*NEUROND, "serve", *configured.daemon.arguments, option]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


# -- a reload ---------------------------------------------------------------------------------------------------------


def test_reload_applies_what_a_running_daemon_can(configured: Configured) -> None:
    """After a reload other limits hold, from the next request on, and each change is in the log."""
    daemon = configured.daemon.start()
    lease = daemon.call("Acquire", count=16, ttl=7200)["lease"]
    status = configured.reload('longest_ttl = "1h"\nmost_waiting = 1\n')
    assert status == "reloaded"
    (line,) = daemon.logged("config.reloaded")
    assert line["changed"] == {"longest_ttl": '"1h"', "most_waiting": "1"}
    with pytest.raises(NeurondError, match=r"ttl of 7200 s: between 0.001 and 3600 s are possible"):
        daemon.call("Renew", lease=lease, ttl=7200)
    with pytest.raises(NeurondError, match="ttl of 7200 s"):
        daemon.call("Acquire", count=1, ttl=7200)
    assert daemon.call("Renew", lease=lease, ttl=3600)
    with Raw(daemon) as first, Raw(daemon) as second:
        wait_in_line(first, count=1)
        second.send("Acquire", count=1, wait=60)
        assert "1 requests of root wait already" in second.error()[1] or os.geteuid() != 0
    assert configured.setting("longest_ttl")["origin"] == f"{configured.file}:1"
    assert configured.reload("") == "reloaded"
    assert daemon.call("Renew", lease=lease, ttl=7200)
    assert configured.setting("longest_ttl")["origin"] == "default"


def test_reload_of_stuck_after(configured: Configured) -> None:
    """A lease that drains already is stuck when the new time for that is over."""
    daemon = configured.daemon.start()
    lease = daemon.call("Acquire", chips=[0], ttl=60)["lease"]
    with holding(node_of(daemon, 0)):
        daemon.call("Release", lease=lease)
        time.sleep(0.3)
        assert daemon.states()[0] == "draining"
        configured.reload("stuck_after = 0.2")
        eventually(lambda: daemon.states()[0] == "stuck")
    eventually(daemon.all_free)


@pytest.mark.root
def test_reload_of_how_often_processes_are_looked_through(configured: Configured) -> None:
    """An open that no event tells of, of a node made by hand, is seen within the new period."""
    daemon = configured.daemon.start()
    status = Path(node_of(daemon, 0)).stat()
    by_hand = daemon.directory / "sim/dev/by-hand"  # the rest of the directory may be mounted without devices
    os.mknod(by_hand, status.st_mode, status.st_rdev)
    configured.reload("look_every = 1")
    time.sleep(1)  # for the look that comes with the reload
    with holding(str(by_hand)):
        eventually(lambda: daemon.states()[0] == "foreign", 15)  # by default it would take 30 s
    eventually(daemon.all_free)


def test_reload_of_the_log(configured: Configured) -> None:
    """Level and form of the log change for every part of the daemon, those that have logged before too."""
    daemon = configured.daemon.start()

    def lines_of(name: str) -> list[str]:
        daemon.call("Release", lease=daemon.call("Acquire", count=1, ttl=60, name=name)["lease"])
        return [line for line in daemon.log.read_text().splitlines() if name in line]

    assert eventually(lambda: lines_of("first"))[0].startswith("{")
    configured.reload("most_waiting = 9")
    assert len(daemon.logged("config.reloaded")) == 1
    configured.reload('log_level = "warning"')
    lines_of("second")
    configured.reload('log_format = "text"')
    written = eventually(lambda: lines_of("third"))[0]
    assert "lease.granted" in written
    assert not written.startswith("{")
    log = daemon.log.read_text()
    assert "second" not in log
    reloads = [line for line in log.splitlines() if "config.reloaded" in line]
    assert [line.startswith("{") for line in reloads] == [True, False], "the second one was below the level"
    configured.reload("")
    assert eventually(lambda: lines_of("fourth"))[0].startswith("{")


def test_reload_of_the_number_of_clients(configured: Configured) -> None:
    """After a reload as many clients may come as it says; nobody who is there is sent away."""
    daemon = configured.daemon.start()
    with ExitStack() as stack:
        there = [stack.enter_context(Raw(daemon)) for _ in range(20)]
        for one in there:
            one.ask("Describe")
        configured.reload("most_connections = 16")
        one_more = stack.enter_context(Raw(daemon))
        one_more.send("Describe")
        assert one_more.error()[1] == "16 clients are connected, which is the limit: try again later"
        for one in there:
            one.ask("Describe")
        configured.reload("")
        stack.enter_context(Raw(daemon)).ask("Describe")


def test_what_takes_a_restart_is_said(configured: Configured) -> None:
    """What a reload can't apply is named, to systemd, in the log and by `neurond config`; the next start has it."""
    daemon = configured.daemon
    daemon.arguments.remove("--docker")
    daemon.arguments.remove(f"unix://{daemon.directory}/no-docker.sock")
    daemon.env["NEUROND_SERVE_CDI_DIR"] = f"{daemon.directory}/cdi"
    configured.write('docker = "unix:///nowhere/1.sock"')
    daemon.start()
    status = configured.reload('\ndocker = "unix:///nowhere/2.sock"\nlog_level = "debug"\ncdi_dir = "/other"')
    assert status == "reloaded; at the next start: docker"
    (line,) = daemon.logged("config.pending")
    assert (line["key"], line["value"]) == ("docker", '"unix:///nowhere/2.sock"')
    assert line["follows"] == "it takes effect at the next start"
    found = configured.setting("docker")
    assert (found["value"], found["origin"]) == ("unix:///nowhere/1.sock", f"{configured.file}:1")
    assert (found["next"], found["next_origin"]) == ("unix:///nowhere/2.sock", f"{configured.file}:2")
    said = f'"unix:///nowhere/1.sock" # {configured.file}:1; at the next start "unix:///nowhere/2.sock"'
    assert said in " ".join(daemon.cli("config").stdout.split())
    assert configured.setting("log_level")["value"] == "debug"
    daemon.stop()
    daemon.start()
    found = configured.setting("docker")
    assert (found["value"], found["next"], found["next_origin"]) == ("unix:///nowhere/2.sock", None, None)
    assert daemon.call("Describe")["engine"] == "unix:///nowhere/2.sock"


def test_a_wrong_file_changes_nothing(configured: Configured) -> None:
    """A reload of a file with anything wrong in it applies none of it, and says so until it is right and reloaded."""
    configured.write('longest_ttl = "2h"')
    daemon = configured.daemon.start()
    status = configured.reload('longest_ttl = "1h"\nlog_levl = "debug"\nmost_waiting = 0')
    assert status.startswith(f"the settings from before stay in force: {configured.file}:2: there is no key")
    wrong = daemon.logged("config.wrong")
    assert [line["problem"].split(": ")[0] for line in wrong] == [f"{configured.file}:{n}" for n in (2, 3)]
    assert {line["follows"] for line in wrong} == {"the settings from before stay in force"}
    assert configured.setting("longest_ttl")["value"] == 7200
    assert daemon.call("Acquire", count=1, ttl=7200)
    done = daemon.cli("config")
    assert done.returncode == 0
    assert f"{configured.file}:3: most_waiting = 0" in done.stderr
    assert "so the settings from before stay in force until that is right, and reloaded" in done.stderr
    assert configured.reload("") == "reloaded"
    assert daemon.cli("config").stderr == ""


def test_a_file_that_is_gone_changes_nothing(configured: Configured) -> None:
    """A file that was asked for and is not there is wrong, too."""
    configured.write('longest_ttl = "2h"')
    daemon = configured.daemon.start()
    configured.file.unlink()
    assert "cannot be read: No such file or directory" in configured.reload()
    assert configured.setting("longest_ttl")["value"] == 7200
    assert daemon.all_free()


def test_many_reloads_under_load(configured: Configured) -> None:
    """Reloads in quick succession, right and wrong ones, end no lease, drop no client, and the last one counts."""
    daemon = configured.daemon.start()
    daemon.call("Acquire", chips=[15], ttl=600)
    with Raw(daemon) as client:
        for number in range(100):
            configured.write("most_waiting = x" if number % 3 == 0 else f"most_waiting = {number}")
            os.kill(daemon.pid, signal.SIGHUP)
            client.ask("Release", lease=client.ask("Acquire", count=1)["lease"])
        configured.reload("most_waiting = 77")
        assert configured.setting("most_waiting")["value"] == 77
        client.ask("Describe")
    assert [lease["chips"] for lease in daemon.leases()] == [[15]]


# -- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.root
def test_another_group_may_lease(configured: Configured) -> None:
    """The group that may lease is that of the setting, which owns the socket too; a reload changes both."""
    directory = configured.file.parent
    group = directory / "group"
    lines = [
        line for line in Path("/etc/group").read_text().splitlines() if not line.startswith(("neuron:", "others:"))
    ]
    group.write_text("\n".join([*lines, f"neuron:x:{NEURON}:", f"others:x:{OTHERS}:"]) + "\n")
    daemon = configured.daemon
    daemon.prefix = ["unshare", "--mount", "sh", "-c", f'mount --bind {group} /etc/group && exec "$@"', "sh"]
    configured.write('group = "others"')
    daemon.start()
    directory.parent.chmod(0o755)

    def code_of(*groups: int) -> int:
        return as_nobody(daemon, "acquire", "-n", "1", "--ttl", "1m", groups=groups).returncode

    assert daemon.socket.stat().st_gid == OTHERS
    assert (code_of(NEURON), code_of(OTHERS)) == (77, 0)
    assert configured.reload("") == "reloaded"
    assert daemon.socket.stat().st_gid == NEURON
    assert (code_of(NEURON), code_of(OTHERS)) == (0, 77)
    daemon.socket.chmod(0o666)
    refused = as_nobody(daemon, "acquire", "-n", "1", "--ttl", "1m", groups=[OTHERS])
    assert (refused.returncode, "that takes the group neuron; join it" in refused.stderr) == (77, True)
    configured.reload('group = "nobody-has-this"')
    refused = as_nobody(daemon, "acquire", "-n", "1", "--ttl", "1m", groups=[NEURON])
    assert "groupadd --system nobody-has-this, then systemctl reload neurond" in refused.stderr
    assert daemon.logged("config.no_group")[-1]["group"] == "nobody-has-this"


@pytest.mark.root
def test_root_refuses_a_file_that_others_can_write(configured: Configured) -> None:
    """A reload of a file that somebody else could have written changes nothing, until it is root's alone."""
    daemon = configured.daemon.start()
    configured.write("most_waiting = 5")
    configured.file.chmod(0o666)
    assert "can be written by others (mode 0666)" in configured.reload()
    assert configured.setting("most_waiting")["value"] == 1024
    configured.file.chmod(0o644)
    assert configured.reload() == "reloaded"
    assert configured.setting("most_waiting")["value"] == 5
    assert daemon.all_free()


UNIT = Path(__file__).parents[2] / "systemd/neurond.service"


def test_the_unit_reloads_what_is_right_only(configured: Configured) -> None:
    """The commands of ExecReload have a wrong file fail the reload with its reason, before the daemon hears of it."""
    daemon = configured.daemon.start()
    lines = UNIT.read_text().splitlines()
    first, second = [line.partition("=")[2] for line in lines if line.startswith("ExecReload=")]
    program, *arguments = first.split()
    assert (program, second) == ("/usr/bin/neurond", "/bin/kill -HUP $MAINPID")
    env = {"NEUROND_SERVE_CONFIG": str(configured.file)}
    configured.write("most_waiting = 0")
    done = daemon.cli(*arguments, env=env)
    assert (done.returncode, f"{configured.file}:1: most_waiting = 0: a whole number" in done.stderr) == (1, True)
    configured.write("most_waiting = 9")
    assert daemon.cli(*arguments, env=env).returncode == 0
    with told_by(daemon) as told:
        subprocess.run(["/bin/kill", "-HUP", str(daemon.pid)], check=True)
        assert [next(told).get(name) for name in ("RELOADING", "READY")] == ["1", "1"]
    assert configured.setting("most_waiting")["value"] == 9
