"""Fixtures. As root nothing is skipped: what a test needs and does not find is a failure of the test command."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness import Daemon, PrivateEngine, short_directory


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
    """Give a Docker Engine of the tests' own."""
    with short_directory() as directory:
        engine = PrivateEngine(directory)
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
