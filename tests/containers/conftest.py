"""Fixtures: what a test does not break can be used again by the next one."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.containers.engines import RELEASE
from tests.containers.proxy import Proxy
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


@pytest.fixture
def between(run_dir: Path, engine: PrivateEngine) -> Iterator[Proxy]:
    """Give a proxy in front of the engine."""
    between = Proxy(run_dir / "engine.sock", engine.url)
    yield between
    between.close()


@pytest.fixture
def proxied(make_daemon: Callable[..., Daemon], between: Proxy, engine: PrivateEngine) -> Iterator[Daemon]:
    """Give a daemon that reaches the engine through the proxy; its containers are removed afterwards."""
    yield make_daemon("trn1.32xlarge", between.url)
    left = engine.docker("ps", "--all", "--quiet").stdout.split()
    if left:
        engine.docker("rm", "--force", *left, check=False)
