"""sysfs: what is a chip and what is not, and what is made of attributes that are odd, moved or missing."""

import ast
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from neurond.host.sysfs import Sysfs
from neurond.ledger.chips import Chip
from tests.host.support import as_nobody

MAJOR = 239
VENDOR = {
    "core_count": "8",
    "connected_devices": "12, 3, 4, 1\n",
    "info/serial_number": "0123456789abcdef\n",
    "info/architecture/device_name": "Trainium2\n",
}
"""The driver's own attributes in their old layout; core_count has no newline."""

READ = """
import sys
from pathlib import Path
from neurond.host.sysfs import Sysfs

def main():
    root = Path(sys.argv[1])
    chips = Sysfs(root / "sys", root / "dev", stand_ins=True).read((root / "sys/class/neuron_device").iterdir())
    print({index: (chip.cores, chip.cores_from, chip.serial, chip.problem) for index, chip in chips.items()})
"""


class Tree:
    """A directory with `sys` and `dev` in it, as the kernel lays them out."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.devices = root / "sys/devices/virtual/neuron_device"
        self.links = root / "sys/class/neuron_device"
        self.dev = root / "dev"
        for directory in (self.devices, self.links, self.dev):
            directory.mkdir(parents=True)

    def plug(self, name: str, files: dict[str, str] | None = None, minor: int = 0) -> Path:
        """Make a device of the class with these attributes, and a regular file as its node."""
        directory = self.devices / name
        directory.mkdir()
        self.write(directory, {"dev": f"{MAJOR}:{minor}\n"} | (files or {}))
        (self.links / name).symlink_to(Path("../../devices/virtual/neuron_device") / name)
        (self.dev / name).touch()
        return directory

    def write(self, directory: Path, files: dict[str, str]) -> None:
        """Write attributes."""
        for path, text in files.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_text(text)

    def sysfs(self, *, stand_ins: bool = True) -> Sysfs:
        """Return what is under test."""
        return Sysfs(self.root / "sys", self.dev, stand_ins=stand_ins)

    def read(self, *, stand_ins: bool = True) -> dict[int, Chip]:
        """Read all chips, through the links of the class."""
        return self.sysfs(stand_ins=stand_ins).read(sorted(self.links.iterdir()))

    def only(self, files: dict[str, str]) -> Chip:
        """Plug chip 0 with these attributes beside a good chip 1, see that this one is good, and return chip 0."""
        self.plug("neuron0", files)
        self.plug("neuron1", VENDOR, minor=1)
        chips = self.read()
        assert (chips[1].cores, chips[1].problem) == (8, None)
        return chips[0]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Give a host without chips."""
    return Tree(tmp_path)


# -- which chips ----------------------------------------------------------------------------------------------------


def test_a_chip_is_read_with_all_facts(tree: Tree) -> None:
    """All attributes of the old layout are read, and each says that it came from sysfs."""
    tree.plug("neuron5", VENDOR, minor=5)
    assert tree.read() == {
        5: Chip(
            5,
            str(tree.dev / "neuron5"),
            MAJOR,
            5,
            cores=8,
            cores_from="sysfs",
            connected=(1, 3, 4, 12),
            connected_from="sysfs",
            serial="0123456789abcdef",
            device_name="Trainium2",
        )
    }


@pytest.mark.parametrize(
    "name",
    [
        "neuron_monitor",
        "neuronX",
        "neuron0.bak",
        "neuron00",
        "neuron",
        "neuron-1",
        "neuron100",
        "xneuron1",
        "neuron1\n",
    ],
)
def test_names_that_are_no_chips_are_passed_over(tree: Tree, name: str) -> None:
    """A device whose name is not exactly that of a chip is no chip."""
    tree.plug("neuron0", VENDOR)
    tree.plug(name, VENDOR)
    assert set(tree.read()) == {0}


@pytest.mark.parametrize("name", ["ultraserver_mode", "node_id_4", "hbm_7200_capable"])
def test_files_of_the_class_are_passed_over(tree: Tree, name: str) -> None:
    """The plain files that the driver puts beside the chips are no chips."""
    tree.plug("neuron0", VENDOR)
    (tree.links / name).write_text("\n")
    assert set(tree.read()) == {0}


