"""The runtime directory: everything of one daemon lies in it, and one daemon at a time holds its lock."""

import fcntl
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

SOCKET = "neurond.sock"
LOCK = "lock"
BACKLOG = 4096


class AlreadyRunning(Exception):
    """Another daemon holds this runtime directory."""


class RunDir:
    """A runtime directory whose lock this process holds until it ends."""

    def __init__(self, path: Path) -> None:
        """Make the directory (mode 0755) and take its lock.

        Raises AlreadyRunning with the pid of the daemon that has it, or OSError.
        """
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
        self.path = path
        self.socket = path / SOCKET
        self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(self._lock, 20, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._lock)
            raise AlreadyRunning(f"neurond is already running in {path} (pid {pid})") from None
        # Padded instead of truncated first: a full tmpfs must not leave an empty file behind.
        with suppress(OSError):
            os.pwrite(self._lock, f"{os.getpid():<19}\n".encode(), 0)

    def bind(self, gid: int | None) -> socket.socket:
        """Listen on the socket, 0660 for root and the group `gid`; a dead daemon's socket is replaced.

        An ordinary user can only give it to a group of his own: where `gid` is none, the socket is his alone.

        Only the holder of the lock comes here, so a socket file at the path has no live owner. Anything else at the
        path is somebody's file: raises FileExistsError and keeps it.
        """
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(self.socket.lstat().st_mode):
                raise FileExistsError(f"{self.socket} is in the way: it is not a socket; move it away")
            self.socket.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o117)
        try:
            listener.bind(str(self.socket))
        finally:
            os.umask(mask)
        if gid is not None:
            try:
                os.chown(self.socket, -1, gid)
            except PermissionError:
                if os.geteuid() == 0:
                    raise
                self.socket.chmod(0o600)
        listener.listen(BACKLOG)
        return listener

    def open_to(self, gid: int) -> None:
        """Give the socket to this group, whoever has made it; it may be systemd. Raises OSError."""
        if self.socket.lstat().st_gid != gid:
            os.chown(self.socket, -1, gid, follow_symlinks=False)

    def release(self, inode: int | None) -> None:
        """Remove the socket, if it is still the one with this inode number."""
        with suppress(FileNotFoundError):
            if self.socket.lstat().st_ino == inode:
                self.socket.unlink()
