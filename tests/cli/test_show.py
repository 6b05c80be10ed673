"""ls, ps, watch, version, and what all verbs have in common."""

import json
import os
import pty
import re
import subprocess
import time
from contextlib import suppress
from typing import Any

import pytest

from neurond import __version__
from neurond.cli import VERBS
from tests.daemon.support import ME, ending, leases_nothing, process
from tests.harness import NEUROND, PATIENCE, Daemon, eventually

ESCAPE = "\033"

NEURON_LS = {
    "neuron_device", "bdf", "cpu_affinity", "numa_node", "connected_to", "nc_count", "logical_neuroncore_config",
    "memory_size", "neuroncore_ids", "neuron_processes",
}  # fmt: skip


def lease_some(daemon: Daemon, **parameters: Any) -> str:
    """Lease chips for an hour, and return the lease."""
    lease: str = daemon.call("Acquire", **{"count": 4, "ttl": 3600, "name": "some"} | parameters)["lease"]
    return lease


def shown(daemon: Daemon, *arguments: str) -> str:
    """Return what a verb prints, which has to succeed and to say nothing on stderr."""
    done = daemon.cli(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


# -- ls ---------------------------------------------------------------------------------------------------------------


def test_ls(daemon: Daemon) -> None:
    """`ls` has a line for each chip: state, lease, owner, since and holder."""
    with process() as held:
        lease = daemon.call("Acquire", count=4, pid=held.pid)["lease"]
        header, *lines = shown(daemon, "ls").splitlines()
    assert header.split() == ["CHIP", "STATE", "LEASE", "OWNER", "LEVEL", "SINCE", "HOLDER"]
    assert [line.split()[:2] for line in lines] == [[str(n), "leased" if n < 4 else "free"] for n in range(16)]
    assert re.fullmatch(rf"0 +leased +{lease} +{ME} +advisory +\d\d:\d\d:\d\d +{held.pid} sleep 600", lines[0])


def test_ls_json(daemon: Daemon) -> None:
    """`ls -j` prints a list of chips that has all that neuron-ls -j prints, and lease, state and holders beside it."""
    with process() as held:
        lease = daemon.call("Acquire", count=4, pid=held.pid)["lease"]
        chips = json.loads(shown(daemon, "ls", "-j"))
    assert [chip["neuron_device"] for chip in chips] == list(range(16))
    for chip in chips:
        assert chip.keys() >= NEURON_LS | {"state", "lease", "holders", "owner", "since", "problem", "node"}
    taken, free = chips[3], chips[4]
    assert (taken["state"], taken["lease"], taken["owner"]) == ("leased", lease, ME)
    assert taken["holders"] == [{"pid": held.pid, "user": ME, "command": "sleep 600"}]
    assert [found["pid"] for found in taken["neuron_processes"]] == [held.pid]
    assert (free["state"], free["lease"], free["holders"], free["neuron_processes"]) == ("free", None, [], [])
    assert (free["nc_count"], free["neuroncore_ids"], free["memory_size"]) == (2, [8, 9], 32 << 30)
    assert free["connected_to"] == sorted(free["connected_to"])


def test_ls_of_some_chips(daemon: Daemon) -> None:
    """`ls CHIP...` shows these chips only."""
    assert [line.split()[0] for line in shown(daemon, "ls", "7", "3").splitlines()[1:]] == ["3", "7"]
    assert [chip["neuron_device"] for chip in json.loads(shown(daemon, "ls", "-j", "5"))] == [5]


@pytest.mark.parametrize(("chip", "code"), [("16", 66), ("77", 66), ("abc", 2)])
def test_ls_of_an_unknown_chip(daemon: Daemon, chip: str, code: int) -> None:
    """A chip that the host does not have is exit code 66, what is no chip is 2, and nothing is printed."""
    done = daemon.cli("ls", "0", chip)
    assert (done.returncode, done.stdout) == (code, "")
    assert (f"no chip {chip} on this host (have 0-15)" if code == 66 else "invalid int value: 'abc'") in done.stderr


def test_ls_topology(daemon: Daemon) -> None:
    """`ls -t` draws the chips of a trn1.32xlarge as four rows of four."""
    lease_some(daemon)
    title, *rows = shown(daemon, "ls", "-t").splitlines()
    assert title == "trn1.32xlarge: rows of 4 and halves of 8 belong together"
    assert [row.count("[") for row in rows] == [4, 4, 4, 4]
    assert rows[0].count("leased") == 4
    assert rows[1].startswith("[ 4 free")


def test_ls_wide(daemon: Daemon) -> None:
    """`ls -w` adds node, device numbers, cores, memory, links and the name of the lease."""
    lease_some(daemon)
    header, first, *_ = shown(daemon, "ls", "-w").splitlines()
    assert header.split()[-6:] == ["NODE", "DEVICE", "CORES", "MEMORY", "LINKS", "NAME"]
    assert str(daemon.directory / "sim/dev/neuron0") in first
    assert "0-1" in first
    assert "32 GiB" in first
    assert first.split()[-1] == "some"


# -- ps ---------------------------------------------------------------------------------------------------------------


def test_ps(daemon: Daemon) -> None:
    """`ps` has a line for each lease and then for each request that waits; without any it prints nothing."""
    assert shown(daemon, "ps") == ""
    lease = lease_some(daemon)
    with ending(daemon.spawn("run", "--all", "true")) as waiting:
        eventually(lambda: len(daemon.leases()) == 2)
        header, first, second = shown(daemon, "ps").splitlines()
        waiting.kill()
    assert header.split() == ["LEASE", "STATE", "CHIPS", "OWNER", "BINDING", "LEVEL", "SINCE", "NAME", "WHY"]
    assert first.split()[:5] == [lease, "active", "0-3", ME, "until"]
    assert second.split()[1:4] == ["queued", "all", "chips"]


def test_ps_json(daemon: Daemon) -> None:
    """`ps -j` prints a list of leases."""
    assert json.loads(shown(daemon, "ps", "-j")) == []
    lease = lease_some(daemon)
    (row,) = json.loads(shown(daemon, "ps", "-j"))
    assert row.keys() >= {"lease", "state", "chips", "owner", "uid", "binding", "since", "until", "name", "why"}
    assert (row["lease"], row["state"], row["chips"], row["owner"]) == (lease, "active", [0, 1, 2, 3], ME)
    assert (row["binding"], row["name"]) == ("time", "some")
    assert abs(row["since"] - time.time()) < PATIENCE


def test_ps_quiet(daemon: Daemon) -> None:
    """`ps -q` prints ids only, made for `neurond release $(neurond ps -q)`."""
    leases = [lease_some(daemon) for _ in range(2)]
    assert shown(daemon, "ps", "-q").split() == leases
    assert daemon.cli("release", *leases).returncode == 0
    eventually(daemon.all_free)
    assert shown(daemon, "ps", "-q") == ""


def test_ps_filter(daemon: Daemon) -> None:
    """`ps --filter` shows the leases that fit all filters."""
    first, second = lease_some(daemon, name="a"), lease_some(daemon, name="b")
    assert shown(daemon, "ps", "-q", "--filter", "name=b").split() == [second]
    assert shown(daemon, "ps", "-q", "--filter", f"lease={first}", "--filter", f"owner={ME}").split() == [first]
    assert shown(daemon, "ps", "-q", "--filter", "name=a", "--filter", "name=b") == ""
    assert shown(daemon, "ps", "-q", "--filter", "binding=process") == ""


def test_ps_columns(daemon: Daemon) -> None:
    """`ps -o` prints the columns that are named, in that order."""
    lease = lease_some(daemon)
    assert shown(daemon, "ps", "-o", "chips,lease,ASKED").splitlines() == [
        f"{'CHIPS':5}  {'LEASE':{len(lease)}}  ASKED",
        f"{'0-3':5}  {lease:5}  4 chips",
    ]


def test_ps_ended(daemon: Daemon) -> None:
    """`ps -a` also shows leases that ended lately, and why."""
    lease = lease_some(daemon)
    daemon.call("Release", lease=lease)
    eventually(daemon.all_free)
    assert shown(daemon, "ps") == ""
    line = shown(daemon, "ps", "-a").splitlines()[-1]
    assert line.split()[:2] == [lease, "ended"]
    assert line.endswith(f"released by {ME}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--filter", "colour=red"), "--filter colour=red: the form is K=V, with K one of lease, state"),
        (("--filter", "name"), "--filter name: the form is K=V"),
        (("-o", "lease,size"), "no column 'size': there are lease,state,chips"),
    ],
)
def test_ps_refuses_what_it_does_not_know(daemon: Daemon, arguments: tuple[str, ...], said: str) -> None:
    """Unknown filters and columns are exit code 2, and the known ones are named."""
    done = daemon.cli("ps", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


# -- watch ------------------------------------------------------------------------------------------------------------


def test_watch_follows(fresh: Daemon) -> None:
    """`watch -j` prints each event as it happens, one object a line."""
    with ending(fresh.spawn("watch", "-j", "--since", "1")) as watching:
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())
        assert (first["seq"], first["event"]) == (1, "ledger.opened")
        for _ in range(16):
            assert json.loads(watching.stdout.readline())["event"] == "chip.added"
        lease = lease_some(fresh)
        granted = json.loads(watching.stdout.readline())
        watching.kill()
    assert (granted["seq"], granted["event"]) == (18, "lease.granted")
    assert granted["data"]["lease"]["id"] == lease
    assert abs(granted["at"] - time.time()) < PATIENCE


