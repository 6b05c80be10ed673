"""The suite has teeth: each of these bugs, put into a copy of the package, is found by the tests that are there for it.

A bug is an exact replacement in one file. It must apply exactly once, so a bug that the code has outgrown is a failure
here, not a test that proves nothing any more.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

REPOSITORY = Path(__file__).parent.parent
IMPATIENT = ("PATIENCE = 60.0", "PATIENCE = 4.0")
"""A test that waits for what will never happen shall say so soon."""


@dataclass(frozen=True)
class Bug:
    """A claim that no longer holds, and the tests that have to notice: in `file`, `old` becomes `new`."""

    claim: str
    file: str
    old: str
    new: str
    tests: str

    def __str__(self) -> str:
        return self.claim.replace(" ", "-")


LEDGER, BROKER, REQUESTS = "neurond/ledger/ledger.py", "neurond/daemon/broker.py", "neurond/daemon/requests.py"
JOURNAL, PROCESSES, RECOVERY = "neurond/host/journal.py", "neurond/host/processes.py", "neurond/daemon/recovery.py"
RECORDING = "neurond/daemon/recording.py"
TOPOLOGY, SERVER, RUNDIR = "neurond/ledger/topology.py", "neurond/daemon/server.py", "neurond/host/rundir.py"

BUGS = [
    Bug(
        "a late release ends the next holder's lease",
        LEDGER,
        "lease = self.leases.get(lease_id) or self.queue.get(lease_id)\n",
        "lease = self.leases.get(lease_id) or self.queue.get(lease_id) or next(iter(self.leases.values()), None)\n",
        "tests/ledger/test_ledger.py::test_stale_command_changes_nothing",
    ),
    Bug(
        "a release frees chips and not a lease",
        LEDGER,
        "            self._held &= ~mask_of(lease.chips)\n            self.ended",
        "            self._held = 0\n            self.ended",
        "tests/ledger/test_ledger.py",
    ),
    Bug(
        "a draining chip is free",
        LEDGER,
        'self._change(lease_id, state="draining", why=reason)',
        'self._change(lease_id, state="draining", why=reason); self._held &= ~mask_of(self.leases[lease_id].chips)',
        "tests/ledger/test_ledger.py::test_draining_withholds_the_chips",
    ),
    Bug(
        "a chip in use without a lease is free",
        LEDGER,
        "return self._usable & ~self._held & ~self._foreign",
        "return self._usable & ~self._held",
        "tests/daemon/test_foreign.py::test_a_use_without_a_lease_is_seen_within_a_second_and_never_given_out",
    ),
    Bug(
        "the queue is served from its end",
        LEDGER,
        "want, line = min(lines.items(), key=_first_arrival) if len(lines) > 1",
        "want, line = max(lines.items(), key=_first_arrival) if len(lines) > 1",
        "tests/ledger/test_ledger.py::test_one_end_serves_all_that_fit",
    ),
    Bug(
        "a small request overtakes a large one",
        LEDGER,
        "mask = self._fit(want, self.free & ~self._claimed())",
        "mask = self._fit(want, self.free)",
        "tests/ledger/test_ledger.py::test_queue_is_first_come_first_served",
    ),
    Bug(
        "ids begin again after a snapshot",
        LEDGER,
        "Opened(self.epoch, self._next_number),",
        "Opened(self.epoch),",
        "tests/ledger/test_ledger.py::test_lease_ids_are_never_used_again",
    ),
    Bug(
        "the lost chip of a lease comes back to nobody",
        LEDGER,
        "self.leases[holder.id] = replace(holder, lost=",
        "self.leases[holder.id] = replace(holder, chips=(), lost=",
        "tests/ledger/test_ledger.py::test_vanished_chip_stays_leased_until_its_holder_goes",
    ),
    Bug(
        "any set of chips is legal",
        TOPOLOGY,
        "return mask in groups_of(self, mask.bit_count())",
        "return mask.bit_count() in sizes_of(self)",
        "tests/ledger/test_topology.py::test_trainium_leases_one_a_row_a_half_or_all",
    ),
    Bug(
        "chips are counted off from anywhere",
        TOPOLOGY,
        'step = size if topology.shape == "grid" else 1',
        "step = 1",
        "tests/ledger/test_topology.py::test_trainium_leases_one_a_row_a_half_or_all",
    ),
    Bug(
        "a lease ends while a process has its chips open",
        BROKER,
        'lease.state == "active" and self._may_be_open(lease)',
        "False",
        "tests/daemon/test_bindings.py::test_a_release_waits_for_the_chips_to_be_closed",
    ),
    Bug(
        "a grant is acknowledged that could not be written",
        RECORDING,
        "broken |= dict.fromkeys(granted, wire.JournalFull(self._ledger.paused))",
        "pass",
        "tests/daemon/test_crash.py::test_the_grant_that_fills_the_disk",
    ),
    Bug(
        "the journal is written after the reply",
        SERVER,
        "broken = self._commit()",
        "broken: dict[str, Refused] = {}; self._loop.call_later(0.01, self._commit)",
        "tests/daemon/test_crash.py::test_a_crash_at_any_point_forgets_no_lease_and_no_chip[journal.before-write]",
    ),
    Bug(
        "a client that has gone goes on waiting",
        REQUESTS,
        "call.on_gone = lambda: self.broker.leave(lease.id, waiter, GONE)",
        "call.on_gone = None",
        "tests/daemon/test_waiting.py::test_a_client_that_goes_leaves_the_line",
    ),
    Bug(
        "one key gives two leases",
        REQUESTS,
        "earlier = self.ledger.by_key(wish.owner.uid, wish.key) if wish.key else None",
        "earlier = None",
        "tests/daemon/test_rights.py::test_a_key_gives_the_same_lease",
    ),
    Bug(
        "anybody may release anybody's lease",
        REQUESTS,
        "if peer.uid == lease.owner.uid:",
        "if True:",
        "tests/daemon/test_rights.py::test_a_user_leaves_others_leases_alone",
    ),
    Bug(
        "the first record is not replayed",
        JOURNAL,
        "enumerate(lines[1:], start=2)",
        "enumerate(lines[2:], start=2)",
        "tests/host/test_journal.py::test_a_snapshot_and_what_follows_come_back_in_order",
    ),
    Bug(
        "the last record is not replayed",
        JOURNAL,
        "enumerate(lines[1:], start=2)",
        "enumerate(lines[1:-1], start=2)",
        "tests/host/test_journal.py::test_a_snapshot_and_what_follows_come_back_in_order",
    ),
    Bug(
        "a damaged record is believed",
        JOURNAL,
        "if len(checksum) != 8 or int(checksum, 16) != crc32(body):",
        "if len(checksum) != 8:",
        "tests/host/test_journal.py::test_a_flipped_bit_costs_one_record",
    ),
    Bug(
        "half a record stays in the file",
        JOURNAL,
        "os.ftruncate(self._fd, self._size)",
        "pass",
        "tests/host/test_journal.py::test_a_full_disk_loses_nothing",
    ),
    Bug(
        "a journal of another boot is taken over",
        JOURNAL,
        "if wrote != boot:",
        "if not wrote:",
        "tests/daemon/test_recovery.py::test_another_boot_voids_every_lease",
    ),
    Bug(
        "leases of the dead live on after a restart",
        RECOVERY,
        'return None if alive else f"process {pid} ended while neurond was away"',
        "return None",
        "tests/daemon/test_recovery.py::test_leases_of_the_dead_are_gone_at_the_first_answer",
    ),
    Bug(
        "a pid alone says who a process is",
        PROCESSES,
        "if start_ticks(pid) == ticks:",
        "if start_ticks(pid):",
        "tests/host/test_processes.py::test_a_pid_of_somebody_else_is_not_followed",
    ),
    Bug(
        "a zombie is alive",
        PROCESSES,
        'if state in b"ZXx" and alone:',
        'if state in b"Xx" and alone:',
        "tests/host/test_processes.py::test_a_zombie_is_gone",
    ),
    Bug(
        "a status tool is a holder",
        PROCESSES,
        "return not flags & os.O_PATH and flags & os.O_ACCMODE != os.O_WRONLY",
        "return not flags & os.O_PATH",
        "tests/host/test_processes.py::test_what_does_not_attach_is_no_use",
    ),
    Bug(
        "a mapping is no use",
        PROCESSES,
        "_open_devices(pid, devices) | _mapped_devices(pid, devices)",
        "_open_devices(pid, devices)",
        "tests/host/test_processes.py::test_a_device_that_is_only_mapped_is_in_use",
    ),
    Bug(
        "what can't be seen is free",
        PROCESSES,
        "unreadable.append(pid)",
        "pass",
        "tests/host/test_processes.py::test_others_can_not_be_looked_into_without_rights",
    ),
    Bug(
        "two daemons share a directory",
        RUNDIR,
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        "tests/host/test_rundir.py::test_a_second_daemon_is_refused",
    ),
]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Give a copy of the package and its tests, which lose patience earlier."""
    for part in ("neurond", "tests"):
        shutil.copytree(REPOSITORY / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    change(tmp_path / "tests/harness.py", *IMPATIENT)
    return tmp_path


def change(file: Path, old: str, new: str) -> None:
    """Replace a text that the file has exactly once; what comes out is valid Python."""
    text = file.read_text()
    assert text.count(old) == 1, f"{file.name} has this {text.count(old)} times: {old}"
    text = text.replace(old, new)
    compile(text, str(file), "exec")
    file.write_text(text)


def run(directory: Path, tests: list[str]) -> "subprocess.CompletedProcess[str]":
    """Run tests of a copy on the package of that copy."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    env = os.environ | {"PYTHONPATH": str(directory), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=False)


def test_the_copy_passes_without_a_bug(copy: Path) -> None:
    """Without a bug, these tests pass in the copy, which has all that they need."""
    done = run(copy, sorted({bug.tests for bug in BUGS}))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_bug_is_found(copy: Path, bug: Bug) -> None:
    """The tests fail, and in no other way than by an assertion of theirs, when the bug is in."""
    change(copy / bug.file, bug.old, bug.new)
    done = run(copy, [bug.tests])
    assert done.returncode == 1, f"not found: {bug.claim}\n{done.stdout}{done.stderr}"
    assert f"FAILED {bug.tests}" in done.stdout, done.stdout
    assert "did not get ready" not in done.stdout, done.stdout
