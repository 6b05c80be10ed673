"""Who may do what with whose lease, keys that make a request safe to repeat, and handing a lease over."""

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from neurond.client import NeurondError
from tests.daemon import support
from tests.daemon.support import NEURON, Raw, as_nobody, wait_in_line
from tests.harness import PATIENCE, Daemon, eventually


@pytest.fixture
def shared(run_dir: Path) -> Iterator[Daemon]:
    """Give a daemon on a host with a group neuron, and whose socket anyone may open."""
    with support.with_group_neuron(run_dir) as daemon:
        daemon.socket.chmod(0o666)
        run_dir.chmod(0o755)
        yield daemon


def shut_nodes(daemon: Daemon) -> None:
    """Give the nodes the mode and group that AWS's security page recommends."""
    for node in (daemon.directory / "sim/dev").iterdir():
        node.chmod(0o660)
        subprocess.run(["chgrp", str(NEURON), str(node)], check=True)
    daemon.call("Check")  # has the daemon look at them, as news from udev would


@pytest.mark.root
def test_root_insists_with_a_reason(shared: Daemon) -> None:
    """Root may release another's lease only with --force and --reason, and the log has both."""
    lease = as_nobody(shared, "acquire", "-n", "1", "--ttl", "1h", groups=[NEURON]).stdout.strip()
    for flags in ([], ["--force"], ["--reason", "maintenance"]):
        refused = shared.cli("release", lease, *flags)
        assert refused.returncode == 77
        assert f"lease {lease} belongs to nobody: root may with --force --reason WHY" in refused.stderr
    assert shared.leases()[0]["state"] == "active"
    assert shared.cli("release", lease, "--force", "--reason", "maintenance").returncode == 0
    eventually(shared.all_free)
    (line,) = shared.logged("lease.forced")
    assert (line["lease"], line["reason"], line["owner"]) == (lease, "maintenance", "nobody")


@pytest.mark.root
def test_a_user_leaves_others_leases_alone(shared: Daemon) -> None:
    """Neither release, renew, bind nor adopt works on what is somebody else's, with --force neither."""
    lease = shared.call("Acquire", count=1, ttl=600)["lease"]
    for verb in (
        ["release", lease, "--force", "--reason", "mine now"],
        ["renew", lease, "--ttl", "1h", "--force", "--reason", "mine now"],
        ["bind", lease, "--ttl", "1h"],
        ["adopt", "--pid", "1"],
    ):
        assert as_nobody(shared, *verb, groups=[NEURON]).returncode == 77, verb
    assert shared.leases()[0]["owner"] == "root"


OPEN = "for n in 0 1 2; do (: <>{nodes}/neuron$n) 2>/dev/null && echo $n; done; true"


@pytest.mark.root
def test_a_lease_lets_its_owner_in_and_nobody_else(shared: Daemon) -> None:
    """With nodes 0660 root:neuron a member of the group opens its leased chip and no other, as long as it leases it."""
    shut_nodes(shared)
    script = OPEN.format(nodes=shared.directory / "sim/dev")
    inside = as_nobody(shared, "run", "--chips", "1", "--", "sh", "-c", script, groups=[NEURON])
    assert inside.stdout == "1\n", inside.stderr
    eventually(shared.all_free)
    outside = as_nobody(shared, "run", "--chips", "2", "--", "sh", "-c", script, groups=[NEURON])
    assert outside.stdout == "2\n"


@pytest.mark.root
def test_the_level_in_force_is_named(shared: Daemon) -> None:
    """A lease is called advisory, with the reason, where everybody can open its nodes, and acl where they are shut."""
    lease = as_nobody(shared, "acquire", "-n", "1", "--ttl", "1h", groups=[NEURON]).stdout.strip()
    (row,) = shared.leases()
    assert row["enforcement"] == "advisory"
    assert row["enforcement_why"].endswith("has mode 0666: everybody can open it")
    shut_nodes(shared)
    (row,) = shared.leases()
    assert (row["lease"], row["enforcement"]) == (lease, "acl")
    assert "  acl  " in shared.cli("ls", "0").stdout


@pytest.mark.root
def test_what_a_crash_left_open_is_shut_at_the_start(shared: Daemon) -> None:
    """An entry that a killed daemon left in a node's list is taken away at the start; one of a living lease stays."""
    shut_nodes(shared)
    node = shared.directory / "sim/dev/neuron3"
    as_nobody(shared, "acquire", "--chips", "3", "--ttl", "1h", groups=[NEURON])
    shared.kill()
    subprocess.run(["setfacl", "-m", "u:nobody:rw", str(node.with_name("neuron4"))], check=True)
    shared.start()
    shared.socket.chmod(0o666)
    command = ["getfacl", "-cp", str(node), str(node.with_name("neuron4"))]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    held, free = listed.stdout.strip().split("\n\n")
    assert "user:nobody:rw-" in held
    assert "nobody" not in free


# -- keys -------------------------------------------------------------------------------------------------------------


