"""`run --enforce`: the kernel keeps the command off all chips but its own.

A host with systemd is played: /run/systemd/system is there, and a systemd-run that understands exactly what neurond
gives it does with the kernel's devices controller what systemd would.
"""

import json
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from neurond.client import NeurondError
from tests.daemon.support import NEURON, NOBODY, as_nobody, ending, leases_nothing, process, with_group_neuron
from tests.harness import NEUROND, PATIENCE, Daemon, eventually

pytestmark = pytest.mark.root

SYSTEMD_RUN = """#!/bin/sh
set -eu
[ "$1 $2 $3" = "--scope --quiet --property=DevicePolicy=closed" ]
shift 3
scope=$(mktemp -d "$NEUROND_TEST_CGROUPS/neurond-test-XXXXXX")
echo a > "$scope/devices.deny"
for device in 1:3 1:5 1:7 1:8 1:9 5:0 5:2 136:*; do echo "c $device rwm" > "$scope/devices.allow"; done
while [ "$1" != -- ]; do
  pair=${1#--property=DeviceAllow=}
  [ "$pair" != "$1" ]
  node=${pair% *}
  [ -c "$node" ]
  echo "c $(printf %d:%d $(stat -c "0x%t 0x%T" "$node")) ${pair##* }" > "$scope/devices.allow"
  shift
done
shift
echo $$ > "$scope/cgroup.procs"
exec "$@"
"""
"""Stands in for systemd-run: a cgroup that is closed but for standard devices and those allowed; then the command."""

WITH_SYSTEMD = """
mount -t tmpfs none /run && mkdir -p /run/systemd/system || exit 99
if [ ! -e "$NEUROND_TEST_CGROUPS/devices.deny" ]; then
  mount -t cgroup -o devices none "$NEUROND_TEST_CGROUPS" || exit 99
fi
exec "$@"
"""
WITHOUT_SYSTEMD = 'mount -t tmpfs none /run || exit 99; exec "$@"'

TRY = 'for n in $(seq 0 15); do (: <>"$0/neuron$n") 2>&1 | sed "s/^.*: //; s/^/$n /"; done; echo tried'
REACHED = "No such device or address"
"""What opening says besides nothing where the filter allows it: there may be no virtual terminals left to stand in."""


class Host:
    """Runs the command line as on a host with systemd, or without."""

    def __init__(self, daemon: Daemon, directory: Path) -> None:
        self.daemon = daemon
        self.nodes = daemon.directory / "sim/dev"
        mounted = Path("/sys/fs/cgroup/devices")
        self.cgroups = mounted if (mounted / "devices.deny").exists() else directory / "cgroups"
        self.cgroups.mkdir(exist_ok=True)
        stand_in = directory / "bin/systemd-run"
        stand_in.parent.mkdir()
        stand_in.write_text(SYSTEMD_RUN)
        stand_in.chmod(0o755)
        self.env = {
            "NEUROND_TEST_CGROUPS": str(self.cgroups),
            "PATH": f"{stand_in.parent}:{os.environ['PATH']}",
            "NEUROND_HOST": daemon.address,
        }

    def start(self, *arguments: str, systemd: bool = True) -> "subprocess.Popen[str]":
        """Start a command of neurond's."""
        script = WITH_SYSTEMD if systemd else WITHOUT_SYSTEMD
        command = ["unshare", "--mount", "sh", "-c", script, "sh", *NEUROND, *arguments]
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env=os.environ | self.env, text=True, **streams)  # type: ignore[call-overload, no-any-return]

    def run(self, *arguments: str, systemd: bool = True) -> tuple[int, str, str]:
        """Run a command of neurond's to its end; return exit code, stdout and stderr."""
        with ending(self.start(*arguments, systemd=systemd)) as command:
            out, err = command.communicate(timeout=PATIENCE)
        return command.returncode, out, err


@pytest.fixture
def host(daemon: Daemon, run_dir: Path) -> Iterator[Host]:
    """Give a host with the shared daemon; the cgroups that it made are removed."""
    host = Host(daemon, run_dir)
    before = set(host.cgroups.glob("neurond-test-*"))
    yield host
    for scope in set(host.cgroups.glob("neurond-test-*")) - before:
        eventually(lambda scope=scope: not (scope / "cgroup.procs").read_text())  # type: ignore[misc]
        scope.rmdir()


