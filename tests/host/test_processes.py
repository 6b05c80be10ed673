"""Processes: who a pid is, when it ends, and who has a device open. All with real processes and real devices."""

import ast
import os
import pwd
import select
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from neurond.host import processes
from neurond.host.processes import ProcessGone
from tests.harness import eventually
from tests.host.support import MAP, as_nobody

DEVICE = (4, 13)
"""A virtual terminal that nobody uses, simulated hosts neither: opening it does nothing."""

HOLD = 'exec 3<>"$0"; echo ready; exec cat'
HOLD_TWICE = 'exec 3<>"$0" 4<>"$0"; echo ready; exec cat'
HOLD_UNDER_ANOTHER_NAME = f"""
mount -t tmpfs none "$0"
mknod "$0/other" c {DEVICE[0]} {DEVICE[1]}
exec 3<>"$0/other"
echo ready
exec cat
"""

LOOK = f"""
from neurond.host import processes

def main():
    uses = processes.users_of({{{DEVICE}}})
    print([uses.pids, len(uses.unreadable)])
"""

Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Give a function that starts a command which says that it is ready; it ends with the test."""
    with ExitStack() as started:

        def start(*command: str, says: str = "ready\n") -> "subprocess.Popen[str]":
            process = started.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            started.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == says
            return process

        yield start


@pytest.fixture
def child(spawn: Spawn) -> "subprocess.Popen[str]":
    """Give a process that runs."""
    return spawn("sh", "-c", "echo ready; read line")


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """Give a node of the device under a name that nobody else uses."""
    node = tmp_path / "whatever"
    os.mknod(node, stat.S_IFCHR | 0o600, os.makedev(*DEVICE))
    return node


def users() -> list[int]:
    """Return who has the device open."""
    return processes.users_of({DEVICE}).pids.get(DEVICE, [])


def readable(fd: int, seconds: float) -> bool:
    """Tell whether a descriptor gets readable within this time."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


# -- who a pid is ---------------------------------------------------------------------------------------------------


def test_start_ticks_are_in_ticks_since_boot() -> None:
    """The start time of a new process lies between the moments before and after it was started."""
    hertz = os.sysconf("SC_CLK_TCK")
    before = processes.boottime()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        after = processes.boottime()
        assert before - 1 / hertz <= processes.start_ticks(process.pid) / hertz <= after


def test_start_ticks_stay(child: "subprocess.Popen[str]") -> None:
    """The start time of a process does not change, and this process is older than its child."""
    ticks = processes.start_ticks(child.pid)
    assert processes.start_ticks(os.getpid()) <= ticks
    time.sleep(0.05)
    assert processes.start_ticks(child.pid) == ticks


@pytest.mark.parametrize("name", [") Z 1 2 3", "((", "a b\nc", "Z"])
def test_start_ticks_are_not_misled_by_a_name(spawn: Spawn, name: str) -> None:
    """A process may call itself anything, parentheses, states and newlines too."""
    process = spawn("sh", "-c", 'printf %s "$0" > /proc/$$/comm; echo ready; read line', name)
    assert Path(f"/proc/{process.pid}/comm").read_text() == name + "\n"
    ticks = processes.start_ticks(process.pid)
    assert processes.start_ticks(os.getpid()) <= ticks <= processes.boottime() * os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("pid", [0, -1, 1 << 22, 1 << 31, 1 << 70])
def test_no_such_process(pid: int) -> None:
    """A pid that nobody has is gone, however odd the number."""
    with pytest.raises(ProcessGone, match=f"no process {pid}$"):
        processes.start_ticks(pid)


def test_a_zombie_is_gone() -> None:
    """A process that has ended is gone, even while nobody has waited for it."""
    with subprocess.Popen(["true"]) as process:
        stat_file = Path(f"/proc/{process.pid}/stat")
        eventually(lambda: b") Z " in stat_file.read_bytes())
        with pytest.raises(ProcessGone, match=f"process {process.pid} has already ended"):
            processes.start_ticks(process.pid)
    with pytest.raises(ProcessGone, match=f"no process {process.pid}$"):
        processes.start_ticks(process.pid)


