"""The servers that are measured, each in a process of its own on the servers' core, in a directory on tmpfs."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from neurond.bench.load import Address
from neurond.client import Client

PATIENCE = 60.0
CORES = sorted(os.sched_getaffinity(0))
SERVER_CORE, LOAD_CORE = CORES[0], CORES[-1]


class ServerError(Exception):
    """A server did not start."""


def pin(pid: int, *cores: int) -> None:
    """Keep a process on one core, or on some."""
    with suppress(OSError):  # where that is not allowed, all still works
        os.sched_setaffinity(pid, cores)


def spawn(
    command: Sequence[str], log: Path, core: int = SERVER_CORE, env: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Start a process on a core, its output in a file."""
    pin(0, core)  # a child inherits it before it has any thread
    try:
        with log.open("ab") as file:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=os.environ | dict(env or {})
            )
    finally:
        pin(0, LOAD_CORE)


def stop(process: "subprocess.Popen[bytes]", number: int = signal.SIGTERM) -> None:
    """End a process that we started, and wait for it."""
    process.send_signal(number)
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_for(what: Callable[[], bool], process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until a server is ready. Raises ServerError with its last words."""
    deadline = time.monotonic() + PATIENCE
    while not what():
        if process.poll() is not None or time.monotonic() > deadline:
            raise ServerError(f"{process.args!r} did not start: {log.read_text('utf-8', 'replace')[-500:]}")
        time.sleep(0.01)


@contextmanager
def directory() -> Iterator[Path]:
    """Make a directory on tmpfs, where neurond's own is, with a path short enough for a Unix socket in it."""
    tmpfs = {line.split()[1] for line in Path("/proc/mounts").read_text("utf-8").splitlines() if " tmpfs " in line}
    places = [place for place in ("/run", "/dev/shm") if place in tmpfs and os.access(place, os.W_OK)]  # noqa: S108
    made = Path(tempfile.mkdtemp(prefix="neurond-bench-", dir=places[0] if places else None))
    try:
        yield made
    finally:
        nodes = [*made.glob("*/sim/dev")]
        for mounted in nodes:
            if mounted.is_mount():
                subprocess.run(["umount", "--lazy", str(mounted)], check=False)
        shutil.rmtree(made, ignore_errors=True)


class Daemon:
    """neurond on a simulated host of `chips` chips: one trn1.32xlarge, or several put together."""

    def __init__(self, place: Path, chips: int = 16, engine: str | None = None) -> None:
        self.place = place
        self.socket = place / "neurond.sock"
        self.log = place.with_name(place.name + ".log")
        kind = f"trn1.32xlarge*{chips // 16}"
        engine = engine or f"unix://{place}/no-docker.sock"
        self.command = [sys.executable, "-m", "neurond", "serve", "--config", "/dev/null", "--simulate", kind]
        self.command += ["--runtime-dir", str(place), "--most-waiting", "65536", "--most-connections", "65536"]
        self.command += ["--docker", engine, "--cdi-dir", "", "--log-format", "json"]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The pid of the daemon that runs."""
        return self.process.pid if self.process else 0

    def start(self) -> float:
        """Start the daemon and wait until it says READY; return how long that took, in seconds."""
        told = self.place.with_name(self.place.name + ".notify")
        told.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
            notified.bind(str(told))
            notified.settimeout(0.2)
            begun = time.monotonic()
            self.process = spawn(self.command, self.log, env={"NOTIFY_SOCKET": str(told)})
            wait_for(lambda: _heard(notified), self.process, self.log)
            return time.monotonic() - begun

    def kill(self) -> None:
        """End the daemon as a crash would."""
        if self.process is not None:
            stop(self.process, signal.SIGKILL)

    def client(self) -> Client:
        """Connect to the daemon."""
        return Client(f"unix://{self.socket}")

    def __enter__(self) -> "Daemon":  # noqa: PYI034 - it is no base class
        self.start()
        return self

    def free(self) -> None:
        """Let the daemon, and what we start from now on, use all cores, as where nobody measures."""
        for task in os.listdir(f"/proc/{self.pid}/task"):  # noqa: PTH208 - names are wanted
            pin(int(task), *CORES)
        pin(0, *CORES)

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            stop(self.process)


def _heard(notified: socket.socket) -> bool:
    try:
        return b"READY=1" in notified.recv(4096)
    except TimeoutError:
        return False


@contextmanager
def echo(place: Path) -> Iterator[tuple[Address, int]]:
    """Run the echo server; yield its address and pid."""
    path, log = place / "echo.sock", place / "echo.log"
    process = spawn([sys.executable, "-m", "neurond.bench.echo", str(path)], log)
    try:
        wait_for(path.exists, process, log)
        yield str(path), process.pid
    finally:
        stop(process)


@contextmanager
def redis(place: Path, *, append_only: bool) -> Iterator[tuple[Address, int]]:
    """Run Redis without snapshots, and without or with the append-only file (not synced)."""
    home = place / ("redis-file" if append_only else "redis")
    home.mkdir()
    path, log = home / "redis.sock", home / "log"
    command = ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(home)]
    command += ["--appendonly", "yes" if append_only else "no", "--appendfsync", "no"]
    process = spawn(command, log)
    try:
        wait_for(path.exists, process, log)
        yield str(path), process.pid
    finally:
        stop(process)


@contextmanager
def etcd(place: Path) -> Iterator[tuple[Address, int]]:
    """Run one etcd, on the loopback interface."""
    home, log = place / "etcd", place / "etcd.log"
    port, peer = _free_ports(2)
    client, peers = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
    command = ["etcd", "--data-dir", str(home), "--listen-client-urls", client, "--advertise-client-urls", client]
    command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
    command += ["--initial-cluster", f"default={peers}", "--logger", "zap", "--log-level", "error"]
    process = spawn(command, log, env={"ETCD_UNSUPPORTED_ARCH": os.uname().machine.replace("aarch64", "arm64")})
    try:
        wait_for(lambda: _answers(port), process, log)
        yield ("127.0.0.1", port), process.pid
    finally:
        stop(process)


def _free_ports(count: int) -> list[int]:
    held = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


def _answers(port: int) -> bool:
    import http.client  # noqa: PLC0415 - only needed where there is an etcd

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/health")
        return b'"true"' in connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
