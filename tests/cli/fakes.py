"""What the tests of the docker wrapper put in the place of docker, and of the daemon."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.harness import NEUROND

RECORDER = f"""#!{sys.executable} -IS
import json, os, sys
with open(os.environ["RECORDED"], "w") as file:
    json.dump({{"argv": sys.argv, "pid": os.getpid()}}, file)
sys.exit(int(os.environ.get("RECORDER_EXITS", "0")))
"""


class Recorder:
    """A `docker` first in PATH that writes down its arguments."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "bin"
        self.directory.mkdir()
        self.record = directory / "argv.json"
        script = self.directory / "docker"
        script.write_text(RECORDER)
        script.chmod(0o755)

    @property
    def env(self) -> dict[str, str]:
        """The environment in which this is docker."""
        return {"PATH": f"{self.directory}:{os.environ['PATH']}", "RECORDED": str(self.record)}

    @property
    def called(self) -> bool:
        """Whether docker was called."""
        return self.record.exists()

    @property
    def argv(self) -> list[str]:
        """What docker was called with, without its name."""
        found: list[str] = json.loads(self.record.read_text())["argv"]
        return found[1:]

    @property
    def pid(self) -> int:
        """The process that docker was."""
        return int(json.loads(self.record.read_text())["pid"])


class FakeDaemon:
    """Answers the calls of the wrapper, on a socket, with one lease; `calls` are those that came."""

    def __init__(self, directory: Path, cores_per_chip: int = 2) -> None:
        self.path = directory / "fake.sock"
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.errors: dict[str, tuple[str, dict[str, Any]]] = {}
        self.cdi: str | None = None
        self.waiting = ""
        self.cores_per_chip = cores_per_chip
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self.path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        """Serve no more."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def parameters(self, method: str) -> dict[str, Any]:
        """Return the parameters of the one call of this method that came, without those that are null."""
        (found,) = [parameters for name, parameters in self.calls if name == method]
        return {name: value for name, value in found.items() if value is not None}

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as stream, suppress(ConnectionError):
                unread = b""
                while data := stream.read1(1 << 16):
                    *messages, unread = (unread + data).split(b"\0")
                    for message in messages:
                        for reply in self._replies(json.loads(message)):
                            connection.sendall(json.dumps(reply).encode() + b"\0")

    def _replies(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        method, parameters = call["method"].rpartition(".")[2], call["parameters"]
        self.calls.append((method, parameters))
        if method in self.errors:
            kind, details = self.errors[method]
            return [{"error": f"io.neurond.{kind}", "parameters": details}]
        if method == "CheckContainer":
            return [{"parameters": {"image_here": True}}]
        chips = parameters.get("chips") or list(range(parameters.get("count") or 1))
        waiting = {"lease": "ab12-3", "chips": [], "waiting": self.waiting}
        first = [{"parameters": waiting, "continues": True}] if self.waiting else []
        return [*first, {"parameters": self.lease(chips)}]

    def lease(self, chips: Sequence[int]) -> dict[str, Any]:
        """Return the lease of these chips."""
        cores = [chip * self.cores_per_chip + core for chip in chips for core in range(self.cores_per_chip)]
        return {
            "lease": "ab12-3",
            "chips": list(chips),
            "env": {
                "NEUROND_LEASE": "ab12-3",
                "NEUROND_CHIPS": ",".join(map(str, chips)),
                "NEURON_RT_VISIBLE_CORES": ",".join(map(str, cores)),
            },
            "nodes": {str(chip): f"/sim/dev/neuron{chip}" for chip in chips},
            "cdi": self.cdi,
            "labels": {"io.neurond.lease": "ab12-3"},
        }


class Wrapper:
    """`neurond docker` with the recorder and the daemon of a test."""

    def __init__(self, directory: Path) -> None:
        self.recorder = Recorder(directory)
        self.daemon = FakeDaemon(directory)
        self.env = self.recorder.env | {"NEUROND_HOST": f"unix://{self.daemon.path}"}

    def cli(self, *arguments: str, env: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
        """Run the command line to its end."""
        return run([*NEUROND, *arguments], self.env | dict(env or {}))

    def passed_on(self, *arguments: str) -> list[str]:
        """Return what docker got from `neurond docker ARGUMENTS`, which must go well."""
        done = self.cli("docker", *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        return self.recorder.argv

    def refused(self, *arguments: str, env: Mapping[str, str] | None = None) -> str:
        """Return what is said to `neurond docker ARGUMENTS`, which must be a usage error before docker is called."""
        done = self.cli("docker", *arguments, env=env)
        assert (done.returncode, done.stdout, self.recorder.called) == (2, "", False)
        return done.stderr


def run(command: Sequence[str], env: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end."""
    environment = os.environ | dict(env)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def added(*chips: int, inside: Mapping[int, str] | None = None) -> list[str]:
    """Return what neurond adds for the fake's lease of these chips."""
    found = []
    for chip in chips:
        found += ["--device", f"/sim/dev/neuron{chip}:{(inside or {}).get(chip, f'/dev/neuron{chip}')}:rw"]
    found += ["--label", "io.neurond.lease=ab12-3", "-e", "NEUROND_LEASE=ab12-3"]
    return [*found, "-e", "NEUROND_CHIPS=" + ",".join(map(str, chips))]
