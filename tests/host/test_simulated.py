"""The simulated host: what it makes is what the real code reads."""

import errno
import os
import select
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from neurond import catalog
from neurond.host.simulated import Model, SimulatedHost
from neurond.host.sysfs import Sysfs
from neurond.ledger.chips import Chip
from tests.host.support import as_nobody, tmpfs

TYPE = "inf2.24xlarge"

WITHOUT_ROOT = """
import sys
from pathlib import Path
from neurond.host.simulated import Model, SimulatedHost
from neurond.host.sysfs import Sysfs

def main():
    host = SimulatedHost(Path(sys.argv[1]), Model("inf2.24xlarge", 6, 2, "Inferentia2", lambda index: ()))
    chips = Sysfs(host.sys, host.dev, stand_ins=not host.real_nodes).read(host.directories())
    host.remove(2)
    print(host.real_nodes, len(chips), {chip.problem for chip in chips.values()})
    print({node.is_file() for node in host.dev.iterdir()}, len(list(host.dev.iterdir())))
"""

Make = Callable[..., SimulatedHost]


def model_of(name: str) -> Model:
    """Return what to simulate for an instance type of the catalog."""
    kind = catalog.look_up(name)
    return Model(kind.name, kind.chips, kind.cores, kind.chip, kind.connected)


def read(host: SimulatedHost) -> dict[int, Chip]:
    """Read the chips of a simulated host as the daemon does."""
    return Sysfs(host.sys, host.dev, stand_ins=not host.real_nodes).read(host.directories())