def test_describe(child: "subprocess.Popen[str]") -> None:
    """A process is described by its user and its command."""
    user = pwd.getpwuid(os.geteuid()).pw_name
    told = processes.Process(child.pid, os.geteuid(), user, "sh -c echo ready; read line")
    assert processes.describe(child.pid) == told
    assert processes.owner_of(child.pid) == os.getuid()


def test_who_is_gone_is_not_described() -> None:
    """Nothing is known of a process that is gone."""
    with subprocess.Popen(["true"]) as process:
        pass
    assert processes.describe(process.pid) is None
    with pytest.raises(ProcessGone):
        processes.owner_of(process.pid)


def test_users_without_a_name() -> None:
    """A uid that has no name is written in digits."""
    assert processes.user_name(0) == "root"
    assert processes.user_name(4_000_000_000) == "4000000000"


def test_boottime_is_the_clock_that_nobody_sets() -> None:
    """The time is that since boot, as /proc/uptime has it, and it goes on."""
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    now = processes.boottime()
    assert before <= now <= time.clock_gettime(time.CLOCK_BOOTTIME)
    assert abs(float(Path("/proc/uptime").read_text().split()[0]) - now) < 0.5


def test_boot_id_is_one_word() -> None:
    """The id of this boot is the kernel's, without a newline, and the same each time."""
    assert len(processes.boot_id()) == 36
    assert processes.boot_id() == processes.boot_id()


# -- when it ends ---------------------------------------------------------------------------------------------------


def test_a_pidfd_tells_of_the_end(child: "subprocess.Popen[str]") -> None:
    """A pidfd gets readable when the process ends, before anybody has waited for it, and not sooner."""
    fd = processes.open_pidfd(child.pid, processes.start_ticks(child.pid))
    try:
        assert not readable(fd, 0.05)
        child.kill()
        assert readable(fd, 30)
        assert child.returncode is None
        assert b") Z " in Path(f"/proc/{child.pid}/stat").read_bytes()
    finally:
        os.close(fd)


def test_a_pidfd_tells_of_the_end_of_a_strangers_child(spawn: Spawn) -> None:
    """A process that is no child of ours, and that its parent never waits for, is noticed too."""
    parent = spawn("sh", "-c", "sleep 60 >/dev/null & echo ready; exec cat")
    pid = int(Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text())
    fd = processes.open_pidfd(pid, processes.start_ticks(pid))
    try:
        os.kill(pid, signal.SIGKILL)
        assert readable(fd, 30)
        with pytest.raises(ProcessGone):
            processes.start_ticks(pid)
    finally:
        os.close(fd)


def test_a_pid_of_somebody_else_is_not_followed(child: "subprocess.Popen[str]") -> None:
    """A process that started at another time is another process; no descriptor is left open."""
    ticks = processes.start_ticks(child.pid)
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 - entries of /proc
    for wrong in (ticks - 1, ticks + 1, 0):
        with pytest.raises(ProcessGone, match=f"process {child.pid} has ended"):
            processes.open_pidfd(child.pid, wrong)
    assert len(os.listdir("/proc/self/fd")) == len(before)  # noqa: PTH208


