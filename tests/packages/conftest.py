"""Fixtures of the packages."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packages.builds import Packages, build_all
from tests.packages.machine import Machine


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    """Give packages of two versions."""
    base = tmp_path_factory.getbasetemp()
    return build_all(base.parent if base.name.startswith("popen-") else base)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Give a host with nothing of neurond on it."""
    with Machine(tmp_path) as one:
        yield one
