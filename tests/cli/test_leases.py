"""acquire, renew, release, env: leases for scripts."""

import json
import os
import shlex
import subprocess
import time

import pytest

from tests.daemon.support import ME, ending, leases_nothing, process
from tests.harness import NEUROND, PATIENCE, Daemon, eventually


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Give a PATH in which `neurond` is found."""
    directory = tmp_path_factory.mktemp("bin")
    (directory / "neurond").write_text(f'#!/bin/sh\nexec {shlex.join(NEUROND)} "$@"\n')
    (directory / "neurond").chmod(0o755)
    return f"{directory}:{os.environ['PATH']}"


def script(daemon: Daemon, path: str, text: str, shell: str = "sh") -> "subprocess.CompletedProcess[str]":
    """Run a shell script."""
    return subprocess.run(
        [shell, "-c", text],
        env=os.environ | {"PATH": path, "NEUROND_HOST": daemon.address},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def acquire(daemon: Daemon, *arguments: str) -> str:
    """Acquire chips with the command line and return the lease."""
    done = daemon.cli("acquire", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# -- acquire ----------------------------------------------------------------------------------------------------------


def test_the_lease_is_all_of_stdout(daemon: Daemon) -> None:
    """`acquire` prints the id of the lease and nothing else."""
    done = daemon.cli("acquire", "-n", "4", "--ttl", "1h", "--name", "by hand")
    (lease,) = daemon.leases()
    assert (done.returncode, done.stdout, done.stderr) == (0, lease["lease"] + "\n", "")
    assert (lease["chips"], lease["binding"], lease["name"]) == ([0, 1, 2, 3], "time", "by hand")
    assert 3590 < lease["until"] - time.time() < 3601


@pytest.mark.parametrize(
    ("asked", "chips"),
    [
        (("--chips", "5"), [5]),
        (("--chips", "4-7"), [4, 5, 6, 7]),
        (("--chips", "7,6,5,4"), [4, 5, 6, 7]),
        (("--all",), list(range(16))),
        (("-n", "16"), list(range(16))),
        (("--count=8",), list(range(8))),
    ],
)
def test_the_ways_to_ask(daemon: Daemon, asked: tuple[str, ...], chips: list[int]) -> None:
    """Chips are asked for by number, as a list or a range, by count, or all."""
    acquire(daemon, *asked, "--ttl", "1m")
    assert daemon.leases()[0]["chips"] == chips


def test_json(daemon: Daemon) -> None:
    """`acquire -j` and `env -j` print the same object: lease, chips and env."""
    done = daemon.cli("acquire", "-n", "1", "--ttl", "1m", "-j")
    acquired = json.loads(done.stdout)
    lease = daemon.leases()[0]["lease"]
    assert acquired == {
        "lease": lease,
        "chips": [0],
        "env": {
            "NEUROND_LEASE": lease,
            "NEUROND_CHIPS": "0",
            "NEURON_PROCESS_TAG": f"neurond-{lease}",
            "NEURON_RT_VISIBLE_CORES": "0,1",
        },
    }
    assert json.loads(daemon.cli("env", lease, "-j").stdout) == acquired


def test_a_shell_evaluates_the_environment(daemon: Daemon, path: str) -> None:
    """The output of `acquire --env` and of `env` sets the variables in a shell, for its children too."""
    done = script(
        daemon,
        path,
        """
        eval "$(neurond acquire -n 4 --ttl 30m --env)"
        printenv NEUROND_LEASE NEUROND_CHIPS NEURON_RT_VISIBLE_CORES
        lease=$NEUROND_LEASE
        unset NEUROND_LEASE NEUROND_CHIPS NEURON_RT_VISIBLE_CORES
        eval "$(neurond env "$lease")"
        printenv NEUROND_LEASE NEUROND_CHIPS NEURON_RT_VISIBLE_CORES
        """,
    )
    lease = daemon.leases()[0]["lease"]
    assert done.stdout.split() == [lease, "0,1,2,3", "0,1,2,3,4,5,6,7"] * 2
    assert done.stderr == ""


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize("how", ["neurond acquire -n 1", 'eval "$(neurond acquire -n 1 --env)"; echo $NEUROND_LEASE'])
def test_by_default_it_is_bound_to_the_shell(daemon: Daemon, path: str, shell: str, how: str) -> None:
    """Without another binding the lease is the calling shell's: it lives while that runs, and ends with it."""
    done = script(daemon, path, f"{how}\necho $$; neurond ps -j; true", shell)
    lease, pid, listed = done.stdout.splitlines()
    (row,) = json.loads(listed)
    assert (row["lease"], row["binding"], row["pid"], row["state"]) == (lease, "process", int(pid), "active")
    eventually(daemon.all_free)