def test_a_zombie_is_not_followed() -> None:
    """A process that has ended already is gone, even while nobody has waited for it."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        ticks = processes.start_ticks(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ProcessGone):
            processes.open_pidfd(process.pid, ticks)


@pytest.mark.root
def test_a_pid_that_is_given_again_is_not_followed() -> None:
    """When the kernel has given the pid to another process, the first one is gone."""
    for _ in range(200):
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as first:
            ticks = processes.start_ticks(first.pid)
        time.sleep(0.02)
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(first.pid - 1))
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as second:
            if second.pid == first.pid:
                with pytest.raises(ProcessGone):
                    processes.open_pidfd(first.pid, ticks)
                return
    pytest.fail("the kernel did not give the pid again")


# -- who has a device open ------------------------------------------------------------------------------------------


@pytest.mark.root
def test_who_has_a_device_open_is_found(spawn: Spawn, node: Path) -> None:
    """A process that has the device open under another name is found, and only while it has it open."""
    assert users() == []
    holder = spawn("sh", "-c", HOLD, str(node))
    assert users() == [holder.pid]
    holder.kill()
    holder.wait(30)
    assert users() == []


@pytest.mark.root
def test_each_process_is_named_once(spawn: Spawn, node: Path) -> None:
    """All who have it open are found, each once, whatever the number of its descriptors."""
    holders = [spawn("sh", "-c", HOLD_TWICE, str(node)) for _ in range(3)]
    assert users() == sorted(holder.pid for holder in holders)


@pytest.mark.root
def test_a_node_that_is_gone_is_still_open(spawn: Spawn, node: Path) -> None:
    """A device whose node was removed meanwhile is still seen to be open."""
    holder = spawn("sh", "-c", HOLD, str(node))
    node.unlink()
    assert users() == [holder.pid]


@pytest.mark.root
def test_other_devices_do_not_count(spawn: Spawn, node: Path) -> None:
    """A device with another minor is another device, and its users are told apart."""
    other = DEVICE[0], DEVICE[1] - 1
    os.mknod(node.with_name("other"), stat.S_IFCHR | 0o600, os.makedev(*other))
    holder = spawn("sh", "-c", HOLD, str(node.with_name("other")))
    assert users() == []
    assert processes.users_of({DEVICE, other}).pids == {other: [holder.pid]}
    assert processes.users_of(set()).pids == {}


@pytest.mark.root
@pytest.mark.parametrize(
    "namespaces",
    [
        ["--mount", "--propagation=private"],
        ["--mount", "--propagation=private", "--pid", "--fork", "--kill-child"],
        ["--mount-proc", "--pid", "--fork", "--kill-child"],
    ],
    ids=["mount", "mount and pid", "own proc"],
)
def test_containers_are_looked_into(spawn: Spawn, tmp_path: Path, namespaces: list[str]) -> None:
    """A node of a container's own, in other namespaces, is found, and the process has this host's pid."""
    outer = spawn("unshare", *namespaces, "sh", "-c", HOLD_UNDER_ANOTHER_NAME, str(tmp_path))
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
    assert users() == [int(children[0]) if "--fork" in namespaces else outer.pid]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.root
def test_others_can_not_be_looked_into_without_rights(spawn: Spawn, node: Path) -> None:
    """Without the right to look into it, a process is named as one whose use is not known, and that is no error."""
    holder = spawn("sh", "-c", HOLD, str(node))
    assert users() == [holder.pid]
    seen, unreadable = ast.literal_eval(as_nobody(LOOK))
    assert seen == {}
    assert unreadable > 0


HOLD_BY_PYTHON = "import os, sys; os.open(sys.argv[1], os.O_RDWR); print('ready', flush=True); sys.stdin.read()"
BLIND = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"]
LOOK_TWICE = f"""
import sys
from neurond.host import processes
processes.users_of({{{DEVICE}}})  # all files that a Python maps are known to be none after this
uses = processes.users_of({{{DEVICE}}})
print([uses.pids, int(sys.argv[1]) in uses.unreadable, processes.can_look_into_all()])
"""


@pytest.mark.root
@pytest.mark.parametrize(
    ("rights", "pids", "unreadable"), [(["env"], True, False), (BLIND, False, True)], ids=["all rights", "no ptrace"]
)
def test_root_without_the_right_to_look_is_not_misled(
    spawn: Spawn, node: Path, rights: list[str], *, pids: bool, unreadable: bool
) -> None:
    """Root may list the descriptors of all: where it may not see what they are, the use of a process is not known."""
    holder = spawn(sys.executable, "-c", HOLD_BY_PYTHON, str(node))
    command = [*rights, sys.executable, "-c", LOOK_TWICE, str(holder.pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = {DEVICE: [holder.pid]} if pids else {}
    assert ast.literal_eval(done.stdout) == [found, unreadable, pids]


HOLD_IN_A_WAY = """
import ctypes, os, sys, threading, time
def only_for_writing(node): os.open(node, os.O_WRONLY | os.O_NOCTTY)
def only_the_path(node): os.open(node, os.O_PATH)
def by_a_thread(node):
    os.open(node, os.O_RDWR | os.O_NOCTTY)
    threading.Thread(target=time.sleep, args=(60,)).start()
    print("ready", flush=True)
    ctypes.CDLL(None).syscall(60, 0)
