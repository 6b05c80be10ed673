"""What a lease is bound to: it ends when that does, not before, and its chips are free once nobody has them open."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from neurond.client import NeurondError
from tests.daemon.support import NEURON, NOBODY, NOGROUP, Raw, as_nobody, holding, node_of, process
from tests.daemon.support import with_group_neuron as grouped
from tests.harness import Daemon, eventually
from tests.host.support import MAP

Connect = Callable[[], Raw]

CHILD = """
import os, subprocess, sys
sys.stdin.readline()
child = subprocess.Popen(["sh", "-c", "echo open; read line"], stdout=subprocess.PIPE,
                         pass_fds=[os.open(sys.argv[1], os.O_RDWR | os.O_NOCTTY)])
child.stdout.readline()
print("open", flush=True)
child.wait()
"""
"""When told to, opens a chip and has a child that inherits it, tells that it runs, and would wait for it."""


def reason_of(daemon: Daemon, lease: str) -> str:
    """Return why a lease has ended."""
    why: str = next(row["why"] for row in daemon.leases(ended=True) if row["lease"] == lease)
    return why


# -- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_lease_ends_with_its_process(daemon: Daemon, number: signal.Signals) -> None:
    """A lease that is bound to a process ends when that is ended by a signal, and says so."""
    with process() as held:
        lease = daemon.call("Acquire", count=4, pid=held.pid)["lease"]
        assert daemon.leases()[0]["pid"] == held.pid
        held.send_signal(number)
        held.wait()
        eventually(daemon.all_free)
    assert reason_of(daemon, lease) == f"process {held.pid} ended"


def test_a_lease_ends_when_its_process_exits(daemon: Daemon) -> None:
    """A lease ends when its process exits by itself."""
    with process("sh", "-c", "read line") as held:
        daemon.call("Acquire", count=1, pid=held.pid)
        held.communicate("go\n")
        eventually(daemon.all_free)


def test_a_zombie_holds_nothing(daemon: Daemon) -> None:
    """A process that has exited holds its chips no longer, though its parent has not waited for it."""
    with process() as held:
        daemon.call("Acquire", count=1, pid=held.pid)
        held.kill()
        eventually(daemon.all_free)
        stat = Path(f"/proc/{held.pid}/stat").read_text()
        assert stat.rpartition(")")[2].split()[0] == "Z"
        with pytest.raises(NeurondError, match=f"process {held.pid} has already ended") as refused:
            daemon.call("Acquire", count=1, pid=held.pid)
        assert refused.value.kind == "InvalidRequest"
        assert daemon.all_free()


@pytest.mark.parametrize("pid", [2**22 + 1, 2**63, -1])
def test_a_process_that_is_none_is_refused(daemon: Daemon, pid: int) -> None:
    """A lease can't be bound to a process that does not exist."""
    with pytest.raises(NeurondError, match=f"no process {pid}") as refused:
        daemon.call("Acquire", count=1, pid=pid)
    assert refused.value.kind == "InvalidRequest"
    assert daemon.all_free()


def test_pid_0_is_the_caller(daemon: Daemon, connect: Connect) -> None:
    """A lease for pid 0 is bound to the process that calls; it outlives the connection."""
    connection = connect()
    lease = connection.ask("Acquire", count=1, pid=0)["lease"]
    connection.close()
    (row,) = daemon.leases()
    assert (row["state"], row["binding"], row["pid"]) == ("active", "process", os.getpid())
    daemon.call("Release", lease=lease)
    eventually(daemon.all_free)


# -- connections ------------------------------------------------------------------------------------------------------


def test_a_lease_ends_with_its_connection(daemon: Daemon, connect: Connect) -> None:
    """Leases without another binding end when the connection closes; those of other connections go on."""
    leaver, stayer = connect(), connect()
    lease = leaver.ask("Acquire", count=4)["lease"]
    leaver.ask("Acquire", count=1)
    kept = stayer.ask("Acquire", count=8)["lease"]
    leaver.close()
    eventually(lambda: [row["lease"] for row in daemon.leases()] == [kept])
    assert reason_of(daemon, lease) == "the client's connection closed"


def test_a_lease_ends_when_its_client_is_killed(daemon: Daemon) -> None:
    """A client that is killed closes its connection, and its lease ends."""
    program = (
        "import sys; from neurond.client import Client; client = Client(sys.argv[1]); "
        "print(client.call('Acquire', count=1)['lease'], flush=True); sys.stdin.read()"
    )
    with process(sys.executable, "-c", program, daemon.address) as client:
        assert client.stdout is not None
        lease = client.stdout.readline().strip()
        (row,) = daemon.leases()
        assert (row["lease"], row["binding"], row["pid"]) == (lease, "connection", client.pid)
        client.kill()
        eventually(daemon.all_free)


