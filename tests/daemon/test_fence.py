"""The names of leases as devices, when their file can't be written."""

import json
from pathlib import Path

import pytest

from neurond.daemon.fence import Fence
from neurond.host.cdi import CdiFile
from neurond.ledger.chips import Chip
from neurond.ledger.leases import ByTime, Owner, Want
from neurond.ledger.ledger import Ledger
from neurond.ledger.topology import Topology

ROOT = Owner(0, "root")


@pytest.fixture
def ledger() -> Ledger:
    """Give a host with two chips."""
    ledger = Ledger(Topology("single", 2), "test")
    ledger.open("ab12")
    ledger.look({index: Chip(index, f"/dev/neuron{index}", 240, index) for index in range(2)}, 0)
    return ledger


def lease(ledger: Ledger) -> str:
    """Lease a chip and return the lease's id."""
    return ledger.acquire(Want(1), ROOT, ByTime(1000), now=0)[0].id


def names(directory: Path) -> set[str]:
    """Return the names that an engine can resolve."""
    return {d["name"] for path in directory.glob("*.json") for d in json.loads(path.read_text())["devices"]}


def test_a_name_that_can_not_be_taken_out_goes_with_its_file(ledger: Ledger, tmp_path: Path) -> None:
    """Where the file can't be written anew, no name is left rather than one of a lease that has ended."""
    fence = Fence(ledger, CdiFile(tmp_path, "neurond"))
    fence.found([str(tmp_path)])
    first, second = lease(ledger), lease(ledger)
    fence.update()
    assert names(tmp_path) == {first, second}
    in_the_way = tmp_path / "neurond.new"
    in_the_way.mkdir()
    ledger.end(first, "test", 0)
    fence.update()
    assert names(tmp_path) == set()
    assert not fence.is_on
    in_the_way.rmdir()
    fence.update()
    assert names(tmp_path) == {second}
    assert fence.is_on


def test_names_that_hold_stay_where_one_can_not_be_added(ledger: Ledger, tmp_path: Path) -> None:
    """A lease whose name is written keeps it while that of another one can't be."""
    fence = Fence(ledger, CdiFile(tmp_path, "neurond"))
    fence.found([str(tmp_path)])
    first = lease(ledger)
    fence.update()
    in_the_way = tmp_path / "neurond.new"
    in_the_way.mkdir()
    second = lease(ledger)
    fence.update()
    assert names(tmp_path) == {first}
    assert not fence.is_on
    in_the_way.rmdir()
    ledger.end(second, "test", 0)
    fence.update()
    assert fence.is_on


@pytest.mark.parametrize("why", ["rival", "engine without CDI"])
def test_no_name_is_left_that_nobody_takes_care_of(ledger: Ledger, tmp_path: Path, why: str) -> None:
    """When names are no longer given, those that were are taken back."""
    fence = Fence(ledger, CdiFile(tmp_path, "neurond"))
    fence.found([str(tmp_path)])
    lease(ledger)
    fence.update()
    if why == "rival":
        (tmp_path / "rival.json").write_text('{"kind": "neurond.io/lease", "devices": []}')
    fence.found([str(tmp_path)] if why == "rival" else [])
    assert names(tmp_path) == set()
    assert not fence.is_on
