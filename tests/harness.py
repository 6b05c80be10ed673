"""What the tests drive: a real daemon in a process of its own, the real command line, a real Docker Engine."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from neurond.client import Client

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds after which something that should have happened is taken not to happen; generous, as machines are shared."""
NEUROND = [sys.executable, "-m", "neurond"]


def eventually(look: Callable[[], T], patience: float = PATIENCE) -> T:
    """Call `look` until it returns something true, and return that."""
    deadline = time.monotonic() + patience
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {patience} s: {look.__doc__ or look}"
        time.sleep(0.01)
    return found


class Daemon:
    """A daemon with a runtime directory of its own; `start` returns when it has said READY."""

    def __init__(
        self, directory: Path, simulate: str | None = "trn1.32xlarge", engine: str | None = None, *more: str
    ) -> None:
        self.directory = directory
        self.socket = directory / "neurond.sock"
        self.address = f"unix://{self.socket}"
        self.log = directory.with_name(directory.name + ".log")
        self.arguments = ["--config", "/dev/null"]  # whatever this host has in /etc
        self.arguments += ["--runtime-dir", str(directory), "--docker", engine or f"unix://{directory}/no-docker.sock"]
        if simulate:
            self.arguments += ["--simulate", simulate]
        if engine:
            self.arguments += ["--cdi-dir", str(Path(engine.removeprefix("unix://")).parent / "cdi")]
        self.arguments += more
        self.env: dict[str, str] = {}
        self.prefix: list[str] = []
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The pid of the daemon that runs."""
        assert self.process is not None
        return self.process.pid

    def start(self) -> "Daemon":
        """Start the daemon, and wait until it says that it is ready."""
        told = self.directory.with_name(self.directory.name + ".notify")
        told.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified, self.log.open("ab") as log:
            notified.bind(str(told))
            notified.settimeout(0.05)
            env = os.environ | self.env | {"NOTIFY_SOCKET": str(told)}
            command = [*self.prefix, *NEUROND, "serve", *self.arguments]
            self.process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            deadline = time.monotonic() + PATIENCE
            while True:
                with suppress(TimeoutError):
                    if b"READY=1" in notified.recv(4096):
                        break
                assert self.process.poll() is None, f"the daemon ended: {self.log.read_text()}"
                assert time.monotonic() < deadline, f"the daemon did not get ready: {self.log.read_text()}"
        told.unlink(missing_ok=True)
        return self

    def kill(self) -> None:
        """End the daemon with SIGKILL."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(PATIENCE)

    def stop(self) -> int:
        """End the daemon with SIGTERM and return its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        """End the daemon, if it still runs, and take away what it leaves on the host."""
        if self.process is not None and self.process.poll() is None:
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        nodes = self.directory / "sim/dev"
        if nodes.is_mount():
            subprocess.run(["umount", "--lazy", str(nodes)], check=True)
        shutil.rmtree(self.directory, ignore_errors=True)
        self.log.unlink(missing_ok=True)

    def client(self) -> Client:
        """Connect to the daemon."""
        return Client(self.address)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method on a connection of its own."""
        with self.client() as client:
            return client.call(method, **parameters)

    def cli(
        self, *arguments: str, env: Mapping[str, str] | None = None, stdin: str = "", timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run the command line to its end."""
        return subprocess.run(
            [*NEUROND, *arguments],
            env=os.environ | {"NEUROND_HOST": self.address} | dict(env or {}),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def spawn(self, *arguments: str, **kwargs: Any) -> "subprocess.Popen[str]":
        """Start the command line and go on."""
        env = os.environ | {"NEUROND_HOST": self.address} | kwargs.pop("env", {})
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | kwargs
        return subprocess.Popen([*NEUROND, *arguments], env=env, text=True, **streams)

    def states(self) -> dict[int, str]:
        """Return the state of each chip."""
        return {chip["neuron_device"]: chip["state"] for chip in self.call("ListChips")["chips"]}

    def leases(self, *, ended: bool = False) -> list[dict[str, Any]]:
        """Return the leases."""
        found: list[dict[str, Any]] = self.call("ListLeases", ended=ended)["leases"]
        return found

    def all_free(self) -> bool:
        """All chips are free and nothing waits."""
        return set(self.states().values()) <= {"free"} and not self.leases()

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Return the lines of the log for this event."""
        lines = self.log.read_text().splitlines()
        parsed = [json.loads(line) for line in lines if line.startswith("{")]
        return [line for line in parsed if line["event"] == event]


@contextmanager
def short_directory() -> Iterator[Path]:
    """Make a directory whose path is short enough for a Unix socket in it."""
    directory = Path(tempfile.mkdtemp(prefix="nd-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class PrivateEngine:
    """A Docker Engine of the tests' own, with an image made of busybox.

    `options` are dockerd's further ones, `programs` the PATH on which it and the docker command are looked for. `cdi`
    is its directory of CDI specs, if it is one that knows CDI; the host's 20.10 does not.
    """

    IMAGE = "neurond-test:1"
    APPLETS = ("sh", "ls", "cat", "echo", "sleep", "mknod", "true", "false", "env", "id", "dd", "head", "kill", "test")

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.url = f"unix://{directory}/docker.sock"
        self.cdi = directory / "cdi"
        self.options: list[str] = []
        self.programs = os.environ.get("PATH", os.defpath)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start dockerd and wait until it answers."""
        command = ["dockerd", "--host", self.url, "--data-root", f"{self.directory}/data"]
        command += ["--exec-root", f"{self.directory}/exec", "--pidfile", f"{self.directory}/pid"]
        command += ["--bridge=none", "--iptables=false", *self.options]
        env = os.environ | {"PATH": self.programs}
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        eventually(self.answers, 60)

    def answers(self) -> bool:
        """Tell whether the engine answers."""
        assert self.process is not None
        assert self.process.poll() is None, (self.directory / "log").read_text()
        return self.docker("version", check=False).returncode == 0

    def stop(self) -> None:
        """Stop dockerd."""
        assert self.process is not None
        self.process.terminate()
        self.process.wait(60)
        mounts = [str(self.directory / "data"), str(self.directory / "exec/netns/default")]  # dockerd leaves these
        subprocess.run(["umount", "--lazy", *mounts], capture_output=True, check=False)

    def kill(self) -> None:
        """End dockerd with SIGKILL; what runs in it runs on until it is started again."""
        assert self.process is not None
        pid_file = self.directory / "exec/containerd/containerd.pid"
        containerd = Path("/proc", pid_file.read_text().strip(), "cmdline")
        self.process.kill()
        self.process.wait()
        eventually(lambda: not containerd.exists() or not containerd.read_bytes())  # it dies with dockerd
        pid_file.unlink()  # else dockerd takes one that nobody has waited for as alive

    def docker(self, *arguments: str, check: bool = True, **kwargs: Any) -> "subprocess.CompletedProcess[str]":
        """Run the docker command."""
        command = ["docker", "--host", self.url, *arguments]
        env = os.environ | {"PATH": self.programs}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=check, timeout=120, **kwargs)

    def make_image(self) -> None:
        """Import an image that is nothing but busybox."""
        root = self.directory / "image"
        (root / "bin").mkdir(parents=True)
        shutil.copy("/bin/busybox", root / "bin/busybox")
        for applet in self.APPLETS:
            (root / "bin" / applet).symlink_to("busybox")
        tar = self.directory / "image.tar"
        subprocess.run(["tar", "--create", "--file", str(tar), "--directory", str(root), "."], check=True)
        self.docker("import", str(tar), self.IMAGE)