def test_a_key_gives_the_same_lease(daemon: Daemon) -> None:
    """Asking again with the same key gives the same lease, also after a crash; with other parameters it is refused."""
    wish: dict[str, Any] = {"count": 4, "ttl": 600, "key": "job 7"}
    first = daemon.call("Acquire", **wish)
    assert daemon.call("Acquire", **wish)["lease"] == first["lease"]
    daemon.kill()
    daemon.start()
    assert daemon.call("Acquire", **wish) == first
    with pytest.raises(NeurondError, match=f"the key 'job 7' belongs to lease {first['lease']}") as refused:
        daemon.call("Acquire", **wish | {"count": 8})
    assert refused.value.kind == "InvalidRequest"
    assert len(daemon.leases()) == 1


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another time limit": ({"count": 1, "ttl": 600}, {"count": 1, "ttl": 601}),
    "no time limit": ({"count": 1, "ttl": 600}, {"count": 1}),
    "another process": ({"count": 1, "pid": 0}, {"count": 1, "pid": os.getppid()}),
    "a time limit and no process": ({"count": 1, "pid": 0}, {"count": 1, "ttl": 600}),
    "another count": ({"count": 1, "ttl": 600}, {"count": 4, "ttl": 600}),
    "chips by number": ({"count": 1, "ttl": 600}, {"chips": [0], "ttl": 600}),
    "all": ({"count": 1, "ttl": 600}, {"all": True, "ttl": 600}),
}


def test_a_key_belongs_to_the_parameters(daemon: Daemon) -> None:
    """With other chips, another process or time limit a key is refused naming its lease, and the same gives the same.

    The daemon knows the keys after it was killed, too.
    """

    def check() -> None:
        for key, (first, other) in OTHERS.items():
            assert daemon.call("Acquire", key=key, wait=1, **first)["lease"] == leases[key]
            with pytest.raises(NeurondError, match=f"the key '{key}' belongs to lease {leases[key]}, ") as refused:
                daemon.call("Acquire", key=key, wait=1, **other)
            assert refused.value.kind == "InvalidRequest"
        assert [row["lease"] for row in daemon.leases()] == list(leases.values())

    leases = {key: daemon.call("Acquire", key=key, **first)["lease"] for key, (first, _) in OTHERS.items()}
    check()
    daemon.kill()
    daemon.start()
    check()


def test_a_key_of_a_waiting_request_belongs_to_its_parameters(daemon: Daemon) -> None:
    """A request that waits is not joined by one with its key that asks for something else."""
    held = daemon.call("Acquire", all=True, ttl=600)["lease"]
    others: list[dict[str, Any]] = [{"count": 1, "ttl": 60}, {"count": 4, "ttl": 600}, {"count": 1, "pid": 0}]
    with Raw(daemon) as waiter, Raw(daemon) as other:
        request, _ = wait_in_line(waiter, count=1, ttl=600, key="k")
        for parameters in others:
            other.send("Acquire", key="k", wait=60, **parameters)
            name, said = other.error()
            assert name == "io.neurond.InvalidRequest"
            assert f"belongs to lease {request}" in said
        daemon.call("Release", lease=held)
        assert waiter.expect()["lease"] == request


def test_a_key_is_free_again_after_its_lease(daemon: Daemon) -> None:
    """Once its lease has ended, a key can be used for something else."""
    first = daemon.call("Acquire", count=1, ttl=600, key="k")["lease"]
    daemon.call("Release", lease=first)
    eventually(daemon.all_free)
    assert daemon.call("Acquire", count=4, ttl=60, key="k")["lease"] != first


def test_a_key_holds_while_the_first_request_waits(daemon: Daemon) -> None:
    """Two requests with one key wait as one, get one lease, and one of them may go without the other losing it."""
    held = daemon.call("Acquire", all=True, ttl=600)["lease"]
    wish: dict[str, Any] = {"count": 1, "ttl": 600, "key": "k", "wait": PATIENCE}
    answers: list[str] = []
    clients = [daemon.client() for _ in range(3)]

    def ask(number: int) -> None:
        try:
            answers.append(clients[number].call("Acquire", **wish)["lease"])
        except Exception as error:  # noqa: BLE001 - the one that goes away
            answers.append(type(error).__name__)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    threads[0].start()
    eventually(lambda: len(daemon.leases()) == 2)
    for thread in threads[1:]:
        thread.start()
    time.sleep(0.3)
    clients[0]._socket.shutdown(socket.SHUT_RDWR)
    threads[0].join()
    assert len(daemon.leases()) == 2
    daemon.call("Release", lease=held)
    for thread in threads[1:]:
        thread.join()
    assert answers[0] == "Unreachable"
    assert answers[1] == answers[2] == daemon.leases()[0]["lease"]
    for client in clients:
        client.close()


# -- hand-over --------------------------------------------------------------------------------------------------------


def test_a_lease_is_handed_over_in_one_step(daemon: Daemon) -> None:
    """A lease goes from a time limit to a process in one event, and ends with that process and not before."""
    lease = daemon.call("Acquire", count=4, ttl=1.0)["lease"]
    with subprocess.Popen(["sleep", "600"]) as process:
        assert daemon.cli("bind", lease, "--hold-pid", str(process.pid)).returncode == 0
        daemon.kill()
        daemon.start()
        with subprocess.Popen(["sleep", "1.2"]):
            pass
        assert [row["binding"] for row in daemon.leases()] == ["process"]
        process.kill()
    eventually(daemon.all_free)


def test_a_stale_release_leaves_the_next_holder_alone(daemon: Daemon) -> None:
    """A release names a lease and not a chip: one that comes late takes nothing from who has the chip since."""
    first = daemon.call("Acquire", chips=[0], ttl=60)["lease"]
    daemon.call("Release", lease=first)
    eventually(daemon.all_free)
    second = daemon.call("Acquire", chips=[0], ttl=60)["lease"]
    with pytest.raises(NeurondError) as refused:
        daemon.call("Release", lease=first)
    assert refused.value.kind == "NoSuchLease"
    assert [row["lease"] for row in daemon.leases()] == [second]
