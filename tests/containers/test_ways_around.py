"""Ways around the lease: each is refused by its name before anything is leased, whichever verb starts a container."""

import os
import shlex
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from neurond.host.docker import Engine
from tests.containers.support import IMAGE, inspect, wait_until_free
from tests.harness import Daemon, PrivateEngine, short_directory

pytestmark = pytest.mark.docker

CONTAINER_RUN, DOCKER_RUN = ("container", "run"), ("docker", "run")
VERBS = [pytest.param(CONTAINER_RUN, id="container run"), pytest.param(DOCKER_RUN, id="docker run")]
HOOK, CORES, COUNT = "AWS_NEURON_VISIBLE_DEVICES", "NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES"


class Place(NamedTuple):
    """A daemon and its engine, and what the words of the tests stand for."""

    daemon: Daemon
    engine: PrivateEngine
    door: Engine
    words: dict[str, str]

    def run(self, verb: tuple[str, ...], line: str, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run a verb with the options of a line, in which {node}, {link} and so on are filled in, and this command."""
        options = [word.format(**self.words) for word in shlex.split(line)]
        env = {"DOCKER_HOST": self.engine.url, "PATH": self.engine.programs, HOOK: "ALL", COUNT: "999"}
        return self.daemon.cli(*verb, *options, *command, env=env)

    def grants(self) -> int:
        """Return how many leases were ever granted."""
        return len(self.daemon.logged("lease.granted"))


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """Give a directory for files that options name."""
    with short_directory() as directory:
        yield directory


@pytest.fixture
def place(module_daemon: Daemon, engine: PrivateEngine, directory: Path) -> Iterator[Place]:
    """Give a daemon with ways to its chips: links to a node and to the directory of all, and a copy of a node."""
    nodes = {chip["neuron_device"]: Path(chip["node"]) for chip in module_daemon.call("ListChips")["chips"]}
    number = nodes[3].stat().st_rdev
    (directory / "link").symlink_to(nodes[3])
    (directory / "to-dev").symlink_to("/dev")
    os.mknod(directory / "copy", 0o600 | stat.S_IFCHR, number)
    (directory / "hook").write_text(f"# a comment\n{HOOK}=ALL\n")
    (directory / "own").write_text(f"{HOOK}\n")
    (directory / "cores").write_text(f"{CORES}=0-31\n")
    (directory / "count").write_text(f"{COUNT}=9\n")
    (directory / "labels").write_text("a=b\nio.neurond.lease=other\n")
    words = {path.name: str(path) for path in directory.iterdir()}
    words |= {"node": str(nodes[3]), "nodes": str(nodes[3].parent), "image": IMAGE}
    words |= {"major": str(os.major(number)), "minor": str(os.minor(number)), "other": str(os.major(number) + 1)}
    door = Engine(engine.url)  # asking it is ten times as fast as the docker command
    yield Place(module_daemon, engine, door, words)
    for container in door.containers():
        door.remove(container.id)
    wait_until_free(module_daemon)
    for path in directory.iterdir():
        path.unlink()


WAYS = {
    "privileged": ("--privileged", "--privileged opens every chip of this host"),
    "/dev": ("-v /dev:/dev", "mounting /dev gives the container the nodes of all chips"),
    "/dev, attached": ("-v/dev:/host-dev:ro", "mounting /dev gives"),
    "/dev, long": ("--volume=/dev/:/host-dev", "mounting /dev/ gives"),
    "/dev by a detour": ("-v /usr/../dev:/d", "mounting /usr/../dev gives"),
    "/dev, two slashes": ("-v //dev:/d", "mounting //dev gives"),
    "/dev by a link": ("-v {to-dev}:/d", "to-dev gives"),
    "root": ("-v /:/host", "mounting / gives"),
    "directory of the nodes": ("-v {nodes}:/d", "gives the container the nodes of all chips"),
    "mount": ("--mount type=bind,source=/dev,target=/d", "mounting /dev gives"),
    "mount, short": ("--mount type=bind,src=/dev,dst=/d,readonly", "mounting /dev gives"),
    "mount, another order": ("--mount target=/d,source=/,type=bind", "mounting / gives"),
    "mount after a good one": ("--mount type=bind,src=/etc,dst=/e --mount type=bind,src=/dev,dst=/d", "mounting /dev"),
    "device": ("--device {node}", "gives chip 3 without a lease"),
    "device by a link": ("--device {link}:/dev/tty1", "gives chip 3 without a lease"),
    "device by a copy": ("--device {copy}:/dev/tty1:r", "gives chip 3 without a lease"),
    "devices in a directory": ("--device {nodes}", "gives chip 0 without a lease"),
    "devices in a directory, renamed": ("--device {nodes}:/dev/x:rw", "gives chip 0 without a lease"),
    "device of a directory above": ("--device {nodes}/..", "gives chip 0 without a lease"),
    "pattern": ("--device '/dev/neuron*'", "--device /dev/neuron*"),
    "range": ("--device /dev/neuron0-3", "--device /dev/neuron0-3"),
    "all devices": ("--device ALL", "--device ALL"),
    "runtime": ("--runtime neuron", "--runtime"),
    "runtime, attached": ("--runtime=neuron", "--runtime"),
    "gpus": ("--gpus all", "--gpus"),
    "gpus, attached": ("--gpus=all", "--gpus"),
    "hook": ("-e AWS_NEURON_VISIBLE_DEVICES=ALL", f"{HOOK}=ALL"),
    "hook, a chip": ("--env=AWS_NEURON_VISIBLE_DEVICES=0", f"{HOOK}=0"),
    "hook, one's own": ("-e AWS_NEURON_VISIBLE_DEVICES", f"{HOOK}=ALL"),
    "hook in a file": ("--env-file {hook}", f"{HOOK}=ALL"),
    "hook in a file, one's own": ("--env-file {own}", f"{HOOK}=ALL"),
    "cores outside": ("-e NEURON_RT_VISIBLE_CORES=0-31", "names 32 cores: the lease will have 2"),
    "cores of another chip": ("--chips 2 -e NEURON_RT_VISIBLE_CORES=8", "names cores outside the lease, which has 4-5"),
    "cores, garbage": ("-e NEURON_RT_VISIBLE_CORES=nc4", f"{CORES}='nc4' is not a core list"),
    "cores, reversed": ("-e NEURON_RT_VISIBLE_CORES=5-4", f"{CORES}='5-4' does not rise"),
    "cores, a blank": ("-e 'NEURON_RT_VISIBLE_CORES=4, 5'", f"{CORES}='4, 5' is not a core list"),
    "cores, empty": ("-e NEURON_RT_VISIBLE_CORES=", f"{CORES}='' is not a core list"),
    "cores in a file": ("--env-file {cores}", "names 32 cores: the lease will have 2"),
    "too many cores": ("-e NEURON_RT_NUM_CORES=3", f"{COUNT}=3: the lease will have 2 cores"),
    "too many cores, one's own": ("-e NEURON_RT_NUM_CORES", f"{COUNT}=999: the lease will have 2 cores"),
    "number of cores, garbage": ("-e NEURON_RT_NUM_CORES=-1", f"{COUNT}=-1"),
    "too many cores in a file": ("--env-file {count}", f"{COUNT}=9: the lease will have 2 cores"),
    "label": ("--label io.neurond.x", "io.neurond.x: "),
    "label of another lease": ("-l io.neurond.lease=other", "io.neurond.lease=other: "),
    "cgroup rule": ("--device-cgroup-rule 'c {major}:* rwm'", "--device-cgroup-rule"),
}
"""By what it is: options that would get past the lease, and what is said of them."""

WAYS_OF_DOCKER = {
    "rule for one chip": ("--device-cgroup-rule 'c {major}:{minor} r'", "opens chips beyond the lease"),
    "rule for all": ("--device-cgroup-rule 'a *:* rwm'", "opens chips beyond the lease"),
    "rule for all majors": ("--device-cgroup-rule='c *:{minor} w'", "opens chips beyond the lease"),
    "rule after a good one": (
        "--device-cgroup-rule 'c {other}:* rwm' --device-cgroup-rule 'c {major}:* rw'",
        "opens chips beyond the lease",
    ),
    "rule with zeros before": ("--device-cgroup-rule 'c 0{major}:* rwm'", "opens chips beyond the lease"),
    "device by the name of a lease": ("--device neurond.io/lease=ab12-1", "gives the chips of that lease"),
    "mount, capitals": ("--mount type=bind,Source=/dev,target=/d", "mounting /dev gives"),
    "privileged, spelled out": ("--privileged=true", "--privileged"),
    "privileged in another word": ("-it --privileged=1", "--privileged"),
    "mount, quoted": ("--mount 'type=bind,\"source=/dev\",target=/d'", "mounting /dev gives"),
    "mount of a made volume": (
        "--mount type=volume,target=/d,volume-opt=type=none,volume-opt=o=bind,volume-opt=device=/dev",
        "mounting /dev gives",
    ),
    "file of labels": ("--label-file {labels}", "label io.neurond.lease=other"),
    "variable of the lease": ("-e NEUROND_LEASE=other", "-e NEUROND_LEASE"),
    "variable of the chips": ("-e NEUROND_CHIPS=0-15", "-e NEUROND_CHIPS"),
}
"""What only `docker run` has."""


def chips(line: str) -> str:
    """Return an option that asks for one chip, if the line has none itself."""
    return line if "--chips" in line else f"-n 1 {line}"


def check_refused(place: Place, verb: tuple[str, ...], line: str, said: str) -> None:
    """Check that a command line is refused with these words: as wrong usage, with no lease ever and no container."""
    before = place.grants()
    done = place.run(verb, line, IMAGE, "true")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert said in done.stderr
    assert place.grants() == before
    assert place.daemon.all_free()
    assert not place.door.containers()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("verb", VERBS)
def test_way_around_is_refused(place: Place, verb: tuple[str, ...], way: str) -> None:
    """What would give a container more than its lease is named and refused with 2; nothing is leased, nothing made."""
    line, said = WAYS[way]
    check_refused(place, verb, chips(line), said)


@pytest.mark.parametrize("way", WAYS_OF_DOCKER)
def test_way_around_of_docker_is_refused(place: Place, way: str) -> None:
    """So is what only docker's own command line has."""
    line, said = WAYS_OF_DOCKER[way]
    check_refused(place, DOCKER_RUN, chips(line), said)


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("/dev/neuron0 /dev/neuron1", "/dev/neuron1 stands where the image should"),
        ("/dev/neuron0:/dev/neuron0 --device {node}", "gives chip 3 without a lease"),
    ],
)
def test_a_chip_beside_the_one_asked_for_is_refused(
    place: Place, verb: tuple[str, ...], device: str, said: str
) -> None:
    """What a shell makes of /dev/neuron*, and another chip under another name."""
    check_refused(place, verb, f"--device {device}", said)


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        (f"{HOOK}=ALL", f"sets {HOOK}=ALL: it asks AWS's OCI hook for chips behind neurond's back"),
        (f"{CORES}=0-31", f"sets {CORES}=0-31 names 32 cores: the lease will have 2"),
        (f"{CORES}=5-4", f"sets {CORES}='5-4' does not rise"),
        (f"{COUNT}=4", f"sets {COUNT}=4: the lease will have 2 cores"),
    ],
)
def test_variable_of_the_image_is_refused(place: Place, variable: str, said: str) -> None:
    """What an image sets counts as if it were given, and is said to be the image's; what is given counts more."""
    image = imported(place.engine, variable)
    name, _, _ = variable.partition("=")
    for verb in CONTAINER_RUN, DOCKER_RUN:
        before = place.grants()
        done = place.run(verb, "-n 1", image, "true")
        assert done.returncode == 2
        assert f"image {image} {said}" in done.stderr
        assert place.grants() == before
        assert not place.door.containers()
        harmless = "" if name == HOOK else "1"
        done = place.run(verb, f"-n 1 --rm --network none -e {name}={harmless}", image, "env")
        assert done.returncode == 0, done.stderr
        assert f"{name}={harmless}\n" in done.stdout