def test_hold_pid(daemon: Daemon) -> None:
    """--hold-pid binds the lease to another process, and it ends with that."""
    with process() as held:
        lease = acquire(daemon, "-n", "4", "--hold-pid", str(held.pid))
        (row,) = daemon.leases()
        assert (row["lease"], row["pid"], row["command"]) == (lease, held.pid, "sleep 600")
        held.kill()
        eventually(daemon.all_free)


def test_a_time_limit_ends_the_lease(daemon: Daemon) -> None:
    """--ttl ends the lease when the time is over, whoever lives."""
    acquire(daemon, "-n", "4", "--ttl", "200ms")
    eventually(daemon.all_free)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("2m", 120), ("1h30m", 5400), ("1.5h", 5400), ("2d", 172800)]
)
def test_the_forms_of_a_time(daemon: Daemon, text: str, seconds: float) -> None:
    """A time is a number of seconds, or numbers with units."""
    acquire(daemon, "-n", "1", "--ttl", text)
    assert daemon.leases()[0]["until"] - time.time() == pytest.approx(seconds, abs=10)


# -- bad input --------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[tuple[str, ...], int, str]] = {
    "no chips": (("-n", "0"), 2, "0 chips asked: ask for at least 1"),
    "a negative count": (("-n", "-1"), 2, "-1 chips asked: ask for at least 1"),
    "no legal count": (("-n", "3"), 2, "cannot lease 3 chips together: the nearest legal sizes are 1 and 4"),
    "a count beyond the host": (("-n", "99"), 2, "cannot lease 99 chips together: the nearest legal size is 16"),
    "a count that is none": (("-n", "abc"), 2, "invalid int value: 'abc'"),
    "an unknown chip": (("--chips", "77"), 66, "no chip 77 on this host (have 0-15)"),
    "an unknown chip among others": (("--chips", "0,1,2,77"), 66, "no chip 77 on this host (have 0-15)"),
    "a chip named twice": (("--chips", "1,1"), 2, "chip 1 is named twice in --chips 1,1"),
    "no legal set": (("--chips", "2-5"), 2, "chips 2-5 are not a set that trn1.32xlarge leases together"),
    "chips that are none": (("--chips", "abc"), 2, "'abc' is not a list of chips such as 0,1 or 0-3"),
    "an empty list": (("--chips", ""), 2, "'' is not a list of chips"),
    "a range that falls": (("--chips", "3-1"), 2, "'3-1' names no chip"),
    "a busy chip": (("--chips", "12", "--no-wait"), 75, "chip 12 asked, 0 free; held: {holder}"),
    "more than are free": (("--all", "--no-wait"), 75, "15 free (free: 0-11,13-15); held: {holder}"),
    "two ways at once": (("-n", "1", "--chips", "0"), 2, "argument --chips: not allowed with argument -n/--count"),
    "no way": ((), 2, "one of the arguments -n/--count --chips --all is required"),
    "a time that is none": (("-n", "1", "--ttl", "soon"), 2, "'soon' is not a time such as 30s, 10m, 1h30m or 2d"),
    "no time at all": (("-n", "1", "--ttl", "0"), 2, "ttl of 0 s: between 0.001 and"),
    "a negative time": (("-n", "1", "--ttl=-5m"), 2, "'-5m' is not a time"),
    "a wait of years": (("-n", "1", "--wait", "999d"), 2, "wait of 8.63136e+07 s: between 0 and 3.16224e+07 s"),
    "two bindings": (("-n", "1", "--hold-pid", "1", "--ttl", "1m"), 2, "not allowed with argument"),
    "no process": (("-n", "1", "--hold-pid", "4194305"), 2, "no process 4194305: a lease needs a living process"),
    "a process that can't be": (("-n", "1", "--hold-pid", "-4"), 2, "--hold-pid -4: no process has that number"),
    "an abbreviation": (("--coun", "1"), 2, "required"),
    "an unknown option": (("-n", "1", "--gently"), 2, "unrecognized arguments: --gently"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "code", "said"), BAD.values(), ids=BAD)
