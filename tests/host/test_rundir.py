"""The runtime directory: one daemon at a time, and a socket that is nobody else's."""

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from neurond.host.rundir import AlreadyRunning, RunDir

HOLD = """
import sys
from pathlib import Path
from neurond.host.rundir import RunDir
held = RunDir(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""

Hold = Callable[[], RunDir]


@pytest.fixture
def hold(run_dir: Path) -> Iterator[Hold]:
    """Give a function that takes the lock for this process until the test ends."""
    held: list[RunDir] = []

    def take() -> RunDir:
        held.append(RunDir(run_dir / "neurond"))
        return held[-1]

    yield take
    for rundir in held:
        with suppress(OSError):
            os.close(rundir._lock)


@pytest.fixture
def holder(run_dir: Path) -> Iterator["subprocess.Popen[str]"]:
    """Give another process that holds the lock."""
    command = [sys.executable, "-c", HOLD, str(run_dir / "neurond")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_directory_is_made(run_dir: Path, hold: Hold) -> None:
    """The directory is made where there is none, and taken as it is where there is one."""
    rundir = hold()
    assert rundir.path == run_dir / "neurond"
    assert rundir.socket == run_dir / "neurond/neurond.sock"
    assert (run_dir / "neurond").is_dir()


def test_a_second_daemon_is_refused(holder: "subprocess.Popen[str]", hold: Hold) -> None:
    """Who comes second is refused, with the pid of the first."""
    with pytest.raises(AlreadyRunning, match=rf"\(pid {holder.pid}\)$"):
        hold()


def test_the_refused_one_changes_nothing(run_dir: Path, holder: "subprocess.Popen[str]", hold: Hold) -> None:
    """Who is refused leaves the pid of the first in the lock file, and no descriptor open."""
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 - entries of /proc
    for _ in range(2):
        with pytest.raises(AlreadyRunning):
            hold()
    assert (run_dir / "neurond/lock").read_text() == f"{holder.pid:<19}\n"
    assert len(os.listdir("/proc/self/fd")) == len(before)  # noqa: PTH208


def test_the_lock_goes_with_the_process(holder: "subprocess.Popen[str]", hold: Hold) -> None:
    """A daemon that was killed leaves no lock, and the next one's pid replaces its."""
    holder.kill()
    holder.wait(30)
    rundir = hold()
    assert (rundir.path / "lock").read_text().strip() == str(os.getpid())
    with pytest.raises(AlreadyRunning, match=rf"\(pid {os.getpid()}\)$"):
        hold()


def test_the_lock_is_not_inherited(hold: Hold) -> None:
    """A program that the daemon starts does not keep the lock when the daemon is gone."""
    rundir = hold()
    assert not os.get_inheritable(rundir._lock)


def test_a_lock_without_a_pid_is_a_lock(run_dir: Path, holder: "subprocess.Popen[str]", hold: Hold) -> None:
    """A daemon whose pid could not be written, on a full tmpfs, holds the lock all the same."""
    assert holder.poll() is None
    os.truncate(run_dir / "neurond/lock", 0)
    with pytest.raises(AlreadyRunning, match=r"\(pid unknown\)$"):
        hold()


def test_the_lock_is_not_a_link(run_dir: Path, hold: Hold) -> None:
    """A link in place of the lock file is not followed."""
    (run_dir / "neurond").mkdir()
    (run_dir / "neurond/lock").symlink_to(run_dir / "victim")
    with pytest.raises(OSError, match="symbolic link"):
        hold()
    assert not (run_dir / "victim").exists()


def test_the_socket_listens(hold: Hold) -> None:
    """A client can connect to the socket."""
    rundir = hold()
    with closing(rundir.bind(None)) as listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(rundir.socket))
        accepted, _ = listener.accept()
        accepted.close()


@pytest.mark.root
def test_an_ordinary_user_has_the_socket_to_himself(run_dir: Path) -> None:
    """A user who is not in the group that may lease starts a daemon of his own all the same."""
    run_dir.chmod(0o777)
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        try:
            RunDir(run_dir / "neurond").bind(4242)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    found = (run_dir / "neurond/neurond.sock").stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o600, 65534, 65534)


def test_a_dead_daemons_socket_is_replaced(hold: Hold) -> None:
    """The socket that a killed daemon left is in nobody's way."""
    rundir = hold()
    rundir.bind(None).close()
    assert rundir.socket.is_socket()
    with closing(rundir.bind(None)), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(rundir.socket))


def test_a_file_in_the_way_is_kept(hold: Hold) -> None:
    """A regular file at the socket's path is somebody's: it is kept, and named in the refusal."""
    rundir = hold()
    rundir.socket.write_text("precious")
    with pytest.raises(FileExistsError, match=rf"{rundir.socket} is in the way: it is not a socket"):
        rundir.bind(None)
    assert rundir.socket.read_text() == "precious"


def test_a_link_in_the_way_is_kept(run_dir: Path, hold: Hold) -> None:
    """A link at the socket's path is kept, even one to a socket."""
    rundir = hold()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(run_dir / "other.sock"))
        rundir.socket.symlink_to(run_dir / "other.sock")
        with pytest.raises(FileExistsError):
            rundir.bind(None)
    assert rundir.socket.is_symlink()


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_owner_and_group_may_connect(hold: Hold, mask: int) -> None:
    """The socket has mode 0660 whatever the umask is, and the umask stays as it was."""
    rundir = hold()
    before = os.umask(mask)
    try:
        with closing(rundir.bind(None)):
            assert stat.S_IMODE(rundir.socket.stat().st_mode) == 0o660
    finally:
        assert os.umask(before) == mask


@pytest.mark.root
def test_the_socket_is_the_groups(hold: Hold) -> None:
    """The socket belongs to the group that was asked for."""
    rundir = hold()
    with closing(rundir.bind(60_000)):
        assert (rundir.socket.stat().st_uid, rundir.socket.stat().st_gid) == (0, 60_000)


def test_release_removes_the_own_socket(hold: Hold) -> None:
    """A daemon that stops takes its socket away, and a second time does nothing."""
    rundir = hold()
    with closing(rundir.bind(None)):
        inode = rundir.socket.lstat().st_ino
        rundir.release(inode)
        assert not rundir.socket.exists()
        rundir.release(inode)


def test_release_keeps_anothers_socket(run_dir: Path, hold: Hold) -> None:
    """A daemon that stops leaves a socket that has taken the place of its own, or that systemd listens on."""
    rundir = hold()
    with closing(rundir.bind(None)):
        inode = rundir.socket.lstat().st_ino
        rundir.socket.rename(run_dir / "mine")
        with closing(rundir.bind(None)):
            for other in (inode, None):
                rundir.release(other)
                assert rundir.socket.is_socket()