globals()[sys.argv[1]](sys.argv[2])
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.root
@pytest.mark.parametrize("way", ["only_for_writing", "only_the_path"])
def test_what_does_not_attach_is_no_use(spawn: Spawn, node: Path, way: str) -> None:
    """A status tool's descriptor (for writing only) and one that opens nothing (O_PATH) do not count."""
    spawn(sys.executable, "-c", HOLD_IN_A_WAY, way, str(node))
    assert users() == []


@pytest.mark.root
def test_the_threads_of_a_process_that_looks_dead_are_seen(spawn: Spawn, node: Path) -> None:
    """A process whose first thread has ended lives, and has its chips, as long as another thread does."""
    holder = spawn(sys.executable, "-c", HOLD_IN_A_WAY, "by_a_thread", str(node))
    eventually(lambda: "State:\tZ" in Path(f"/proc/{holder.pid}/status").read_text())
    assert users() == [holder.pid]
    assert processes.start_ticks(holder.pid) > 0
    holder.kill()
    holder.wait()
    assert users() == []


@pytest.mark.root
def test_a_device_that_is_only_mapped_is_in_use(spawn: Spawn, tmp_path: Path) -> None:
    """A mapping counts when its descriptor is closed, also of a node of another name."""
    zero = tmp_path / "accel0"
    os.mknod(zero, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    holder = spawn(sys.executable, "-c", MAP, str(zero), says="mapped\n")
    assert zero not in [fd.readlink() for fd in Path(f"/proc/{holder.pid}/fd").iterdir()]
    assert holder.pid in processes.users_of({(1, 5)}).pids.get((1, 5), [])


@pytest.mark.root
def test_a_block_device_of_the_same_numbers_is_another_device() -> None:
    """Only character devices are chips: a disk may have the same numbers."""
    disk = os.open("/dev/loop0", os.O_RDONLY)
    try:
        assert os.getpid() not in processes.users_of({(7, 0)}).pids.get((7, 0), [])
    finally:
        os.close(disk)


def test_a_thread_is_no_process() -> None:
    """The id of a thread is refused where a process is wanted."""
    thread = threading.Thread(target=time.sleep, args=(0.5,))
    thread.start()
    assert thread.native_id is not None
    with pytest.raises(ProcessGone):
        os.close(processes.open_pidfd(thread.native_id, processes.start_ticks(thread.native_id)))
    thread.join()


@pytest.mark.root
def test_what_tells_whose_a_process_is(spawn: Spawn) -> None:
    """Ancestors, environment and container of a process are read from /proc."""
    child = spawn("env", "NEUROND_LEASE=abcd-7", "sh", "-c", "echo ready; read line")
    mine = [] if os.getpid() == 1 else [os.getpid()]  # all descend from process 1, so it tells nothing
    assert list(processes.ancestors(child.pid))[:2] == [child.pid, *mine]
    assert processes.environment_value(child.pid, "NEUROND_LEASE") == "abcd-7"
    assert processes.environment_value(child.pid, "NEUROND") is None
    assert processes.container_of(child.pid) is None
    assert 0 <= processes.age(child.pid) < 60
