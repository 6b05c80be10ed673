"""Many clients fight for the chips while clients and daemon are killed at random."""

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import Daemon, eventually

FIGHTERS, SECONDS = 20, 8.0


@pytest.mark.timeout(240)
def test_no_chip_ever_has_two_holders_and_none_is_lost(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    """Twenty clients, killed at random like the daemon, never hold a chip twice, and all chips are free at the end."""
    daemon = make_daemon()
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    command = [sys.executable, "-m", "tests.daemon.fighter", daemon.address, str(tmp_path), str(SECONDS)]
    fighters = [subprocess.Popen(command) for _ in range(FIGHTERS)]
    end = time.monotonic() + SECONDS
    next_kill = time.monotonic() + 1.0
    killed_clients = killed_daemons = 0
    while time.monotonic() < end or killed_clients < 10 or killed_daemons < 3:
        time.sleep(0.02)
        if dice.random() < 0.15:
            fighters[dice.randrange(FIGHTERS)].kill()
            killed_clients += 1
        if time.monotonic() > next_kill:
            daemon.kill()
            daemon.start()
            killed_daemons += 1
            next_kill = time.monotonic() + dice.uniform(0.2, 0.8)
        for number, fighter in enumerate(fighters):
            if fighter.poll() is not None:
                fighters[number] = subprocess.Popen(command)
    for fighter in fighters:
        fighter.kill()
        fighter.wait()
    grants = len((tmp_path / "grants").read_text().splitlines())
    print(f"{grants} grants, {killed_clients} clients and {killed_daemons} daemons killed")
    assert not [path.read_text() for path in tmp_path.glob("violation-*")]
    eventually(daemon.all_free)
    assert len(daemon.states()) == 16
    assert grants > 0