def test_order_is_that_of_the_numbers(tree: Tree) -> None:
    """64 chips are read, each under its own number, though text order has neuron10 before neuron2."""
    for index in range(64):
        tree.plug(f"neuron{index}", VENDOR, minor=index)
    chips = tree.read()
    assert sorted(chips) == list(range(64))
    assert all((chip.index, chip.minor) == (index, index) for index, chip in chips.items())


def test_holes_stay_holes(tree: Tree) -> None:
    """A chip that failed to start leaves a hole, and the others keep their numbers."""
    for index in (0, 1, 3, 10):
        tree.plug(f"neuron{index}", VENDOR, minor=index)
    assert sorted(tree.read()) == [0, 1, 3, 10]


def test_no_chips_is_an_empty_set(tree: Tree) -> None:
    """A host without chips gives none, and no error."""
    assert tree.read() == {}


@pytest.mark.parametrize("gone", ["dev", "."])
def test_a_chip_that_vanishes_while_it_is_read_is_left_out(tree: Tree, gone: str) -> None:
    """A directory that goes away between listing and reading leaves out that chip only."""
    for index in range(4):
        tree.plug(f"neuron{index}", VENDOR, minor=index)
    listed = sorted(tree.links.iterdir())
    victim = tree.devices / "neuron2" / gone
    shutil.rmtree(victim) if victim.is_dir() else victim.unlink()
    assert sorted(tree.sysfs().read(listed)) == [0, 1, 3]


# -- attributes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "cores"), [("2", 2), ("8\n", 8), ("1", 1), ("64", 64), (" 4 \n", 4)])
def test_core_count_is_read(tree: Tree, text: str, cores: int) -> None:
    """A number of cores is read with and without a newline."""
    chip = tree.only({"core_count": text})
    assert (chip.cores, chip.cores_from, chip.problem) == (cores, "sysfs", None)


@pytest.mark.parametrize("text", ["0", "-1", "abc", "99999999999", "65", "2 4", "0x8", "²", "8.0", "invalid\n", "\x00"])
def test_an_odd_core_count_withholds_that_chip(tree: Tree, text: str) -> None:
    """A core_count that is no plausible number is a problem of that chip, with its text; other chips go on."""
    chip = tree.only({"core_count": text})
    assert (chip.cores, chip.cores_from) == (None, "unknown")
    assert chip.problem == f"core_count reads {text.strip()!r}"


@pytest.mark.parametrize("files", [{}, {"core_count": ""}, {"core_count": "\n"}], ids=["absent", "empty", "newline"])
def test_cores_are_unknown_without_a_core_count(tree: Tree, files: dict[str, str]) -> None:
    """Without core_count the cores are unknown, which is no problem."""
    chip = tree.only(files)
    assert (chip.cores, chip.cores_from, chip.problem) == (None, "unknown", None)


@pytest.mark.parametrize("files", [{}, {"core_count": ""}], ids=["absent", "empty"])
def test_cores_are_counted_without_a_core_count(tree: Tree, files: dict[str, str]) -> None:
    """Without core_count the directories of the cores are counted, and only those."""
    made = {f"neuron_core{n}/info/architecture/arch_type": "NCv3\n" for n in range(4)}
    chip = tree.only(files | made | {"neuron_cores/x": "", "neuron_core/x": "", "neuron_core1.bak/x": ""})
    assert (chip.cores, chip.cores_from, chip.problem) == (4, "sysfs", None)


def test_core_count_counts_more_than_directories(tree: Tree) -> None:
    """The driver's own number is preferred: a module parameter can lower it."""
    assert tree.only({"core_count": "2", "neuron_core0/x": "", "neuron_core1/x": "", "neuron_core2/x": ""}).cores == 2


@pytest.mark.root
def test_root_only_attributes_are_unknown_to_others(run_dir: Path) -> None:
    """An attribute that only root may read leaves the fact unknown, or to be counted, and is no problem."""
    run_dir.chmod(0o755)
    tree = Tree(run_dir)
    for index, more in enumerate(({}, {"neuron_core0/x": "", "neuron_core1/x": ""})):
        directory = tree.plug(f"neuron{index}", VENDOR | more, minor=index)
        (directory / "core_count").chmod(0o400)
        (directory / "info/serial_number").chmod(0o400)
    seen = ast.literal_eval(as_nobody(READ, run_dir))
    assert seen == {0: (None, "unknown", None, None), 1: (2, "sysfs", None, None)}
    assert tree.read()[0].cores == 8


