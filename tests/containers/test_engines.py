"""The engine under the tests of containers is the one that was asked for."""

import json

import pytest

from tests.containers.engines import RELEASE
from tests.containers.support import IMAGE
from tests.daemon.support import node_of
from tests.harness import Daemon, PrivateEngine

pytestmark = pytest.mark.docker


def test_release_and_cdi(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """It has the release that was asked for, and gives a container what a spec in its own directory says."""
    assert engine.docker("version", "--format", "{{.Server.Version}}").stdout.startswith(f"{RELEASE}.")
    node = {"path": "/dev/neuron3", "hostPath": str(node_of(docker_daemon, 3)), "permissions": "rw"}
    device = {"name": "ab12", "containerEdits": {"deviceNodes": [node]}}
    spec = engine.cdi / "tests.json"
    spec.write_text(json.dumps({"cdiVersion": "0.5.0", "kind": "neurond.io/lease", "devices": [device]}))
    running = ["run", "--rm", "--network=none", "--device=neurond.io/lease=ab12", IMAGE, "ls", "/dev"]
    assert "neuron3" in engine.docker(*running).stdout.split()
    spec.unlink()
    refused = engine.docker(*running, check=False)
    assert refused.returncode == 125
    assert "unresolvable CDI devices neurond.io/lease=ab12" in refused.stderr
