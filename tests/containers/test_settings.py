"""Settings that are about containers, as a reload changes them: who is stopped, and what is waited for how long."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.containers.engines import RELEASE
from tests.containers.proxy import Proxy
from tests.containers.support import STUBBORN, inspect, is_running, launch, ours, wait_until_free
from tests.harness import Daemon, PrivateEngine, eventually

pytestmark = pytest.mark.docker

CREATE_ONLY = """#!/bin/sh
shift
exec {docker} create "$@"
"""
"""A docker whose `run` is killed, as it were, after it has created the container."""
LISTS = r"^GET /v[\d.]+/containers/json"
Configured = Callable[[str], Daemon]


@pytest.fixture
def configured(run_dir: Path, engine: PrivateEngine) -> Iterator[Configured]:
    """Give a function that writes the settings of a daemon with an engine, and starts it or has it read them again."""
    file = run_dir / "etc/neurond.toml"
    file.parent.mkdir()
    daemons: list[Daemon] = []

    def configure(text: str) -> Daemon:
        file.write_text(f'docker = "{engine.url}"\n{text}' if "docker =" not in text else text)
        if daemons:
            before = len(daemons[0].logged("config.reloaded"))
            os.kill(daemons[0].pid, signal.SIGHUP)
            eventually(lambda: len(daemons[0].logged("config.reloaded")) > before)
            return daemons[0]
        daemon = Daemon(run_dir / "0")
        daemon.arguments = ["--config", str(file), "--runtime-dir", str(daemon.directory)]
        daemon.arguments += ["--simulate", "trn1.32xlarge", "--cdi-dir", str(engine.cdi)]
        daemons.append(daemon)
        return daemon.start()

    yield configure
    for daemon in daemons:
        daemon.close()
    left = engine.docker("ps", "--all", "--quiet").stdout.split()
    if left:
        engine.docker("rm", "--force", *left, check=False)


def test_how_often_containers_are_looked_at(run_dir: Path, configured: Configured, engine: PrivateEngine) -> None:
    """Without news from the engine, all containers are looked at every `docker_look_every`."""
    between = Proxy(run_dir / "proxy.sock", engine.url)
    try:
        daemon = configured(f'docker = "{between.url}"\ndocker_look_every = "1h"')
        time.sleep(2)  # for the first looks
        asked = between.times(LISTS)
        time.sleep(7)
        assert between.times(LISTS) == asked, "by default it would have looked"
        configured(f'docker = "{between.url}"\ndocker_look_every = "500ms"')
        eventually(lambda: between.times(LISTS) >= asked + 16, 15)  # eight looks, for which the default takes 40 s
        assert daemon.all_free()
    finally:
        between.close()


@pytest.mark.skipif(bool(RELEASE), reason="an engine with CDI keeps a container from coming back: test_cdi.py")
def test_a_conflict_is_stopped_once_that_is_set(configured: Configured, engine: PrivateEngine) -> None:
    """A container in conflict goes on until `stop_conflicts` is set; then it is stopped, within `conflict_grace`."""
    daemon = configured("")
    container = launch(daemon, "--chips", "0", "--name", "late", *STUBBORN)
    engine.docker("kill", container)
    wait_until_free(daemon)
    other = daemon.call("Acquire", chips=[0], ttl=600)["lease"]
    engine.docker("start", container)
    eventually(lambda: daemon.logged("container.conflict"))
    configured("conflict_grace = 0")
    assert is_running(engine, container)
    began = time.monotonic()
    configured("conflict_grace = 0\nstop_conflicts = true")
    eventually(lambda: not is_running(engine, container))
    assert time.monotonic() - began < 8, "it hears no SIGTERM, and by default would have had ten seconds"
    said = [line["follows"] for line in daemon.logged("container.conflict")]
    assert said[0].startswith("it is named in neurond ls")
    assert set(said[1:]) == {"stopping it"}
    assert [lease["lease"] for lease in daemon.leases()] == [other]


def test_how_long_a_restart_may_take(configured: Configured, engine: PrivateEngine) -> None:
    """A container that docker has killed keeps its lease for `restart_grace`, also if that is changed meanwhile."""
    daemon = configured('restart_grace = "10m"')
    container = launch(daemon, "-n", "4", *STUBBORN)
    engine.docker("kill", container)
    time.sleep(4)
    (lease,) = daemon.leases()
    assert (lease["state"], inspect(engine, container)["State"]["Status"]) == ("active", "exited")
    configured("restart_grace = 0")
    wait_until_free(daemon, 4)


def test_how_long_a_created_container_may_take_to_start(
    configured: Configured, engine: PrivateEngine, tmp_path: Path
) -> None:
    """A container whose docker command has ended before it was started has `start_grace` for that."""
    program = tmp_path / "docker"
    program.write_text(CREATE_ONLY.format(docker=shutil.which("docker", path=engine.programs)))
    program.chmod(0o755)
    env = {"DOCKER_HOST": engine.url, "PATH": f"{tmp_path}:{engine.programs}"}
    daemon = configured('start_grace = "10m"')
    done = daemon.cli("docker", "run", "--network", "none", "-n", "4", *STUBBORN, env=env)
    assert done.returncode == 0, done.stderr
    time.sleep(7)
    assert [lease["chips"] for lease in daemon.leases()] == [[0, 1, 2, 3]]
    assert len(ours(engine, "--filter", "status=created")) == 1
    configured("start_grace = 0")
    wait_until_free(daemon, 4)
