"""Fixtures: what a test does not break can be used again by the next one."""

from collections.abc import Iterator

import pytest

from tests.containers.engines import RELEASE
from tests.containers.support import wait_until_free
from tests.harness import Daemon, PrivateEngine, short_directory

collect_ignore = [] if RELEASE else ["test_engines.py", "test_cdi.py"]  # the host's engine is whatever it is


@pytest.fixture(scope="module")
def module_daemon(engine: PrivateEngine) -> Iterator[Daemon]:
    """Give a daemon with a Docker Engine for all tests of a module."""
    with short_directory() as directory:
        daemon = Daemon(directory / "0", "trn1.32xlarge", engine.url)
        yield daemon.start()
        daemon.close()


@pytest.fixture
def shared_daemon(module_daemon: Daemon, engine: PrivateEngine) -> Iterator[Daemon]:
    """Give the module's daemon with all chips free; containers are removed afterwards."""
    yield module_daemon
    left = engine.docker("ps", "--all", "--quiet").stdout.split()
    if left:  # --rm may be at work on one of them at this moment
        engine.docker("rm", "--force", *left, check=False)
    wait_until_free(module_daemon)