def test_watch_replays(fresh: Daemon) -> None:
    """`watch --since` begins with the event of that number, so that who was away misses nothing."""
    lease = lease_some(fresh)
    whole = shown(fresh, "watch", "-j", "--since", "1", "--count", "18").splitlines()
    assert [json.loads(line)["seq"] for line in whole] == list(range(1, 19))
    assert shown(fresh, "watch", "-j", "--since", "18", "--count", "1").splitlines() == whole[17:]
    text = shown(fresh, "watch", "--since", "18", "--count", "1")
    assert text.split()[1:] == ["lease.granted", lease, "chips", "0-3", ME, "time", "some"]


def test_watch_says_what_is_not_kept(fresh: Daemon) -> None:
    """A number that no event has yet is refused with the numbers that there are."""
    done = fresh.cli("watch", "--since", "1000")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "neurond: event 1000 is not kept: the events 1 to 17 are\n"


def test_watch_ends_with_the_daemon(fresh: Daemon) -> None:
    """When the daemon stops, `watch` ends with exit code 69."""
    with ending(fresh.spawn("watch", "--since", "1")) as watching:
        assert watching.stdout is not None
        watching.stdout.readline()
        fresh.stop()
        _, said = watching.communicate(timeout=PATIENCE)
    assert watching.returncode == 69
    assert "neurond closed the connection" in said or "the connection to neurond broke" in said