# -- time limits ------------------------------------------------------------------------------------------------------


def test_a_lease_ends_when_its_time_is_over(daemon: Daemon) -> None:
    """A lease with a time limit ends by itself, not before."""
    began = time.monotonic()
    lease = daemon.call("Acquire", count=1, ttl=0.3)["lease"]
    eventually(daemon.all_free)
    assert time.monotonic() - began >= 0.3
    assert reason_of(daemon, lease) == "its time limit passed"


def test_renew_prolongs_and_shortens(daemon: Daemon) -> None:
    """`renew` counts from now: a lease goes on beyond its first limit, and ends earlier if told so."""
    lease = daemon.call("Acquire", count=1, ttl=0.3)["lease"]
    until = daemon.call("Renew", lease=lease, ttl=600)["until"]
    assert 590 < until - time.time() < 601
    assert abs(daemon.leases()[0]["until"] - until) < 1
    began = time.monotonic()
    eventually(lambda: time.monotonic() - began > 0.4)
    assert daemon.leases()[0]["state"] == "active"
    daemon.call("Renew", lease=lease, ttl=0.01)
    eventually(daemon.all_free)


@pytest.mark.parametrize(("binding", "parameters"), [("connection", {}), ("process", {"pid": 0})])
def test_only_a_time_limit_can_be_renewed(connect: Connect, binding: str, parameters: dict[str, int]) -> None:
    """A lease that is bound to something else has no limit to prolong."""
    connection = connect()
    lease = connection.ask("Acquire", count=1, **parameters)["lease"]
    connection.send("Renew", lease=lease, ttl=60)
    name, said = connection.error()
    assert name == "io.neurond.InvalidRequest"
    assert said == f"lease {lease} has no time limit: it is bound to a {binding}"


@pytest.mark.parametrize("ttl", [0, -1, 1e12])
def test_an_impossible_time_limit_is_refused(daemon: Daemon, ttl: float) -> None:
    """A time limit has to be positive and at most a year, for a new lease and for `renew`."""
    lease = daemon.call("Acquire", count=1, ttl=600)["lease"]
    for method, parameters in (("Acquire", {"count": 1}), ("Renew", {"lease": lease})):
        with pytest.raises(NeurondError, match=r"between 0.001 and 3.16224e\+07 s are possible") as refused:
            daemon.call(method, **parameters, ttl=ttl)
        assert refused.value.kind == "InvalidRequest"
    assert [row["lease"] for row in daemon.leases()] == [lease]


def test_two_bindings_are_refused(daemon: Daemon) -> None:
    """A lease is bound to a process or to a time limit, not to both."""
    with pytest.raises(NeurondError, match="not to both"):
        daemon.call("Acquire", count=1, ttl=60, pid=0)
    assert daemon.all_free()


# -- release ----------------------------------------------------------------------------------------------------------


def test_a_second_release_changes_nothing(daemon: Daemon, connect: Connect) -> None:
    """A lease is released by its id: doing so again is refused and takes nothing from who has the chip next."""
    first, second = connect(), connect()
    lease = first.ask("Acquire", count=1)["lease"]
    assert daemon.call("Release", lease=lease)["state"] in {"draining", "ended"}
    eventually(daemon.all_free)
    other = second.ask("Acquire", count=1)["lease"]
    with pytest.raises(NeurondError, match=f"no lease '{lease}': it has ended or never was"):
        daemon.call("Release", lease=lease)
    first.close()
    assert [row["lease"] for row in daemon.leases()] == [other]


# -- draining ---------------------------------------------------------------------------------------------------------


@pytest.mark.root
def test_chips_are_withheld_while_a_child_has_one_open(daemon: Daemon) -> None:
    """When the holder is killed, all its chips are withheld until its child closes the one that it has open."""
    with process(sys.executable, "-c", CHILD, node_of(daemon, 2)) as held:
        assert held.stdout is not None
        assert held.stdin is not None
        lease = daemon.call("Acquire", count=4, pid=held.pid)["lease"]
        held.stdin.write("go\n")
        held.stdin.flush()
        assert held.stdout.readline() == "open\n"
        held.kill()
        eventually(lambda: daemon.states()[0] == "draining")
        assert [daemon.states()[chip] for chip in range(5)] == ["draining"] * 4 + ["free"]
        (row,) = daemon.leases()
        assert (row["lease"], row["state"], row["why"]) == (lease, "draining", f"process {held.pid} ended")
        with pytest.raises(
            NeurondError, match=rf"held: 0-3 by root \(lease {lease}, since [0-9:]+, draining\)"
        ) as refused:
            daemon.call("Acquire", chips=[0], ttl=60)
        assert refused.value.kind == "NoCapacity"
        held.stdin.close()  # the child reads the end of its stdin, and exits
        eventually(daemon.all_free)
    assert reason_of(daemon, lease) == f"process {held.pid} ended"


