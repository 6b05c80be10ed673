"""The reader of docker's command line against docker's own: what a real docker asks its engine for is what we read."""

import json
import os
import shutil
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neurond.cli.dockerflags import read, run_flags
from tests.cli.test_docker_flags import forms_of

DOCKERS = sorted({path for path in map(shutil.which, ("/usr/bin/docker", "/usr/local/bin/docker", "docker")) if path})
CREATE = {flag.long: flag for flag in run_flags("create")}
GIVEN = {
    "env": ["A=1", "A=b c\nd", "B=--rm", "C=-n"],
    "label": ["l=1", "l=-e", "m"],
    "volume": ["/a:/b", "/a b:/c"],
    "workdir": ["/w", "-n"],
    "user": ["me"],
    "hostname": ["h"],
    "domainname": ["--", "-"],
    **{name: ["true"] for name in ("tty", "interactive", "privileged", "init", "read-only")},
}
PART = st.sampled_from([(CREATE[name], value) for name, values in GIVEN.items() for value in values]).flatmap(
    lambda part: st.sampled_from(forms_of(*part))
)
COMMAND = st.lists(st.sampled_from(["sh", "-n", "3", "--", "", "-it", "--env=A=2", "a b"]))


class Engine(BaseHTTPRequestHandler):
    """An engine that writes down what it is asked to create, and refuses it."""

    asked: dict[str, Any]

    def do_HEAD(self) -> None:
        """Answer a ping."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answer a ping."""
        self.answer(200, b"OK")

    def do_POST(self) -> None:
        """Write down a container that is to be created."""
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if "/containers/create" in self.path:
            Engine.asked = json.loads(body)
        self.answer(500, b'{"message": "written down"}')

    def answer(self, status: int, body: bytes) -> None:
        """Send a reply."""
        self.send_response(status)
        self.send_header("API-Version", "1.45")
        self.send_header("OSType", "linux")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def pairs(texts: list[str]) -> dict[str, str]:
    """Return NAME=VALUE texts as a mapping; of two with the same name, the later one counts."""
    return dict(text.partition("=")[::2] for text in texts)


@pytest.fixture
def engine(run_dir: Path) -> Iterator[str]:
    """Give the address of an engine that writes down what it is asked to create."""
    path = run_dir / "engine.sock"
    with socketserver.ThreadingUnixStreamServer(str(path), Engine) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"unix://{path}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("docker", DOCKERS)
def test_docker_understands_what_we_understand(docker: str, engine: str, tmp_path: Path) -> None:
    """Image, command, variables, labels, mounts and booleans of any command line are the same to both."""
    env = os.environ | {"DOCKER_HOST": engine, "DOCKER_CONFIG": str(tmp_path)}

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(PART, max_size=6), st.sampled_from([[], ["--"]]), COMMAND)
    def same(parts: list[list[str]], end: list[str], command: list[str]) -> None:
        words = [*(word for part in parts for word in part), *end, "image", *command]
        line = read(words, list(CREATE.values()), "docker create")
        assert [*line.options, line.image, *line.command] == words
        done = subprocess.run([docker, "create", *words], env=env, capture_output=True, text=True, check=False)
        assert "written down" in done.stderr
        asked, host = Engine.asked, Engine.asked["HostConfig"]
        assert (asked["Image"], asked["Cmd"] or []) == (line.image, line.command)
        assert pairs(asked["Env"] or []) == pairs(line.all("env"))
        assert asked["Labels"] == pairs(line.all("label"))
        assert set(host["Binds"] or []) == set(line.all("volume"))
        for name, key in {"workdir": "WorkingDir", "user": "User", "hostname": "Hostname"}.items():
            assert asked[key] == (line.last(name) or "")
        assert asked["Domainname"] == (line.last("domainname") or "")
        assert (asked["Tty"], asked["OpenStdin"]) == (line.on("tty"), line.on("interactive"))
        assert host["Privileged"] == line.on("privileged")
        assert host["ReadonlyRootfs"] == line.on("read-only")

    same()


@pytest.mark.parametrize("docker", DOCKERS)
@pytest.mark.parametrize("words", [["--foo", "image"], ["--interact", "image"], ["-itx"], ["-t=", "image"], ["---rm"]])
def test_docker_refuses_what_we_refuse(docker: str, words: list[str], engine: str, tmp_path: Path) -> None:
    """What is no flag to us is none to docker."""
    env = os.environ | {"DOCKER_HOST": engine, "DOCKER_CONFIG": str(tmp_path)}
    done = subprocess.run([docker, "create", *words], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 125 or "unknown" in done.stderr
    assert "written down" not in done.stderr