@pytest.mark.parametrize(
    ("text", "connected"),
    [
        ("12, 3, 4, 1\n", (1, 3, 4, 12)),
        ("12,3,4,1", (1, 3, 4, 12)),
        ("0\n", (0,)),
        ("1, 1\n", (1,)),
        ("\n", ()),
        ("", ()),
        ("none\n", ()),
        ("1; 2\n", ()),
        ("-1\n", ()),
        ("1, ", ()),
        ("1, 200\n", ()),
    ],
)
def test_connected_devices(tree: Tree, text: str, connected: tuple[int, ...]) -> None:
    """Neighbours are read in ascending order; empty or odd text leaves them unknown and is no problem."""
    chip = tree.only({"connected_devices": text})
    assert chip.connected == connected
    assert chip.connected_from == ("sysfs" if connected else "unknown")
    assert chip.problem is None


@pytest.mark.parametrize(
    ("text", "serial"), [("0123456789abcdef\n", "0123456789abcdef"), ("\n", None), ("", None), (None, None)]
)
def test_serial_number(tree: Tree, text: str | None, serial: str | None) -> None:
    """A serial number is read where there is one; Inferentia chips have none."""
    assert tree.only({} if text is None else {"info/serial_number": text}).serial == serial


@pytest.mark.parametrize("folder", ["", "info/", "info/architecture/", "a/b/", "a/b/c/"])
def test_moved_attributes_are_found(tree: Tree, folder: str) -> None:
    """Attributes are found by name where a newer driver may have moved them, up to three folders deep."""
    chip = tree.only({folder + path.rpartition("/")[2]: text for path, text in VENDOR.items()})
    assert (chip.cores, chip.connected, chip.problem) == (8, (1, 3, 4, 12), None)
    assert (chip.serial, chip.device_name) == ("0123456789abcdef", "Trainium2")


@pytest.mark.parametrize("folder", ["power", "subsystem", "stats", "neuron_coreX", "a/b/c/d"])
def test_attributes_of_other_things_are_not_taken(tree: Tree, folder: str) -> None:
    """A file of the same name that belongs to something else, or is too deep, is not the chip's."""
    assert tree.only({f"{folder}/core_count": "4"}).cores is None


def test_the_old_place_comes_first(tree: Tree) -> None:
    """An attribute at its old place wins over one of the same name elsewhere."""
    assert tree.only({"core_count": "8", "a/core_count": "2"}).cores == 8


def test_a_stripped_tree_is_enough(tree: Tree) -> None:
    """With nothing but what the kernel's core makes, a chip is there and everything else is unknown."""
    assert tree.only({}) == Chip(0, str(tree.dev / "neuron0"), MAJOR, 0)


def test_symlink_loops_do_no_harm(tree: Tree) -> None:
    """Links that lead back, or to themselves, or out of the directory, are not followed while searching."""
    directory = tree.plug("neuron0")
    elsewhere = tree.root / "elsewhere"
    tree.write(elsewhere, {"core_count": "4", "serial_number": "stolen"})
    (directory / "here").symlink_to(".")
    (directory / "up").symlink_to("..")
    (directory / "out").symlink_to(elsewhere)
    (directory / "core_count").symlink_to("core_count")
    (directory / "info").mkdir()
    (directory / "info/back").symlink_to("../..")
    chip = tree.read()[0]
    assert (chip.cores, chip.serial, chip.problem) == (None, None, None)


def test_text_that_is_no_text_does_no_harm(tree: Tree) -> None:
    """Bytes that are no UTF-8 make an odd core_count and unknown neighbours, not an error."""
    directory = tree.plug("neuron0")
    for name in ("core_count", "connected_devices"):
        (directory / name).write_bytes(b"\xff\xfe")
    chip = tree.read()[0]
    assert chip.problem is not None
    assert chip.problem.startswith("core_count reads")
    assert chip.connected == ()


# -- nodes ----------------------------------------------------------------------------------------------------------


def replace_with_nothing(node: Path) -> None:
    """Take the node away."""


def replace_with_file(node: Path) -> None:
    """Put a regular file there."""
    node.touch()


def replace_with_directory(node: Path) -> None:
    """Put a directory there, as Docker does for a volume whose source is missing."""
    node.mkdir()


def replace_with_block(node: Path) -> None:
    """Put a block device of the same numbers there."""
    os.mknod(node, stat.S_IFBLK | 0o600, os.makedev(MAJOR, 1))