def has_news(host: SimulatedHost) -> bool:
    """Tell whether the descriptor is readable."""
    return bool(select.select([host.fileno()], [], [], 0)[0])


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Give a function that makes, or takes over, the simulated host of this test."""
    made: list[SimulatedHost] = []

    def make_host(name: str = TYPE, root: Path = tmp_path / "sim") -> SimulatedHost:
        made.append(SimulatedHost(root, model_of(name)))
        return made[-1]

    yield make_host
    for host in made:
        host.remove_all()
        host._block[1].close()
        os.close(host.fileno())


@pytest.mark.parametrize("name", catalog.names())
def test_every_type_is_read_back(make: Make, name: str) -> None:
    """Each instance type of the catalog is read as having exactly the chips, cores and links that it should."""
    kind = catalog.look_up(name)
    host = make(name)
    assert Sysfs(host.sys, host.dev).product_name() == name
    chips = read(host)
    assert sorted(chips) == list(range(kind.chips))
    for index, chip in chips.items():
        assert (chip.cores, chip.cores_from, chip.problem) == (kind.cores, "sysfs", None)
        assert chip.connected == kind.connected(index)
        assert (chip.serial, chip.device_name) == (f"{index:016x}", kind.chip)
    assert len({(chip.major, chip.minor) for chip in chips.values()}) == kind.chips


def test_a_chip_is_pulled_and_plugged(make: Make) -> None:
    """A pulled chip is gone with its node, the others stay, and plugged again it is as it was."""
    host = make()
    before = read(host)
    host.remove(3)
    assert sorted(read(host)) == [0, 1, 2, 4, 5]
    assert not (host.dev / "neuron3").exists()
    host.add(3)
    assert read(host) == before


def test_a_chip_comes_back_under_another_major(make: Make) -> None:
    """A chip can come back under another major, as after a driver upgrade, and has no problem for that."""
    host = make()
    host.remove(3)
    host.add(3, major=211)
    chip = read(host)[3]
    assert (chip.major, chip.minor, chip.problem) == (211, 3, None)


def test_pulling_twice_is_refused(make: Make) -> None:
    """A chip that is not there can't be pulled, one that is there can't be plugged, and neither changes anything."""
    host = make()
    host.remove(3)
    with pytest.raises(FileNotFoundError, match="chip 3 is not plugged"):
        host.remove(3)
    with pytest.raises(FileExistsError, match="chip 2 is plugged already"):
        host.add(2, major=211)
    assert sorted(read(host)) == [0, 1, 2, 4, 5]


def test_news_is_readable_once(make: Make) -> None:
    """Pulling and plugging make the descriptor readable until the news is taken in, however much there was."""
    host = make()
    assert host.drain()
    assert not has_news(host)
    for change in (host.remove, host.add):
        change(1)
        change(2)
        assert has_news(host)
        assert host.drain()
        assert not has_news(host)
        assert host.drain()


def test_an_existing_tree_is_taken_over(make: Make) -> None:
    """A daemon that starts again finds the chips as they were left: a pulled one stays pulled, and can be plugged."""
    first = make()
    first.remove(3)
    first.remove(4)
    first.add(4, major=211)
    before = read(first)
    second = make()
    assert read(second) == before
    assert before[4].major == 211
    second.add(3)
    assert sorted(read(second)) == list(range(6))


def test_another_model_replaces_the_tree(make: Make) -> None:
    """Another instance type replaces what was there."""
    make("trn1.32xlarge")
    host = make(TYPE)
    assert sorted(read(host)) == list(range(6))
    assert len(list(host.dev.iterdir())) == 6
    assert Sysfs(host.sys, host.dev).product_name() == TYPE


def test_an_unfinished_tree_is_replaced(make: Make) -> None:
    """A tree that a killed daemon did not finish is made anew."""
    first = make()
    first.remove(0)
    (first.sys / "devices/virtual/dmi/id/product_name").unlink()
    assert sorted(read(make())) == list(range(6))


def test_remove_all_leaves_nothing(make: Make) -> None:
    """Taking the tree away leaves nothing, and a second time does nothing."""
    host = make()
    host.remove_all()
    assert not host.root.exists()
    host.remove_all()


def check_nodes(host: SimulatedHost) -> None:
    """Check that all nodes are character devices of their own that can be opened."""
    numbers = set()
    for node in host.dev.iterdir():
        found = node.lstat()
        assert stat.S_ISCHR(found.st_mode)
        assert stat.S_IMODE(found.st_mode) == 0o666
        numbers.add(found.st_rdev)
        try:
            os.close(os.open(node, os.O_RDWR | os.O_NOCTTY))
        except OSError as error:
            if error.errno != errno.ENXIO:  # a kernel without virtual terminals; a refusal would be EACCES
                raise
    assert len(numbers) == host.model.chips


@pytest.mark.root
def test_nodes_are_real(make: Make) -> None:
    """As root the nodes are character devices, no two the same, and open."""
    check_nodes(make("trn1.32xlarge"))


@pytest.mark.root
def test_hosts_side_by_side_share_no_device(tmp_path: Path, make: Make) -> None:
    """Two simulated hosts have devices of their own, so that neither sees the other's users; they keep them."""
    hosts = [make(TYPE, tmp_path / name) for name in ("one", "two")]
    numbers = [{(chip.major, chip.minor) for chip in read(host).values()} for host in hosts]
    assert not numbers[0] & numbers[1]
    for host, its in zip(hosts, numbers, strict=True):
        host.remove(3)
        host.add(3)
        assert {(chip.major, chip.minor) for chip in read(host).values()} == its


@pytest.mark.root
def test_nodes_open_on_a_file_system_without_devices(tmp_path: Path, make: Make) -> None:
    """Where the file system lets no device be opened, the nodes are on one of their own, which goes with the tree."""
    with tmpfs(tmp_path / "nodev", "nodev,mode=755,size=1m") as directory:
        host = make("trn1.32xlarge", directory / "sim")
        assert host.dev.is_mount()
        check_nodes(host)
        again = make("trn1.32xlarge", directory / "sim")
        check_nodes(again)
        again.remove_all()
        assert not host.dev.exists()
        assert str(directory / "sim") not in Path("/proc/self/mounts").read_text()


@pytest.mark.root
def test_another_model_replaces_the_mount(tmp_path: Path, make: Make) -> None:
    """Replacing a tree on such a file system does not pile up mounts."""
    with tmpfs(tmp_path / "nodev", "nodev,mode=755,size=1m") as directory:
        for name in ("trn1.32xlarge", TYPE):
            host = make(name, directory / "sim")
        assert Path("/proc/self/mounts").read_text().count(f"{directory}/sim") == 1
        assert sorted(read(host)) == list(range(6))
        host.remove_all()


@pytest.mark.root
def test_without_root_files_stand_for_nodes(run_dir: Path) -> None:
    """Without root the nodes are regular files, and the chips are as good as they can be."""
    run_dir.chmod(0o777)
    assert as_nobody(WITHOUT_ROOT, run_dir / "sim") == "False 6 {None}\n{True} 5"
