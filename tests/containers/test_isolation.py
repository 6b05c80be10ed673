"""A container can use the chips of its lease, and no others."""

import os
import re
import stat
from pathlib import Path

import pytest

from tests.containers.support import IMAGE, STUBBORN, held, inspect, launch, wait_for_output, wait_until_free
from tests.harness import Daemon, PrivateEngine, eventually

pytestmark = pytest.mark.docker

DENIED = "Operation not permitted"
REACHED = {"open", "No such device or address"}
"""What a try to open says where the cgroup allows it; the second without spare terminals to stand in for chips."""
PROBE = """
try() { (: <> "$1") 2>/tmp/why && echo "$2 $3 open" || echo "$2 $3 $(cat /tmp/why)"; }
while [ $# -gt 0 ]; do
  chip=$1 major=$2 minor=$3; shift 3
  if [ -e /dev/neuron$chip ]; then try /dev/neuron$chip $chip node; else echo "$chip node absent"; fi
  mknod /tmp/made$chip c $major $minor && try /tmp/made$chip $chip made
done
rm -f /tmp/made*
"""
"""Says for each chip (number, major, minor) whether its node and one made with its numbers can be opened."""
LINE = re.compile(r"(\d+) (node|made) (.*)")


@pytest.fixture
def probe(docker_daemon: Daemon, engine: PrivateEngine) -> list[str]:
    """Give the command that probes every chip, in an image that has a /tmp."""
    container = engine.docker("create", IMAGE, "sh", "-c", "mkdir /tmp").stdout.strip()
    engine.docker("start", "--attach", container)
    engine.docker("commit", container, "neurond-probe:1")
    engine.docker("rm", container)
    chips = docker_daemon.call("ListChips")["chips"]
    numbers = [f"{chip['neuron_device']} {chip['device'].replace(':', ' ')}" for chip in chips]
    return ["sh", "-c", PROBE, "probe", *" ".join(numbers).split()]


def reach(output: str) -> tuple[set[int], set[int]]:
    """Read the output of the probe: the chips whose node can be opened, those that can be opened by their numbers.

    All other nodes must be absent, all other numbers must be denied by the device cgroup.
    """
    found: dict[str, dict[int, str]] = {"node": {}, "made": {}}
    for chip, kind, said in LINE.findall(output):
        found[kind][int(chip)] = said.rpartition(": ")[2]
    assert found["node"].keys() == found["made"].keys() == set(range(16)), output
    nodes = {chip for chip, said in found["node"].items() if said in REACHED}
    made = {chip for chip, said in found["made"].items() if said in REACHED}
    assert {said for chip, said in found["node"].items() if chip not in nodes} <= {"absent"}, output
    assert {said for chip, said in found["made"].items() if chip not in made} <= {DENIED}, output
    return nodes, made


def test_containers_reach_their_own_chips_only(docker_daemon: Daemon, engine: PrivateEngine, probe: list[str]) -> None:
    """Of two containers at the same time, each opens its own chips, and not the other's even by their numbers."""
    command = ["neurond-probe:1", "sh", "-c", f"{PROBE}\necho probed; exec sleep 600", *probe[3:]]
    first = launch(docker_daemon, "-n", "1", *command)
    second = launch(docker_daemon, "-n", "4", *command)
    chips = {lease["container_id"]: set(lease["chips"]) for lease in docker_daemon.leases()}
    assert len(chips[first]) == 1
    assert len(chips[second]) == 4
    assert not chips[first] & chips[second]
    for container in (first, second):
        output = wait_for_output(engine, container, "probed")
        assert reach(output) == (chips[container], chips[container])


def test_exec_is_restricted_alike(docker_daemon: Daemon, engine: PrivateEngine, probe: list[str]) -> None:
    """What is started later with docker exec reaches the same chips as the container."""
    container = launch(docker_daemon, "--chips", "4-7", "neurond-probe:1", "sleep", "600")
    assert reach(engine.docker("exec", container, *probe).stdout) == ({4, 5, 6, 7}, {4, 5, 6, 7})