def replace_with_other_numbers(node: Path) -> None:
    """Put the node of an earlier major there."""
    os.mknod(node, stat.S_IFCHR | 0o600, os.makedev(MAJOR - 1, 1))


def replace_with_symlink(node: Path) -> None:
    """Put a link to a device there."""
    node.symlink_to("neuron0")


@pytest.mark.root
@pytest.mark.parametrize(
    ("replace", "words"),
    [
        (replace_with_nothing, "no node {node}"),
        (replace_with_file, "{node} is not a character device"),
        (replace_with_directory, "{node} is not a character device"),
        (replace_with_block, "{node} is not a character device"),
        (replace_with_symlink, "{node} is not a character device"),
        (replace_with_other_numbers, "{node} is device 238:1, the kernel says 239:1"),
    ],
)
def test_a_wrong_node_is_a_problem_of_that_chip(tree: Tree, replace: Callable[[Path], None], words: str) -> None:
    """A chip whose node is missing or is something else has a problem that says so; its neighbours have none."""
    for index in range(3):
        name = f"neuron{index}"
        tree.plug(name, VENDOR, minor=index)
        (tree.dev / name).unlink()
        os.mknod(tree.dev / name, stat.S_IFCHR | 0o600, os.makedev(MAJOR, index))
    node = tree.dev / "neuron1"
    node.unlink()
    replace(node)
    problems = {index: chip.problem for index, chip in tree.read(stand_ins=False).items()}
    assert problems == {0: None, 1: words.format(node=node), 2: None}


def test_a_stand_in_is_no_problem_but_none_is(tree: Tree) -> None:
    """On a simulated host without root a regular file will do, and a missing one is still said."""
    for index in range(2):
        tree.plug(f"neuron{index}", VENDOR, minor=index)
    (tree.dev / "neuron1").unlink()
    chips = tree.read()
    assert (chips[0].problem, chips[1].problem) == (None, f"no node {tree.dev / 'neuron1'}")


def test_nodes_are_never_opened(tree: Tree) -> None:
    """Reading a chip does not open its node: a pipe that nobody writes to would hold up an open."""
    tree.plug("neuron0", VENDOR)
    (tree.dev / "neuron0").unlink()
    os.mkfifo(tree.dev / "neuron0")
    assert tree.read()[0].cores == 8


def test_age_is_that_of_the_node(tree: Tree) -> None:
    """The age of a chip is when its node was made, and the beginning of time if there is no node."""
    tree.plug("neuron0")
    chip = tree.read()[0]
    assert tree.sysfs().age(chip) == (tree.dev / "neuron0").stat().st_ctime
    (tree.dev / "neuron0").unlink()
    assert tree.sysfs().age(chip) == 0


# -- the host -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"), [("trn2.48xlarge\n", "trn2.48xlarge"), ("c5.large", "c5.large"), ("\n", ""), (None, "")]
)
def test_product_name(tree: Tree, text: str | None, name: str) -> None:
    """The instance type is what the DMI tables say, or empty."""
    if text is not None:
        tree.write(tree.root / "sys/devices/virtual/dmi/id", {"product_name": text})
    assert tree.sysfs().product_name() == name


@pytest.mark.parametrize(
    ("text", "cores"), [("1\n", 1), ("2", 2), ("3\n", None), ("0", None), ("two", None), ("", None), (None, None)]
)
def test_logical_cores(tree: Tree, text: str | None, cores: int | None) -> None:
    """The host's logical core configuration is 1 or 2 where an admin has set it, and unknown otherwise."""
    if text is not None:
        tree.write(tree.root / "opt/aws/neuron", {"logical_nc_config": text})
    assert tree.sysfs().logical_cores() == cores


def test_why_empty_without_the_module(tree: Tree) -> None:
    """Without the module the reason names the module and how to load it."""
    assert "not loaded" in tree.sysfs().why_empty()
    assert "modprobe neuron" in tree.sysfs().why_empty()


def test_why_empty_with_the_module(tree: Tree) -> None:
    """With the module but no chips the reason points to the kernel's log."""
    tree.write(tree.root / "sys/module/neuron", {"version": "2.30.2.0\n"})
    assert "is loaded" in tree.sysfs().why_empty()
    assert "dmesg" in tree.sysfs().why_empty()
