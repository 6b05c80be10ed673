"""Fixtures. As root nothing is skipped: what a test needs and does not find is a failure of the test command."""

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.containers.engines import RELEASE, SUITES, engine_in, programs_of
from tests.harness import Daemon, PrivateEngine, short_directory

ALONE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--net"]
ALONE += ["sh", "-c", 'busybox ip link set lo up; "$@"; exit $?', "sh"]
"""Runs a command in namespaces of its own. The shell waits for orphans, and all that is left ends with the command."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Keep parallel workers apart, as root: there is one machine's worth of /proc and of nodes for simulated chips.

    A daemon looks for users of its chips in all of /proc, and simulated hosts borrow the same few device numbers. Each
    worker has a /proc of its own, and names of its own (of the net namespace) by which a host claims its numbers.
    """
    if os.geteuid() == 0:
        for spec in specs:
            spec.python = shlex.join([*ALONE, sys.executable])


def pytest_configure() -> None:
    """Hear SIGINT, which a shell has its background jobs ignore: the commands that the tests start would inherit it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out, for an ordinary user, what only root can do."""
    if os.geteuid() == 0:
        return
    for item in items:
        if item.get_closest_marker("docker") or item.get_closest_marker("root"):
            item.add_marker(pytest.mark.skip(reason="needs root"))
        if item.get_closest_marker("udev") and not shutil.which("umockdev-run"):
            item.add_marker(pytest.mark.skip(reason="needs umockdev, which root can install"))


def pytest_sessionstart() -> None:
    """Make the Engine that is asked for before the time of any test runs."""
    if RELEASE and RELEASE not in SUITES:
        raise pytest.UsageError(f"NEUROND_TEST_ENGINE={RELEASE}: it can be {' or '.join(SUITES)}")
    if RELEASE and os.geteuid() == 0:
        programs_of(RELEASE)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Give a directory with a short path."""
    with short_directory() as directory:
        yield directory


@pytest.fixture
def make_daemon(run_dir: Path) -> Iterator[Callable[..., Daemon]]:
    """Give a function that starts daemons, each in a directory of its own."""
    made: list[Daemon] = []

    def make(simulate: str | None = "trn1.32xlarge", engine: str | None = None, *more: str) -> Daemon:
        daemon = Daemon(run_dir / str(len(made)), simulate, engine, *more)
        made.append(daemon)
        return daemon.start()

    yield make
    for daemon in made:
        daemon.close()


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon]) -> Daemon:
    """Give a daemon on a simulated trn1.32xlarge."""
    return make_daemon()


@pytest.fixture(scope="session")
def engine() -> Iterator[PrivateEngine]:
    """Give a Docker Engine of the tests' own: the host's, or the one that NEUROND_TEST_ENGINE names."""
    with short_directory() as directory:
        engine = engine_in(directory)
        engine.start()
        engine.make_image()
        yield engine
        engine.stop()


@pytest.fixture
def docker_daemon(make_daemon: Callable[..., Daemon], engine: PrivateEngine) -> Iterator[Daemon]:
    """Give a daemon with a Docker Engine; its containers are removed afterwards."""
    yield make_daemon("trn1.32xlarge", engine.url)
    left = engine.docker("ps", "--all", "--quiet").stdout.split()
    if left:
        engine.docker("rm", "--force", *left, check=False)  # neurond may be removing one at the same time
    for path in engine.cdi.glob("*.json"):  # a daemon that stops leaves the names of its leases
        path.unlink()