@pytest.mark.root
def test_a_release_waits_for_the_chips_to_be_closed(daemon: Daemon, connect: Connect) -> None:
    """A released lease is draining while anybody has its chips open, and a waiter gets them when they are closed."""
    lease = daemon.call("Acquire", all=True, ttl=600)["lease"]
    with holding(node_of(daemon, 0)) as holder:
        waiter = connect()
        waiter.send("Acquire", count=1, wait=60)
        assert daemon.call("Release", lease=lease)["state"] == "draining"
        with pytest.raises(NeurondError, match="is draining: only an active lease can be renewed"):
            daemon.call("Renew", lease=lease, ttl=60)
        assert daemon.call("Release", lease=lease)["state"] == "draining"
        assert len(daemon.leases()) == 2
        holder.kill()
        assert waiter.expect()["chips"] == [0]


@pytest.mark.root
def test_a_time_limit_that_passes_while_a_chip_is_open(daemon: Daemon, connect: Connect) -> None:
    """When its time is over a lease drains, and nobody gets its chips before they are closed."""
    lease = daemon.call("Acquire", chips=[0, 1, 2, 3], ttl=0.2)["lease"]
    with holding(node_of(daemon, 0)) as holder:
        waiter = connect()
        waiter.send("Acquire", chips=[0], wait=60)
        eventually(lambda: daemon.states()[0] == "draining")
        with pytest.raises(NeurondError, match="is draining: only an active lease can be renewed"):
            daemon.call("Renew", lease=lease, ttl=600)
        with pytest.raises(NeurondError, match=rf"lease {lease}, since [0-9:]+, draining"):
            daemon.call("Acquire", chips=[3], ttl=60)
        holder.kill()
        assert waiter.expect()["chips"] == [0]
    assert reason_of(daemon, lease) == "its time limit passed"


@pytest.mark.root
def test_a_chip_that_is_only_mapped_is_withheld(daemon: Daemon) -> None:
    """A chip whose descriptor is closed but whose memory is still mapped is not free at the end of its lease."""
    daemon.call("Simulate", chip=5, action="remove")
    daemon.call("Simulate", chip=5, action="add", major=1)  # 1:5 is /dev/zero, which can be mapped
    eventually(lambda: daemon.call("ListChips")["chips"][5]["device"] == "1:5")
    lease = daemon.call("Acquire", chips=[5], ttl=600)["lease"]
    with process(sys.executable, "-c", MAP, node_of(daemon, 5)) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "mapped\n"
        assert daemon.call("Release", lease=lease)["state"] == "draining"
        for _ in range(3):
            daemon.call("Check")
        assert [who["pid"] for who in daemon.call("ListChips")["chips"][5]["holders"]] == [holder.pid]
        with pytest.raises(NeurondError, match="draining"):
            daemon.call("Acquire", chips=[5])
    eventually(daemon.all_free)


@pytest.mark.root
def test_chips_that_are_closed_are_free_at_once(daemon: Daemon) -> None:
    """Where no process has its chips open, a lease that is released is over in much less than a second."""
    with holding(node_of(daemon, 0)):
        pass
    eventually(daemon.all_free)  # the holder may have been seen at its end
    lease = daemon.call("Acquire", all=True, ttl=600)["lease"]
    began = time.monotonic()
    daemon.call("Release", lease=lease)
    eventually(daemon.all_free)
    assert time.monotonic() - began < 2
    assert reason_of(daemon, lease) == "released by root"


# -- other users ------------------------------------------------------------------------------------------------------


@pytest.fixture
def with_group_neuron(run_dir: Path) -> Iterator[Daemon]:
    """Give a daemon whose host has a group neuron, and a socket that anyone may open."""
    with grouped(run_dir) as daemon:
        daemon.socket.chmod(0o666)
        run_dir.chmod(0o755)
        yield daemon


@pytest.mark.root
def test_who_is_not_in_the_group_may_look_only(with_group_neuron: Daemon) -> None:
    """A user outside the group neuron may list but not lease: NotAllowed, exit code 77, and a hint what to do."""
    daemon = with_group_neuron
    assert as_nobody(daemon, "ls").returncode == 0
    for arguments in (("run", "-n", "1", "true"), ("acquire", "-n", "1", "--ttl", "1m")):
        refused = as_nobody(daemon, *arguments)
        assert refused.returncode == 77
        assert refused.stdout == ""
        assert "nobody may not lease chips: that takes the group neuron" in refused.stderr
        assert "usermod -aG neuron" in refused.stderr
    assert daemon.all_free()