# -- what comes from others -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [f"{ESCAPE}[31mred", "two\nlines", "a\tb", "bell\a", "x" * 129, "\u202eright to left"])
def test_a_name_that_a_terminal_would_obey_is_refused(daemon: Daemon, name: str) -> None:
    """A name with control characters, or of more than 128 characters, is refused, and the refusal has none."""
    with leases_nothing(daemon):
        done = daemon.cli("acquire", "-n", "1", "--ttl", "1m", "--name", name)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "neurond: a name has at most 128 printable characters\n"


def test_a_name_in_any_script_is_taken(daemon: Daemon) -> None:
    """A name may have letters of all scripts."""
    assert daemon.cli("acquire", "-n", "1", "--ttl", "1m", "--name", "Übung 訓練").returncode == 0
    assert "Übung 訓練" in shown(daemon, "ps")


@pytest.mark.parametrize("verb", [("ls",), ("ls", "-w"), ("ps", "-o", "command"), ("ls", "-j"), ("ps", "-j")])
def test_a_command_line_with_escape_codes_is_harmless(daemon: Daemon, verb: tuple[str, ...]) -> None:
    """What a process has in its command line reaches the terminal with its control characters spelled out."""
    with process("sh", "-c", "read line", f"{ESCAPE}[31m\r\n\a", stdin=subprocess.PIPE) as held:
        daemon.call("Acquire", count=1, pid=held.pid)
        text = shown(daemon, *verb)
    assert "[31m" in text
    assert not set(text) & {ESCAPE, "\a", "\r"}
    assert all(line.isprintable() for line in text.splitlines())


# -- colour -----------------------------------------------------------------------------------------------------------


def on_terminal(daemon: Daemon, *arguments: str, **env: str) -> str:
    """Return what a verb prints on a terminal."""
    ours, theirs = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"NEUROND_HOST": daemon.address} | env
    try:
        subprocess.run([*NEUROND, *arguments], env=environment, stdout=theirs, check=True, timeout=PATIENCE)
    finally:
        os.close(theirs)
    text = b""
    with suppress(OSError):  # which is how the end of a terminal looks
        while data := os.read(ours, 1 << 16):
            text += data
    os.close(ours)
    return text.decode()


@pytest.mark.parametrize("verb", ["ls", "ps"])
def test_colour_is_for_terminals(daemon: Daemon, verb: str) -> None:
    """States are coloured on a terminal and not in a pipe; NO_COLOR and --color never say no, --color always yes."""
    lease_some(daemon)
    coloured = f"{ESCAPE}[33m"
    assert ESCAPE not in shown(daemon, verb)
    assert coloured in shown(daemon, verb, "--color", "always")
    assert coloured in on_terminal(daemon, verb)
    assert ESCAPE not in on_terminal(daemon, verb, NO_COLOR="1")
    assert ESCAPE not in on_terminal(daemon, verb, "--color", "never")
    assert coloured in on_terminal(daemon, verb, "--color=always", NO_COLOR="1")
    assert ESCAPE not in on_terminal(daemon, verb, "-j")


# -- version and help -------------------------------------------------------------------------------------------------


def test_version(daemon: Daemon) -> None:
    """`version` names the command's version and the daemon's, its pid and its host."""
    assert shown(daemon, "version") == (
        f"neurond {__version__}\ndaemon {__version__}, pid {daemon.pid}, on trn1.32xlarge, simulated\n"
    )
    said = json.loads(shown(daemon, "version", "-j"))
    assert (said["version"], said["daemon"]["pid"]) == (__version__, daemon.pid)