def test_the_kernel_denies_all_other_chips(host: Host) -> None:
    """The command opens exactly its chips: the others are denied with EPERM whatever the node is called."""
    other = host.nodes.parent / "elsewhere"
    os.mknod(other, 0o666 | stat.S_IFCHR, (host.nodes / "neuron9").stat().st_rdev)
    script = f'{TRY}; (: <>"{other}") 2>&1 | sed "s/^.*: /elsewhere /"'
    code, out, err = host.run("run", "--chips", "4-7", "--enforce", "--", "sh", "-c", script, str(host.nodes))
    other.unlink()
    assert (code, err) == (0, ""), out
    denied = dict(line.split(" ", 1) for line in out.splitlines() if " " in line and REACHED not in line)
    assert denied.pop("elsewhere") == "Operation not permitted"
    assert denied == {str(chip): "Operation not permitted" for chip in range(16) if chip not in {4, 5, 6, 7}}


def test_its_children_are_confined_and_standard_devices_open(host: Host) -> None:
    """What the command starts is confined as it is, and /dev/null and its like can be used."""
    script = f"echo zero > /dev/null; head -c 3 /dev/zero | wc -c; setsid sh -c '{TRY}' {host.nodes}"
    code, out, _ = host.run("run", "--chips", "0", "--enforce", "--", "sh", "-c", script)
    assert code == 0
    assert out.splitlines()[0] == "3"
    assert out.count("Operation not permitted") == 15


def test_the_lease_stays_with_the_process(host: Host) -> None:
    """The lease is bound to the process that became the command, says that its level is cgroup, and ends with it."""
    with ending(host.start("run", "-n", "4", "--enforce", "--", "sh", "-c", "echo $$; read line; exit 7")) as command:
        assert command.stdout is not None
        pid = int(command.stdout.readline())
        assert pid == command.pid
        (lease,) = host.daemon.leases()
        assert (lease["pid"], lease["command"], lease["chips"]) == (
            pid,
            "sh -c echo $$; read line; exit 7",
            [0, 1, 2, 3],
        )
        assert lease["enforcement"] == "cgroup"
        assert host.daemon.cli("ps", "-o", "level").stdout.split() == ["LEVEL", "cgroup"]
        shown = json.loads(host.daemon.cli("ls", "0", "-j").stdout)
        assert [chip["enforcement"] for chip in shown] == ["cgroup"]
        assert "cgroup" in host.daemon.cli("ls", "0").stdout
        command.communicate("\n", timeout=PATIENCE)
        assert command.returncode == 7
    eventually(host.daemon.all_free)


def test_two_confined_commands_are_apart(host: Host) -> None:
    """Of two confined commands at the same time, neither opens a chip of the other's."""
    with ending(host.start("run", "--chips", "0", "--enforce", "--", "cat")) as first:
        eventually(host.daemon.leases)
        _, out, _ = host.run("run", "--chips", "1", "--enforce", "--", "sh", "-c", TRY, str(host.nodes))
        assert {line.split()[0] for line in out.splitlines() if "not permitted" in line} == {
            str(chip) for chip in range(16) if chip != 1
        }
        first.communicate("", timeout=PATIENCE)


def test_without_systemd_nothing_is_leased(host: Host) -> None:
    """Where systemd is not the init, --enforce is refused with 125 before any chip is leased or waited for."""
    with leases_nothing(host.daemon):
        code, out, err = host.run("run", "-n", "1", "--enforce", "--", "true", systemd=False)
    assert (code, out) == (125, "")
    assert err == "neurond: --enforce needs systemd as the init of this host, which it is not\n"
    with process() as holder:
        host.daemon.call("Acquire", all=True, pid=holder.pid)
        assert host.run("run", "-n", "1", "--enforce", "--", "true", systemd=False)[0] == 125


def test_only_root_can_confine(run_dir: Path) -> None:
    """Another user is refused with 77 by the command, and by the daemon where the command does not refuse it."""
    with with_group_neuron(run_dir) as daemon:
        daemon.socket.chmod(0o666)
        run_dir.chmod(0o755)
        with leases_nothing(daemon):
            refused = as_nobody(daemon, "run", "-n", "1", "--enforce", "--", "true", groups=[NEURON])
        assert refused.returncode == 77
        assert refused.stderr == "neurond: --enforce sets up a device filter, which only root may\n"
        os.setegid(NEURON)
        os.seteuid(NOBODY)
        try:
            client = daemon.client()
        finally:
            os.seteuid(0)
            os.setegid(0)
        with leases_nothing(daemon), client, pytest.raises(NeurondError, match="only root can set up") as not_allowed:
            client.call("Acquire", count=1, enforce=True)
        assert not_allowed.value.kind == "NotAllowed"


def test_a_command_that_can_not_be_confined_is_not_run(host: Host, tmp_path: Path) -> None:
    """If the filter can't be set up the command is not started, and its lease is over."""
    ran = tmp_path / "ran"
    host.env["NEUROND_TEST_CGROUPS"] = "/no/such/directory"
    code, _, err = host.run("run", "-n", "1", "--enforce", "--", "touch", str(ran))
    assert code != 0
    assert "/no/such/directory" in err
    assert not ran.exists()
    eventually(host.daemon.all_free)
