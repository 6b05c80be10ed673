"""Fixtures of the tests of the command line: most of them share a daemon, which each leaves as it found it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.fakes import Wrapper
from tests.harness import Daemon, eventually, short_directory


@pytest.fixture(scope="package")
def shared() -> Iterator[Daemon]:
    """Give one daemon to all tests that do not stop it."""
    with short_directory() as directory:
        daemon = Daemon(directory / "shared")
        try:
            yield daemon.start()
        finally:
            daemon.close()


@pytest.fixture
def daemon(shared: Daemon) -> Iterator[Daemon]:
    """Give a daemon all of whose chips are free; what the test leaves leased is released."""
    eventually(shared.all_free)
    yield shared
    for lease in shared.leases():
        shared.cli("release", lease["lease"])
    eventually(shared.all_free)


@pytest.fixture
def fresh(make_daemon: Callable[..., Daemon]) -> Daemon:
    """Give a daemon in which nothing has happened yet."""
    return make_daemon()


@pytest.fixture
def wrapper(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wrapper]:
    """Give `neurond docker` with a docker that records, and a daemon that is played."""
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES", raising=False)
    wrapper = Wrapper(run_dir)
    yield wrapper
    wrapper.daemon.close()
