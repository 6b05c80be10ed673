"""Fixtures of the tests of the daemon."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.daemon.support import Raw
from tests.harness import Daemon


@pytest.fixture
def connect(daemon: Daemon) -> Iterator[Callable[[], Raw]]:
    """Give a function that opens connections to the daemon; they are closed afterwards."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(Raw(daemon))
