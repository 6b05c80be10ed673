"""udev, through the real pyudev and libudev: umockdev gives them devices, and the kernel gives them a flood."""

import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from neurond.host import udev

FLOOD = 2000
GOOD = [239, 2, "sysfs", [0, 2], None]
"""What udev_child.py tells of a chip that it plugged with all its files: major, cores, their source, links, problem."""

Run = Callable[[str], Any]


@pytest.fixture
def run(run_dir: Path) -> Run:
    """Give a function that runs a scenario of udev_child.py and returns what it saw."""

    def run_scenario(name: str) -> Any:
        done = subprocess.run(
            ["umockdev-wrapper", sys.executable, "-m", "tests.host.udev_child", name],
            env=os.environ | {"TMPDIR": str(run_dir)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return msgspec.json.decode(done.stdout.splitlines()[-1])

    return run_scenario


@pytest.mark.udev
def test_chips_are_listed_with_their_attributes(run: Run) -> None:
    """All devices of the class are listed, and those that are chips are read with their attributes."""
    seen = run("listing")
    assert seen["names"] == ["neuron0", "neuron0.bak", "neuron10", "neuron2", "neuron_monitor"]
    assert seen["chips"] == {"0": GOOD, "2": GOOD, "10": GOOD}


@pytest.mark.udev
def test_each_change_is_news_and_the_look_has_the_whole_set(run: Run) -> None:
    """Adding and removing wake the monitor once, and the next look has the whole set, under another major too."""
    awake = [True, True, False]  # there is news, it is taken in, there is no more
    assert run("hotplug") == [
        [False, True, False, {"0": 239, "1": 239}],
        [*awake, {"0": 239, "1": 239, "2": 239}],
        [*awake, {"0": 239, "2": 239}],
        [*awake, {"0": 239, "1": 240, "2": 239}],
    ]


@pytest.mark.udev
def test_a_chip_without_its_files_is_waited_for(run: Run) -> None:
    """A new chip is left out until its files tell its cores, or until it had its time and the catalog must do."""
    odd = [239, 2, "catalog", [2, 4], "core_count reads 'many'"]
    settled = [239, 4, "sysfs", [0, 2], None]
    assert run("late") == {
        "first": [{"0": GOOD, "3": odd}, True],
        "second": [{"0": GOOD, "1": settled, "3": odd}, True],
        "third": [{"0": GOOD, "1": settled, "2": [239, 2, "catalog", [1, 3], None], "3": odd}, False],
        "fourth": {"0": GOOD, "1": settled, "2": [239, 2, "sysfs", [1, 3], None], "3": odd},
    }


@pytest.mark.udev
def test_a_chip_that_comes_back_is_waited_for_again(run: Run) -> None:
    """A chip that went and came back under the same numbers has to settle like a new one."""
    assert run("late_again") == [[0, 1], [0], [0], True]


@pytest.mark.udev
def test_a_chip_may_vanish_at_any_moment(run: Run) -> None:
    """A chip that goes between listing and reading, or in the middle of the listing, leaves out that chip only."""
    assert run("vanishing") == [[0, 2, 3], ["neuron0", "neuron3"]]


@pytest.mark.udev
def test_a_thousand_events_end_in_the_right_state(run: Run) -> None:
    """After a storm of events the set is right, no event is left over, and the next one is heard."""
    assert run("burst") == {
        "chips": {"1": [240, 2, "sysfs", [0, 2], None], "2": GOOD},
        "unsettled": False,
        "quiet": True,
        "hears": True,
    }


@pytest.mark.udev
def test_a_dead_monitor_is_made_anew(run: Run) -> None:
    """When reading events fails the monitor is made anew, which is said, and the next event is heard."""
    assert run("dead_monitor") == [[True, True, True, [0, 1]], [True, True, True, [0, 1, 2]]]


@pytest.mark.udev
def test_the_daemon_follows_a_monitor_that_died(run: Run) -> None:
    """The loop that follows the chips goes over to the new monitor, looks at once, and sees the next changes."""
    assert run("follow") == [[0], [0, 3], [3]]


@pytest.mark.root
def test_a_real_overflow_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the kernel sends more than the monitor can hold, the monitor is made anew and hears the next event."""
    monkeypatch.setattr(udev, "SUBSYSTEM", "mem")
    monkeypatch.setattr(udev, "BUFFER", 1)
    uevent = Path("/sys/class/mem/null/uevent")
    source = udev.Udev()
    assert Path("/sys/devices/virtual/mem/null") in source.directories()
    for _ in range(FLOOD):
        uevent.write_text("change")
    assert not source.drain()
    assert source.drain()
    uevent.write_text("change")
    assert select.select([source.fileno()], [], [], 10)[0]
    assert source.drain()
