"""What the tests of containers share: what runs in them, and looks at what is there."""

import json
from typing import Any

from tests.harness import Daemon, PrivateEngine, eventually

IMAGE = PrivateEngine.IMAGE
STUBBORN = (IMAGE, "sleep", "600")
"""Runs until it is killed: process 1 of a container does not hear a SIGTERM that it has no handler for."""
POLITE = (IMAGE, "sh", "-c", "trap 'echo bye; exit 143' TERM; echo ready; while :; do sleep 0.02; done")
"""Says that it is ready, runs until SIGTERM, says goodbye and exits with 143."""
SOON = 15.0
"""Seconds: three times as long as the daemon takes to look again of its own accord."""


def launch(daemon: Daemon, *arguments: str) -> str:
    """Start a container in the background and return its id."""
    done = daemon.cli("container", "run", "--detach", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def inspect(engine: PrivateEngine, container: str) -> dict[str, Any]:
    """Return what the engine knows about a container."""
    found: list[dict[str, Any]] = json.loads(engine.docker("inspect", container).stdout)
    return found[0]


def ours(engine: PrivateEngine, *filters: str) -> set[str]:
    """Return the ids of all containers that neurond made."""
    command = ["ps", "--all", "--no-trunc", "--quiet", "--filter", "label=io.neurond.lease", *filters]
    return set(engine.docker(*command).stdout.split())


def is_running(engine: PrivateEngine, container: str) -> bool:
    """Tell whether a container runs."""
    return bool(inspect(engine, container)["State"]["Running"])


def wait_for_output(engine: PrivateEngine, container: str, text: str) -> str:
    """Wait until a container has written this to its stdout, and return all that it wrote there."""
    eventually(lambda: text in engine.docker("logs", container).stdout)
    return engine.docker("logs", container).stdout


def held(daemon: Daemon) -> set[int]:
    """Return the chips that are not free."""
    return {chip for chip, state in daemon.states().items() if state != "free"}


def wait_until_free(daemon: Daemon, patience: float = SOON) -> None:
    """Wait until all chips are free."""
    eventually(daemon.all_free, patience)