def test_bad_input(daemon: Daemon, arguments: tuple[str, ...], code: int, said: str) -> None:
    """What can't be is answered by its exit code and a sentence with the numbers in it, and changes nothing."""
    busy = acquire(daemon, "--chips", "12", "--ttl", "1h", "--name", "busy")
    before = daemon.leases()[0]
    with leases_nothing(daemon):
        done = daemon.cli("acquire", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    at = time.strftime("%H:%M", time.localtime(before["since"]))
    assert said.replace("{holder}", f"12 by {ME} (lease {busy}, busy, since {at})") in done.stderr
    assert "Traceback" not in done.stderr
    assert [chip for chip, state in daemon.states().items() if state != "free"] == [12]


@pytest.mark.parametrize("verb", ["release", "env", "renew"])
def test_an_unknown_lease(daemon: Daemon, verb: str) -> None:
    """A lease that does not exist is exit code 66, and the sentence says where to look."""
    done = daemon.cli(verb, "none-1", *(("--ttl", "1m") if verb == "renew" else ()))
    assert (done.returncode, done.stdout) == (66, "")
    assert done.stderr == "neurond: no lease 'none-1': it has ended or never was (neurond ps lists the leases)\n"


# -- renew and release ------------------------------------------------------------------------------------------------


def test_renew(daemon: Daemon) -> None:
    """`renew` sets the end of a lease to the given time from now, and prints nothing."""
    lease = acquire(daemon, "-n", "1", "--ttl", "1m")
    done = daemon.cli("renew", lease, "--ttl", "1h")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert daemon.leases()[0]["until"] - time.time() == pytest.approx(3600, abs=10)


def test_renew_of_another_kind(daemon: Daemon) -> None:
    """A lease without a time limit can't be renewed: exit code 2."""
    with process() as held:
        lease = acquire(daemon, "-n", "1", "--hold-pid", str(held.pid))
        done = daemon.cli("renew", lease, "--ttl", "1h")
    assert done.returncode == 2
    assert f"lease {lease} has no time limit: it is bound to a process" in done.stderr


def test_release(daemon: Daemon) -> None:
    """`release` gives back all the leases that it is given, and prints nothing."""
    leases = [acquire(daemon, "-n", "4", "--ttl", "1h") for _ in range(3)]
    done = daemon.cli("release", *leases[:2])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    eventually(lambda: [row["lease"] for row in daemon.leases()] == leases[2:])


def test_release_goes_on_after_an_unknown_one(daemon: Daemon) -> None:
    """Unknown leases among others are exit code 66, each is named, and the others are given back."""
    leases = [acquire(daemon, "-n", "4", "--ttl", "1h") for _ in range(2)]
    done = daemon.cli("release", "none-1", leases[0], "none-2", leases[1])
    assert done.returncode == 66
    assert sorted(line.split("'")[1] for line in done.stderr.splitlines()) == ["none-1", "none-2"]
    eventually(daemon.all_free)


def test_release_ends_what_is_bound_to_a_process(daemon: Daemon) -> None:
    """A lease that is bound to a process can be given back before that ends, and the process goes on."""
    with process() as held:
        lease = acquire(daemon, "--all", "--hold-pid", str(held.pid))
        assert daemon.cli("release", lease).returncode == 0
        eventually(daemon.all_free)
        assert held.poll() is None


def test_a_wait_ends_with_the_release(daemon: Daemon) -> None:
    """`acquire` waits as `run` does, telling why on stderr, and prints the lease when it has it."""
    lease = acquire(daemon, "--all", "--ttl", "1h")
    with ending(daemon.spawn("acquire", "-n", "1", "--ttl", "1h")) as waiting:
        assert waiting.stderr is not None
        assert waiting.stderr.readline().startswith("neurond: waiting: 1 chip asked, 0 free")
        assert daemon.cli("release", lease).returncode == 0
        out, _ = waiting.communicate(timeout=PATIENCE)
    assert [row["lease"] for row in daemon.leases()] == [out.strip()]
