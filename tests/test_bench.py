"""`neurond bench`: the quick form measures every section, and says what it leaves out."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from neurond import catalog
from neurond.bench.report import Ratio
from neurond.bench.run import SECTIONS
from tests.harness import NEUROND

FLOOR = 0.05
"""The share of the bare echo server's rate below which something is badly wrong: no noise gets there."""


def bench(*arguments: str, **env: str) -> dict[str, Any]:
    """Run the benchmark and return what it prints."""
    command = [*NEUROND, "bench", "--quick", "--json", *arguments]
    clean = {name: value for name, value in os.environ.items() if name != "DOCKER_HOST"}
    done = subprocess.run(command, env=clean | env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(300)
def test_quick_form_measures_everything(tmp_path: Path) -> None:
    """The quick form has figures of every section, with their spread, draws them, and is not far from the limit."""
    plot = tmp_path / "plot.svg"
    found = bench("--plot", str(plot))
    assert found["quick"] is True
    assert found["machine"]["python"] == sys.version.split()[0]
    assert {one["section"] for one in found["measured"]} == set(SECTIONS)
    for one in found["measured"]:
        assert one["low"] <= one["value"] <= one["high"], one
    ratios = {one["what"]: one for one in found["ratios"]}
    assert ratios["requests/s at 32 connections, against echo"]["value"] > FLOOR
    assert {"4 contiguous chips against 1", "READY with 64 leases, against interpreter and imports"} <= ratios.keys()
    assert any("the load takes" in note for note in found["notes"])
    assert any("no Docker Engine" in text for text in found["left_out"])
    drawn = ET.parse(plot).getroot()  # noqa: S314 - our own
    bars = [one for one in drawn.iter() if one.tag.endswith("rect")]
    assert len(bars) == len(found["measured"]) + 1


def test_peers_that_are_absent_are_said_to_be(tmp_path: Path) -> None:
    """A peer that is not installed is named as left out; the limit and neurond itself are measured all the same."""
    for name in ("mount", "umount", "true"):
        tmp_path.joinpath(name).symlink_to(f"/usr/bin/{name}")
    found = bench("peers", "--quiet", PATH=str(tmp_path))
    for name in ("Redis", "etcd", "flock(1)"):
        assert any(text.startswith(f"{name}: ") for text in found["left_out"])
    names = {one["what"] for one in found["measured"]}
    assert {"neurond, 32 connections", "echo, 32 connections"} <= names
    assert not any("Redis" in name for name in names)


def test_unknown_section_is_refused() -> None:
    """A section that does not exist is a usage error that lists those that do."""
    done = subprocess.run([*NEUROND, "bench", "speed"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no section 'speed': there are ledger, socket" in done.stderr


@pytest.mark.parametrize(
    ("value", "upward", "verdict"),
    [(0.5, True, "short"), (0.7, True, "good"), (0.9, True, "as aimed"), (0.5, False, "as aimed")],
)
def test_verdict_compares_with_the_bounds(value: float, verdict: str, *, upward: bool) -> None:
    """A ratio is held against what it must reach and what is aimed at, from below or from above."""
    must, aim = (0.6, 0.75) if upward else (0.75, 0.6)
    assert Ratio("peers", "x", value, value, value, must, aim, upward).verdict == verdict


def test_simulated_host_can_be_larger_than_any_that_exists() -> None:
    """trn1.32xlarge*4 is a host of 64 chips with the same sets; more copies than chip numbers allow are not known."""
    large = catalog.look_up("trn1.32xlarge*4")
    assert (large.known, large.chips, large.topology.sizes) == (True, 64, (1, 4, 8, 16))
    assert large.topology.groups(16)[-1] == 0xFFFF << 48
    for name in ("trn1.32xlarge*7", "trn1.32xlarge*0", "trn1.32xlarge*x", "none*2", "*2"):
        assert not catalog.look_up(name).known
