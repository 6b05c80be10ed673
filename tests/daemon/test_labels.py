"""The labels of containers, of which anybody may have written what he likes."""

import pytest

from neurond.daemon import labels


@pytest.mark.parametrize("text", ["", "root", "-1", "²", "٣", "1" * 5000, " 1", "1\n"])
def test_a_label_that_is_no_uid_is_none(text: str) -> None:
    """What is no uid is taken for a label that is not there, and brings nothing down."""
    assert labels.uid_of({labels.OWNER: text}) is None


def test_uid_of_a_label() -> None:
    """The owner of a container is in its label."""
    assert labels.uid_of({labels.OWNER: "1000"}) == 1000
    assert labels.uid_of({}) is None
