"""systemd: what it is told over a real datagram socket, and the socket that it hands over."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from neurond.host import systemd
from tests.harness import eventually

GREET = """
from neurond.host import systemd
listener = systemd.activated_socket()
client, _ = listener.accept()
client.sendall(b"hello from " + listener.getsockname().encode())
"""

LISTENS = "00010000"
"""The flag of a socket that accepts connections, in /proc/net/unix."""


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_notify_is_heard(run_dir: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """What is told arrives as one datagram, at a socket with a path and at an abstract one."""
    path = f"{run_dir}/notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(path if kind == "path" else "\0" + path)
        heard.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", path if kind == "path" else "@" + path)
        systemd.notify("READY=1\nSTATUS=16 chips")
        assert heard.recv(4096) == b"READY=1\nSTATUS=16 chips"


@pytest.mark.parametrize("address", [None, "", "relative", "vsock:2:1234", "/nowhere/at/all", "@neurond-test-nobody"])
def test_notify_without_a_listener_is_no_error(monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
    """Without systemd, or with one that does not listen any more, nothing happens."""
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    if address is not None:
        monkeypatch.setenv("NOTIFY_SOCKET", address)
    systemd.notify("READY=1")


def test_notify_to_a_closed_socket_is_no_error(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket file that nobody listens on any more is no error."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(f"{run_dir}/notify")
    monkeypatch.setenv("NOTIFY_SOCKET", f"{run_dir}/notify")
    systemd.notify("STOPPING=1")


def listens(path: Path) -> bool:
    """Tell whether somebody listens at a path, which is there a moment before: by the kernel's list, not by a visit."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return any(line.split()[3] == LISTENS and line.endswith(f" {path}") for line in lines)


def test_the_socket_of_systemd_is_taken_over(run_dir: Path) -> None:
    """A process that systemd's own tool starts with a listening socket serves on it."""
    path = run_dir / "activated.sock"
    command = ["systemd-socket-activate", f"--listen={path}", sys.executable, "-c", GREET]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            eventually(lambda: listens(path))
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(30)
                client.connect(str(path))
                assert client.recv(4096) == b"hello from " + bytes(path)
            assert process.wait(30) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("pid", "fds"), [(None, None), (None, "1"), (os.getppid, "1"), (os.getpid, "0"), (os.getpid, None)]
)
def test_a_socket_for_somebody_else_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, pid: Callable[[], int] | None, fds: str | None
) -> None:
    """Variables that are missing, or meant for another process, mean that there is no socket."""
    for name, value in {"LISTEN_PID": pid and pid(), "LISTEN_FDS": fds}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, str(value))
    assert systemd.activated_socket() is None


@pytest.mark.parametrize(
    ("usec", "seconds"), [("30000000", 30.0), ("500000", 0.5), ("0", None), ("", None), ("soon", None), (None, None)]
)
def test_watchdog_period(monkeypatch: pytest.MonkeyPatch, usec: str | None, seconds: float | None) -> None:
    """The watchdog's period is in seconds, and None where systemd does not watch."""
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    if usec is not None:
        monkeypatch.setenv("WATCHDOG_USEC", usec)
    assert systemd.watchdog_period() == seconds