def imported(engine: PrivateEngine, variable: str) -> str:
    """Make an image that sets a variable, and return its name."""
    made = engine.docker("create", IMAGE, "true").stdout.strip()
    engine.docker("commit", "--change", f"ENV {variable}", made, "neurond-env:1")
    engine.docker("rm", made)
    return "neurond-env:1"


HARMLESS = [
    "--pid host",
    "--cap-add MKNOD",
    "--cap-add SYS_PTRACE",
    "--ipc host",
    "-v /usr:/dev/shmx",
    "-v /usr:/host/dev",
    "-v named:/dev/volume",
    "-v /dev/null:/dev/something",
    "-v /etc:/dev-etc:ro",
    "--mount type=tmpfs,target=/dev/x",
    "--mount type=bind,source=/etc,target=/dev/source=/dev",
    "--device /dev/null:/dev/neuron-null",
    "--security-opt no-new-privileges",
    "-e AWS_NEURON_VISIBLE_DEVICES=",
    "-e NEURON_RT_NUM_CORES=2",
    "-e NEURON_RT_VISIBLE_CORES=0",
    "-e NEURON_RT_VISIBLE_CORES=0,1",
    "--chips 2 -e NEURON_RT_VISIBLE_CORES=4-5",
    "--chips 2 -e NEURON_RT_VISIBLE_CORES=0-1",
    "--label io.neuron.x=1",
    "--label neurond=io.neurond.lease",
    "-e NOTE=AWS_NEURON_VISIBLE_DEVICES=ALL",
]
"""What looks like a way around the lease, and is none."""