def bare(*arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run the command line where no daemon is."""
    environment = os.environ | {"NEUROND_HOST": "unix:///nowhere/neurond.sock"} | env
    command = [*NEUROND, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_version_without_a_daemon() -> None:
    """`version` works without a daemon, and says that there is none; `--version` asks none."""
    done = bare("version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"neurond {__version__}\ndaemon: none (neurond does not answer at /nowhere/neurond")
    assert json.loads(bare("version", "-j").stdout) == {"version": __version__, "daemon": None}
    assert bare("--version").stdout == f"neurond {__version__}\n"


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_of_a_verb(verb: str, option: str) -> None:
    """Each verb explains itself on stdout, without a daemon."""
    done = bare(verb, option)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: neurond {verb}")


@pytest.mark.parametrize("option", ["--help", "-h", "help"])
def test_help(option: str) -> None:
    """The help names each verb, the exit codes and the environment."""
    done = bare(option)
    assert (done.returncode, done.stderr) == (0, "")
    for verb in VERBS:
        assert f"\n  {verb} " in done.stdout
    for code in (1, 2, 66, 69, 75, 77, 125, 126, 127, 128):
        assert f"{code}" in done.stdout.partition("exit codes:")[2]
    assert "NEUROND_HOST" in done.stdout


@pytest.mark.parametrize(("arguments", "said"), [((), "usage: neurond VERB"), (("lease",), "no verb 'lease'")])
def test_no_verb(arguments: tuple[str, ...], said: str) -> None:
    """A verb that is missing or unknown is exit code 2."""
    done = bare(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


# -- options from elsewhere -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("option", ["-H", "--host"])
def test_the_address_as_an_option(daemon: Daemon, option: str, *, before: bool) -> None:
    """-H gives the address of the daemon before the verb or after it, and wins over NEUROND_HOST."""
    address = (option, f"unix:{daemon.socket}")
    done = bare(*address, "ls", "-j") if before else bare("ls", "-j", *address)
    assert (done.returncode, len(json.loads(done.stdout))) == (0, 16)


def test_options_come_from_the_environment(daemon: Daemon) -> None:
    """NEUROND_<VERB>_<OPTION> gives any option, and only to its verb."""
    lease = lease_some(daemon)
    assert json.loads(daemon.cli("ls", env={"NEUROND_LS_JSON": "1"}).stdout)[0]["lease"] == lease
    assert daemon.cli("ls", env={"NEUROND_LS_JSON": "0", "NEUROND_PS_JSON": "1"}).stdout.startswith("CHIP")
    assert daemon.cli("ps", env={"NEUROND_PS_COLUMNS": "lease"}).stdout == f"LEASE\n{lease}\n"
    done = daemon.cli("acquire", env={"NEUROND_ACQUIRE_COUNT": "4", "NEUROND_ACQUIRE_TTL": "1h"})
    assert done.returncode == 0
    assert daemon.leases()[1]["chips"] == [4, 5, 6, 7]


def test_the_command_line_wins_over_the_environment(daemon: Daemon) -> None:
    """An option on the command line replaces the same one in the environment, and one that excludes it."""
    lease_some(daemon, all=True, count=None)
    wait = {"NEUROND_RUN_WAIT": "50ms"}
    assert "waited 0.05 s: 1 chip asked" in daemon.cli("run", "-n", "1", "true", env=wait).stderr
    assert "waited 0.06 s: 1 chip asked" in daemon.cli("run", "-n", "1", "-w", "60ms", "true", env=wait).stderr
    assert "waited" not in daemon.cli("run", "-n", "1", "--no-wait", "true", env=wait).stderr
    other = daemon.cli("run", "--chips", "3", "--no-wait", "true", env={"NEUROND_RUN_COUNT": "1"})
    assert "neurond: chip 3 asked" in other.stderr


def test_a_wrong_value_in_the_environment(daemon: Daemon) -> None:
    """A value in the environment is checked like one on the command line."""
    done = daemon.cli("run", "-n", "1", "true", env={"NEUROND_RUN_WAIT": "soon"})
    assert done.returncode == 2
    assert "'soon' is not a time" in done.stderr


# -- pipes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "verb", ["ls", "ls -j", "version", "--help", "ls --help", "watch --since 1", "watch -j --since 1"]
)
def test_a_reader_that_has_gone(daemon: Daemon, verb: str) -> None:
    """Output that nobody reads any more ends the command as SIGPIPE would, without a traceback."""
    ours, theirs = os.pipe()
    os.close(ours)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | {"NEUROND_HOST": daemon.address}
    done = subprocess.run(
        [*NEUROND, *verb.split()],
        env=env,
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, "")