@pytest.mark.root
def test_a_host_without_the_group_says_so(run_dir: Path) -> None:
    """Where there is no group neuron, the refusal says how to make it."""
    with grouped(run_dir, exists=False) as daemon:
        daemon.socket.chmod(0o666)
        run_dir.chmod(0o755)
        refused = as_nobody(daemon, "acquire", "-n", "1", "--ttl", "1m")
    assert refused.returncode == 77
    assert "groupadd --system neuron" in refused.stderr


@pytest.mark.root
def test_the_socket_is_for_root_and_the_group(run_dir: Path) -> None:
    """The socket has mode 0660 and the group neuron: its members come in, and others get exit code 77 with a hint."""
    with grouped(run_dir) as daemon:
        run_dir.chmod(0o755)
        status = daemon.socket.stat()
        assert (status.st_mode & 0o777, status.st_uid, status.st_gid) == (0o660, 0, NEURON)
        assert as_nobody(daemon, "ls", groups=[NEURON]).returncode == 0
        outside = as_nobody(daemon, "ls")
        assert outside.returncode == 77
        assert "neurond.sock: that takes the group neuron" in outside.stderr


@pytest.mark.root
def test_a_member_leases_for_itself(with_group_neuron: Daemon) -> None:
    """A member of the group neuron runs a command on chips, and the lease is that user's."""
    daemon = with_group_neuron
    acquired = as_nobody(daemon, "acquire", "-n", "4", "--ttl", "1m", groups=[NEURON])
    assert acquired.returncode == 0, acquired.stderr
    (row,) = daemon.leases()
    assert (row["lease"], row["owner"], row["uid"]) == (acquired.stdout.strip(), "nobody", NOBODY)
    ran = as_nobody(daemon, "run", "-n", "4", "--", "/bin/sh", "-c", "id -u; echo $NEUROND_CHIPS", groups=[NEURON])
    assert ran.stdout.split() == [str(NOBODY), "4,5,6,7"]
    assert as_nobody(daemon, "release", row["lease"], groups=[NEURON]).returncode == 0
    eventually(daemon.all_free)


@pytest.mark.root
def test_a_process_of_somebody_else_is_refused(with_group_neuron: Daemon) -> None:
    """A user binds leases to processes of its own only; root may bind them to any."""
    daemon = with_group_neuron
    with process() as of_root, process(user=NOBODY, group=NOGROUP, extra_groups=[]) as of_nobody:
        hold = ("acquire", "-n", "1", "--hold-pid")
        refused = as_nobody(daemon, *hold, str(of_root.pid), groups=[NEURON])
        assert refused.returncode == 77
        assert f"process {of_root.pid} belongs to root: bind a lease to a process of your own" in refused.stderr
        assert daemon.all_free()
        assert as_nobody(daemon, *hold, str(of_nobody.pid), groups=[NEURON]).returncode == 0
        assert daemon.cli(*hold, str(of_nobody.pid)).returncode == 0
        assert [row["owner"] for row in daemon.leases()] == ["nobody", "root"]


@pytest.mark.root
@pytest.mark.parametrize("verb", [("release",), ("renew", "--ttl", "1h"), ("env",)], ids=lambda verb: verb[0])
def test_a_lease_of_somebody_else_is_left_alone(with_group_neuron: Daemon, verb: tuple[str, ...]) -> None:
    """Only the owner and root may release or renew a lease, or read its environment; others are told whose it is."""
    daemon = with_group_neuron
    of_root = daemon.call("Acquire", count=1, ttl=60)["lease"]
    before = daemon.leases()
    refused = as_nobody(daemon, *verb, of_root, groups=[NEURON])
    assert refused.returncode == 77
    assert f"lease {of_root} belongs to root" in refused.stderr
    assert [(row["lease"], round(row["until"])) for row in daemon.leases()] == [
        (row["lease"], round(row["until"])) for row in before
    ]
    of_nobody = as_nobody(daemon, "acquire", "-n", "1", "--ttl", "1m", groups=[NEURON]).stdout.strip()
    insisting = [] if verb == ("env",) else ["--force", "--reason", "maintenance"]
    assert daemon.cli(*verb, of_nobody, *insisting).returncode == 0


@pytest.mark.root
def test_pulling_chips_is_for_root(with_group_neuron: Daemon) -> None:
    """Only root, or who runs the daemon, pulls and plugs simulated chips."""
    refused = as_nobody(with_group_neuron, "simulate", "remove", "0", groups=[NEURON])
    assert refused.returncode == 77
    assert with_group_neuron.states()[0] == "free"