@pytest.mark.parametrize("line", HARMLESS)
@pytest.mark.parametrize("verb", VERBS)
def test_harmless_look_alike_passes(place: Place, verb: tuple[str, ...], line: str) -> None:
    """What gives a container no chip is not refused, whatever it looks like; the container has its own chip only."""
    done = place.run(verb, f"--rm --network none {chips(line)}", IMAGE, "sh", "-c", "echo /dev/neuron[0-9]*")
    chip = "2" if "--chips" in line else "0"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"/dev/neuron{chip}\n", "")
    if "named:" in line:
        place.engine.docker("volume", "rm", "--force", "named")


@pytest.mark.parametrize(
    "line",
    ["--device-cgroup-rule 'c {other}:* rwm'", "--device-cgroup-rule 'c {major}:* m'", "--privileged=false"],
)
def test_harmless_look_alike_of_docker_passes(place: Place, line: str) -> None:
    """A rule for other devices, one that opens nothing, and a switch that is off."""
    done = place.run(DOCKER_RUN, f"-n 1 --rm --network none {line}", IMAGE, "true")
    assert (done.returncode, done.stderr) == (0, "")


# -- with all chips ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("line", ["-v /dev:/host-dev", "--mount type=bind,source=/,target=/host", "--device {node}"])
def test_all_chips_may_be_mounted(place: Place, verb: tuple[str, ...], line: str) -> None:
    """Who has leased every chip of the host may have all of /dev too."""
    done = place.run(verb, f"--all --rm --network none {line}", IMAGE, "true")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("verb", VERBS)
def test_all_chips_may_be_privileged(place: Place, verb: tuple[str, ...]) -> None:
    """With --all, --privileged reaches the engine; where that can't start it, its words are said and all is undone."""
    done = place.run(verb, "--all --name all --privileged --network none", IMAGE, "true")
    if done.returncode == 0:  # a kernel that lets it start
        assert inspect(place.engine, "all")["HostConfig"]["Privileged"]
        return
    assert done.returncode in {125, 126, 127}
    assert "opens every chip" not in done.stderr
    assert place.daemon.logged("lease.granted")[-1]["chips"] == list(range(16))
    if verb == CONTAINER_RUN:
        assert place.daemon.all_free()
        assert not place.door.containers()