def test_mounted_node_is_no_way_in(docker_daemon: Daemon, run_dir: Path) -> None:
    """The node of a chip of somebody else's can't be mounted as a volume, and a copy of it that is can't be opened."""
    node = Path(docker_daemon.call("ListChips")["chips"][9]["node"])
    refused = docker_daemon.cli("container", "run", "--chips", "0", "-v", f"{node}:/dev/neuron9", IMAGE, "true")
    assert refused.returncode == 2
    assert f"mounting {node} gives the container the nodes of all chips" in refused.stderr
    os.mknod(run_dir / "copy", 0o666 | stat.S_IFCHR, node.stat().st_rdev)
    mounted = ["-v", f"{run_dir}/copy:/dev/neuron9"]
    done = docker_daemon.cli("container", "run", "--chips", "0", *mounted, IMAGE, "sh", "-c", ": <> /dev/neuron9")
    assert done.returncode != 0
    assert DENIED in done.stderr


def test_devices_are_read_write_without_mknod(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """A container gets the nodes of its chips under their own names, to read and write but not to make."""
    container = launch(docker_daemon, "--chips", "4-7", *STUBBORN)
    nodes = {chip["neuron_device"]: chip["node"] for chip in docker_daemon.call("ListChips")["chips"]}
    given = inspect(engine, container)["HostConfig"]
    assert given["DeviceRequests"] or given["Devices"] == [
        {"PathOnHost": nodes[chip], "PathInContainer": f"/dev/neuron{chip}", "CgroupPermissions": "rw"}
        for chip in (4, 5, 6, 7)
    ]


@pytest.mark.parametrize("end", [("stop", "--time", "0"), ("kill",), ("rm", "--force")], ids=lambda end: end[0])
def test_chips_are_free_after_the_end(docker_daemon: Daemon, engine: PrivateEngine, end: tuple[str, ...]) -> None:
    """Chips that a container has open to its very end are free soon after it, and can be leased again."""
    hold = "sleep 600 3<>/dev/neuron0 & sleep 600 3<>/dev/neuron15 & sleep 0.1; echo open; wait"
    command = [IMAGE, "sh", "-c", hold]
    container = launch(docker_daemon, "--all", *command)
    wait_for_output(engine, container, "open")
    assert held(docker_daemon) == set(range(16))
    engine.docker(*end, container)
    wait_until_free(docker_daemon)
    assert docker_daemon.cli("container", "run", "--all", "--no-wait", IMAGE, "true").returncode == 0


def test_too_much_is_refused_with_the_holders(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """A container that asks for more than is free is refused with 75, and is told who holds the rest."""
    for name, chips in (("first", "0-3"), ("second", "4-7")):
        launch(docker_daemon, "--chips", chips, "--name", name, *STUBBORN)
    leases = {lease["name"]: lease["lease"] for lease in docker_daemon.leases()}
    done = docker_daemon.cli("container", "run", "-n", "16", "--no-wait", "--name", "third", *STUBBORN)
    assert done.returncode == 75
    assert done.stdout == ""
    assert "16 chips asked, 8 free" in done.stderr
    assert f"0-3 by root (lease {leases['first']}, first, since" in done.stderr
    assert f"4-7 by root (lease {leases['second']}, second, since" in done.stderr
    assert engine.docker("inspect", "third", check=False).returncode != 0
    assert {lease["name"] for lease in docker_daemon.leases()} == {"first", "second"}


def test_containers_and_processes_share_one_ledger(docker_daemon: Daemon, engine: PrivateEngine) -> None:
    """A process and a container never hold the same chip, and what one gives back the other can have."""
    process = docker_daemon.spawn("run", "-n", "8", "--", "sleep", "600")
    try:
        eventually(docker_daemon.leases)
        container = launch(docker_daemon, "-n", "8", *STUBBORN)
        by_binding = {lease["binding"]: set(lease["chips"]) for lease in docker_daemon.leases()}
        assert by_binding["process"] | by_binding["container"] == set(range(16))
        assert docker_daemon.cli("container", "run", "-n", "1", "--no-wait", IMAGE, "true").returncode == 75
        assert docker_daemon.cli("run", "-n", "1", "--no-wait", "--", "true").returncode == 75
    finally:
        process.kill()
        process.communicate()
    eventually(lambda: held(docker_daemon) == by_binding["container"])
    assert docker_daemon.cli("container", "run", "-n", "8", "--no-wait", IMAGE, "true").returncode == 0
    engine.docker("kill", container)
    wait_until_free(docker_daemon)
