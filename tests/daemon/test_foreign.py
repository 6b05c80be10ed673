"""Chips that are used without a lease: seen, named, never given out, free again by themselves."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from neurond.client import NeurondError
from tests.daemon.support import holding, node_of
from tests.harness import NEUROND, PATIENCE, Daemon, eventually

pytestmark = pytest.mark.root

RENAMED = """
mount -t tmpfs none "$1" && mknod "$1/accel0" c "$2" "$3" || exit
exec 3<>"$1/accel0"
echo open
exec cat
"""
WRITER = "import os, sys; os.open(sys.argv[1], os.O_WRONLY | os.O_NOCTTY); print('open', flush=True); sys.stdin.read()"
RECEIVER = """
import os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
os.setgroups([]), os.setgid(65534), os.setuid(65534)
print("open", flush=True)
connection, _ = server.accept()
_, fds, _, _ = socket.recv_fds(connection, 10, 1)
print("received", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Give a function that starts a command which says `open`; it ends with the test."""
    with ExitStack() as started:

        def begin(*command: str) -> "subprocess.Popen[str]":
            process = started.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            started.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            return process

        yield begin


def test_a_use_without_a_lease_is_seen_within_a_second_and_never_given_out(daemon: Daemon) -> None:
    """A chip that a process opens without a lease is foreign at once, refused by name, and free when it is closed."""
    with holding(node_of(daemon, 1)) as stranger:
        opened = time.monotonic()
        eventually(lambda: daemon.states()[1] == "foreign", 5)  # five times a second, as the machine may be busy
        print(f"seen after {time.monotonic() - opened:.3f} s")
        with pytest.raises(NeurondError) as refused:
            daemon.call("Acquire", chips=[1])
        assert refused.value.kind == "NoCapacity"
        assert f"in use without a lease by pid {stranger.pid} (root, {sys.executable} -c" in str(refused.value)
        assert daemon.call("Acquire", count=1, ttl=60)["chips"] == [0]
        with pytest.raises(NeurondError, match=r"1 .in use without a lease"):
            daemon.call("Acquire", all=True)
        (holder,) = daemon.call("ListChips")["chips"][1]["holders"]
        assert (holder["pid"], holder["user"]) == (stranger.pid, "root")
        shown = daemon.cli("ls", "1").stdout
        assert f"{stranger.pid} {sys.executable}"[:40] in shown  # long commands are cut
        assert "\n" not in shown.splitlines()[1]
    eventually(lambda: daemon.states()[1] == "free")
    assert daemon.call("Acquire", chips=[1], ttl=60)["chips"] == [1]


def test_a_chip_opened_at_the_very_moment_of_the_request_is_not_given_out(daemon: Daemon) -> None:
    """Whoever opens a chip first has it: a request that comes right after the open never gets that chip."""
    nodes = [node_of(daemon, index) for index in range(16)]
    for index in range(0, 16, 3):
        fd = os.open(nodes[index], os.O_RDWR | os.O_NOCTTY)
        try:
            with pytest.raises(NeurondError, match=rf"{index} .in use without a lease by pid {os.getpid()} "):
                daemon.call("Acquire", chips=[index])
        finally:
            os.close(fd)


def test_a_status_tool_is_no_user(daemon: Daemon, start: Callable[..., "subprocess.Popen[str]"]) -> None:
    """A node that is open for writing only leaves its chip free."""
    start(sys.executable, "-c", WRITER, node_of(daemon, 0))
    assert daemon.call("Acquire", chips=[0], ttl=60)["chips"] == [0]


@pytest.mark.parametrize("namespaces", [["--mount"], ["--mount", "--pid", "--fork", "--kill-child"]])
def test_a_renamed_node_in_another_namespace_is_found(
    daemon: Daemon, start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path, namespaces: list[str]
) -> None:
    """Another node of the same device, under another name in other namespaces, makes the chip foreign at a look."""
    major, minor = daemon.call("ListChips")["chips"][3]["device"].split(":")
    start("unshare", *namespaces, "sh", "-c", RENAMED, "sh", str(tmp_path), major, minor)
    assert daemon.call("Check")["findings"][0]["sentence"].startswith("chip 3 is not leased, but in use by pid")
    assert daemon.states()[3] == "foreign"


AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
OPEN = 'exec 3<>"$0"; echo open; exec cat'


def test_a_user_namespace_does_not_hide_who_it_is(
    daemon: Daemon, start: Callable[..., "subprocess.Popen[str]"], run_dir: Path
) -> None:
    """A process that is root in a user namespace of its own is named by the user that it is on the host."""
    run_dir.chmod(0o755)
    start(*AS_NOBODY, "unshare", "--user", "--map-root-user", "sh", "-c", OPEN, node_of(daemon, 3))
    eventually(lambda: daemon.states()[3] == "foreign")
    (holder,) = daemon.call("ListChips")["chips"][3]["holders"]
    assert (holder["user"], holder["command"]) == ("nobody", "cat")
    with pytest.raises(NeurondError, match=r"3 .in use without a lease by pid \d+ .nobody, cat"):
        daemon.call("Acquire", chips=[3])


BLIND = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"]
"""Runs a command as root that can't look into the processes of others."""


HIDING = ["unshare", "--mount", "sh", "-c", 'mount -t proc -o hidepid=2 proc /proc && exec "$@"', "sh"]
"""Runs a command that finds only those processes in /proc that it has a right to look into."""


def test_a_proc_that_hides_processes_is_no_obstacle(
    make_daemon: Callable[..., Daemon], start: Callable[..., "subprocess.Popen[str]"], run_dir: Path
) -> None:
    """Where /proc hides processes from others, a daemon with its rights sees who has a chip open all the same."""
    run_dir.chmod(0o755)
    daemon = make_daemon()
    daemon.kill()
    daemon.prefix = HIDING
    daemon.start()
    holder = start(*AS_NOBODY, "sh", "-c", OPEN, node_of(daemon, 3))
    eventually(lambda: daemon.states()[3] == "foreign")
    assert [who["pid"] for who in daemon.call("ListChips")["chips"][3]["holders"]] == [holder.pid]


@pytest.mark.parametrize("prefix", [BLIND, [*HIDING, *BLIND]], ids=["unreadable", "hidden"])
def test_a_daemon_that_can_not_look_into_others_does_not_start(run_dir: Path, prefix: list[str]) -> None:
    """Without the right to see who has chips open they would look free: then there is no daemon, and it says why."""
    command = [*prefix, *NEUROND, "serve", "--runtime-dir", str(run_dir / "0")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("neurond: neurond is root but can't look into the processes of others")
    assert "CAP_SYS_PTRACE" in done.stderr


def test_simulated_chips_are_served_without_that_right(daemon: Daemon) -> None:
    """On a simulated host that is a warning: what can't be looked into counts as in use, so nothing is given twice."""
    daemon.kill()
    daemon.prefix = BLIND
    daemon.start()
    assert daemon.logged("neurond.blind")
    assert daemon.cli("run", "-n", "1", "true").returncode == 0


def test_a_descriptor_that_was_passed_on_is_attributed(
    daemon: Daemon, start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    """A process that got a chip's descriptor over a socket is named as its user when the lease has ended."""
    receiver = start(sys.executable, "-c", RECEIVER, str(tmp_path / "s"))
    lease = daemon.call("Acquire", chips=[0], ttl=60)["lease"]
    fd = os.open(node_of(daemon, 0), os.O_RDWR | os.O_NOCTTY)
    with socket.socket(socket.AF_UNIX) as sender:
        sender.connect(str(tmp_path / "s"))
        socket.send_fds(sender, [b"x"], [fd])
    os.close(fd)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "received\n"
    daemon.call("Release", lease=lease)
    eventually(lambda: daemon.states()[0] == "foreign")
    assert daemon.call("ListChips")["chips"][0]["holders"][0]["pid"] == receiver.pid
    receiver.kill()
    eventually(daemon.all_free)


def test_a_strangers_use_of_a_leased_chip_is_said(daemon: Daemon) -> None:
    """A process that opens somebody else's chip is named by check, and the chip is not free after the lease."""
    with subprocess.Popen(["sleep", "600"]) as owner:
        lease = daemon.call("Acquire", chips=[5], pid=owner.pid)["lease"]
        with holding(node_of(daemon, 5)) as stranger:
            eventually(lambda: daemon.call("ListChips")["chips"][5]["foreign"])
            done = daemon.cli("check")
            assert done.returncode == 1
            assert f"foreign: chip 5 is leased to root ({lease}), but in use by pid {stranger.pid}" in done.stdout
            owner.kill()
            owner.wait()
            eventually(lambda: daemon.states()[5] in {"foreign", "draining"})
            with pytest.raises(NeurondError):
                daemon.call("Acquire", chips=[5])
    eventually(daemon.all_free)
    assert daemon.cli("check").returncode == 0


def test_a_node_made_by_hand_keeps_a_lease_draining(
    daemon: Daemon, start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    """Chips that are open through another node, where inotify sees nothing, are not free at the end of the lease."""
    lease = daemon.call("Acquire", chips=[3], ttl=60)["lease"]
    major, minor = daemon.call("ListChips")["chips"][3]["device"].split(":")
    holder = start("unshare", "--mount", "sh", "-c", RENAMED, "sh", str(tmp_path), major, minor)
    time.sleep(1.1)  # a lease of less than a second is taken at inotify's word
    daemon.call("Release", lease=lease)
    with pytest.raises(NeurondError, match=r"draining|without a lease"):
        daemon.call("Acquire", chips=[3])
    holder.kill()
    holder.wait()
    eventually(daemon.all_free)


def test_a_chip_can_be_had_right_after_its_release(daemon: Daemon) -> None:
    """Who asks right after a release gets the chips, though somebody has to look first whether they are closed."""
    lease = daemon.call("Acquire", all=True, ttl=60)["lease"]
    with holding(node_of(daemon, 0)):
        time.sleep(1.1)
    daemon.call("Release", lease=lease)
    assert len(daemon.call("Acquire", all=True)["chips"]) == 16


def test_children_of_the_holder_are_no_strangers(daemon: Daemon) -> None:
    """Workers that a leased command starts use its chips by right, also when they are left to init."""
    node = node_of(daemon, 0)
    worker = f"{sys.executable} -c \"import os, time; os.open('{node}', os.O_RDWR | os.O_NOCTTY); time.sleep(600)\""
    script = f"{worker} & ({worker} &) ; wait"
    runner = daemon.spawn("run", "-n", "1", "--", "sh", "-c", script, start_new_session=True)
    try:
        eventually(daemon.leases)
        time.sleep(1.0)
        chip = daemon.call("ListChips")["chips"][0]
        assert (chip["state"], chip["foreign"]) == ("leased", [])
        assert daemon.cli("check").stdout == ""
        runner.kill()
        runner.wait()
        eventually(lambda: daemon.states()[0] == "draining")
        assert daemon.call("ListChips")["chips"][0]["foreign"] == []
    finally:
        os.killpg(runner.pid, signal.SIGKILL)
        runner.communicate()
    eventually(daemon.all_free)


def test_adopt_makes_a_lease_of_a_use(daemon: Daemon) -> None:
    """A running use becomes a lease in place, whatever set of chips it is, and ends with its process."""
    with holding(node_of(daemon, 2), node_of(daemon, 3)) as holder:
        eventually(lambda: daemon.states()[3] == "foreign")
        done = daemon.cli("adopt", "--pid", str(holder.pid), "--name", "old job")
        assert done.returncode == 0
        (lease,) = daemon.leases()
        assert (lease["lease"], lease["chips"], lease["name"]) == (done.stdout.strip(), [2, 3], "old job")
        assert [daemon.states()[index] for index in (2, 3)] == ["leased", "leased"]
        assert daemon.cli("check").returncode == 0
        again = daemon.cli("adopt", "--pid", str(holder.pid))
        assert again.returncode == 2
        assert "has no chip open that it does not hold a lease for" in again.stderr
    eventually(daemon.all_free)


def test_stuck_is_said_with_who_it_is(make_daemon: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that drains past its deadline is stuck, with pid, user and command; others go on, and it ends at last."""
    monkeypatch.setenv("NEUROND_SERVE_STUCK_AFTER", "0.3")
    daemon = make_daemon()
    lease = daemon.call("Acquire", chips=[0], ttl=60)["lease"]
    with holding(node_of(daemon, 0)) as holder:
        daemon.call("Release", lease=lease)
        eventually(lambda: daemon.states()[0] == "stuck")
        assert daemon.leases()[0]["users"][0]["pid"] == holder.pid
        assert f"pid {holder.pid} (root, {sys.executable}" in daemon.logged("lease.stuck")[0]["users"][0]
        assert daemon.call("Acquire", count=8, ttl=60)["chips"] == list(range(8, 16))
        daemon.kill()
        daemon.start()
        assert daemon.states()[0] == "stuck"
    eventually(lambda: daemon.states()[0] == "free")


def test_the_daemon_never_opens_a_chip(daemon: Daemon) -> None:
    """Neither looking, leasing nor checking leaves the daemon with a chip open, so a driver upgrade is not blocked."""
    for _ in range(5):
        daemon.call("Check")
        daemon.call("Release", lease=daemon.call("Acquire", count=4, ttl=60)["lease"])
    numbers = {chip["device"] for chip in daemon.call("ListChips")["chips"]}
    held = [fd.stat().st_rdev for fd in Path(f"/proc/{daemon.pid}/fd").iterdir() if fd.exists()]
    assert not numbers & {f"{os.major(number)}:{os.minor(number)}" for number in held}
