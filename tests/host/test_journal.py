"""The journal: what was written is what comes back, whatever happened to the file in between."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neurond.host import journal
from neurond.host.journal import History, Journal, JournalError, encode_event, read
from neurond.ledger.chips import Chip, User
from neurond.ledger.events import (
    KINDS,
    ChipAdded,
    ChipChanged,
    ChipForeign,
    ChipRemoved,
    Event,
    LeaseBound,
    LeaseDraining,
    LeaseEnded,
    LeaseGranted,
    LeaseQueued,
    LeaseRevived,
    LeaseStuck,
    Opened,
)
from neurond.ledger.leases import (
    BINDINGS,
    Binding,
    ByConnection,
    ByContainer,
    ByProcess,
    ByTask,
    ByTime,
    Lease,
    Owner,
    Want,
)
from tests.host.support import tmpfs

BOOT = "5f0b2c1e-8a53-4c5b-9d0e-3a4f1d2c6b7a"
AT = 1_800_000_000.25
SMALL = 16 << 10

OWNER = Owner(1000, "alice ü \x00 \n\u2028")
PLAIN = Chip(0, "/dev/neuron0", 239, 0)
FULL = Chip(
    15, "/dev/neuron15", 239, 15, 8, "sysfs", (3, 11, 12, 14), "catalog", "0f", "Trainium2", 96 << 30, "no node: “x”"
)
BOUND: tuple[Binding, ...] = (
    ByProcess(4242, 1 << 40),
    ByContainer("neurond-abcd-1"),
    ByContainer("neurond-abcd-1", "c0ffee"),
    ByTask(("neurond-abcd-1-web", "neurond-abcd-1-log"), ("c0ffee", "")),
    ByConnection(17),
    ByTime(12345.678901),
)


def lease(binding: Binding, chips: tuple[int, ...] = (4, 5, 6, 7)) -> Lease:
    """Make a lease in which no field has its default."""
    want = Want(4, chips, every=True, missing_ok=True)
    return Lease(
        "abcd-1",
        "stuck",
        OWNER,
        want,
        binding,
        AT,
        chips,
        name='"job"',
        lost=(5,),
        why="was asked to",
        key="once",
        enforce=True,
        users=(User(4242, "bob", "sleep 600"),),
    )


EVENTS: tuple[Event, ...] = (
    Opened("abcd", 7),
    ChipAdded(PLAIN),
    ChipAdded(FULL),
    ChipChanged(FULL),
    ChipRemoved(15),
    ChipForeign(3, (User(4242, "bob", "python \x1b[31m", "c0ffee"),)),
    ChipForeign(3, ()),
    *(LeaseQueued(lease(binding, ())) for binding in BOUND),
    *(LeaseGranted(lease(binding)) for binding in BOUND),
    *(LeaseBound("abcd-1", binding) for binding in BOUND),
    LeaseDraining("abcd-1", "process 4242 ended"),
    LeaseStuck("abcd-1", (User(1, "?", "?"),)),
    LeaseRevived("abcd-1"),
    LeaseEnded("abcd-1", "released by alice"),
)


def events(history: History) -> list[Event]:
    """Return the bare events of a history."""
    return [record.event for record in history.records]


def write(directory: Path, *wanted: Event, seq: int = 0) -> Path:
    """Write a journal as a daemon does, one flush an event, and return its path."""
    keeper = Journal(directory, BOOT)
    keeper.start(seq, [])
    for number, event in enumerate(wanted, start=seq + 1):
        keeper.append([encode_event(number, AT, event)])
        keeper.flush()
    keeper.close()
    return keeper.path


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Journal]:
    """Give a journal that was begun."""
    keeper = Journal(tmp_path, BOOT)
    keeper.start(0, [])
    yield keeper
    keeper.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a file system of a few pages."""
    with tmpfs(tmp_path / "small", f"size={SMALL}") as path:
        yield path


def fill(directory: Path) -> Path:
    """Use up the rest of a file system."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    return filler


def failed_with(keeper: Journal) -> int | None:
    """Return the error number that the journal remembers while something is owed."""
    return keeper.failure.errno if keeper.failure else None


# -- round trip -----------------------------------------------------------------------------------------------------


def test_the_examples_have_every_kind() -> None:
    """The examples of these tests have every kind of event and of binding, so a new one can't be forgotten."""
    assert {event.kind for event in EVENTS} == set(KINDS)
    assert {type(event) for event in EVENTS} == set(get_args(Event))
    assert {binding.kind for binding in BOUND} == set(BINDINGS)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)
def test_an_event_comes_back_as_it_was(tmp_path: Path, event: Event) -> None:
    """An event that was written is read back equal, with its sequence number and time."""
    history = read(write(tmp_path, event, seq=41), BOOT)
    assert (history.verdict, history.seq, history.note) == ("whole", 42, "")
    assert [(record.seq, record.at, record.event) for record in history.records] == [(42, AT, event)]


def test_a_snapshot_and_what_follows_come_back_in_order(keeper: Journal) -> None:
    """The events of a snapshot end at its sequence number, and later ones follow on."""
    keeper.start(10, [(AT, event) for event in EVENTS[:4]])
    keeper.append([encode_event(11, AT + 1, EVENTS[4])])
    keeper.flush()
    history = read(keeper.path, BOOT)
    assert history.verdict == "whole"
    assert [(record.seq, record.at) for record in history.records] == [
        (7, AT),
        (8, AT),
        (9, AT),
        (10, AT),
        (11, AT + 1),
    ]
    assert events(history) == list(EVENTS[:5])


def test_watchers_get_the_form_of_the_journal() -> None:
    """The JSON for watchers is what stands behind the checksum in the file."""
    for event in EVENTS:
        told = msgspec.json.decode(encode_event(3, AT, event))
        assert journal._record(told) == journal.Record(3, AT, event)


def test_flush_writes_everything_owed_at_once(keeper: Journal) -> None:
    """Nothing is in the file before `flush`, and everything after it."""
    for number, event in enumerate(EVENTS, start=1):
        keeper.append([encode_event(number, AT, event)])
    assert read(keeper.path, BOOT).records == []
    keeper.flush()
    assert events(read(keeper.path, BOOT)) == list(EVENTS)
    assert keeper.records == len(EVENTS)


def test_no_file_is_new(tmp_path: Path) -> None:
    """A host without a journal begins a new one."""
    assert read(tmp_path / "journal", BOOT) == History("new")


def test_nobody_else_can_read_the_file(keeper: Journal) -> None:
    """The file has mode 0600, as made and as compacted, whatever the umask is."""
    mask = os.umask(0)
    try:
        keeper.start(0, [])
    finally:
        os.umask(mask)
    assert keeper.path.stat().st_mode & 0o7777 == 0o600


# -- damage ---------------------------------------------------------------------------------------------------------


def test_a_file_cut_anywhere_gives_the_records_before_the_cut(tmp_path: Path) -> None:
    """A file cut at any byte gives exactly the records before the cut, and is never called corrupt for it."""
    path = write(tmp_path, *EVENTS)
    whole = path.read_bytes()
    records = read(path, BOOT).records
    ends = [n for n in range(len(whole)) if whole[n : n + 1] == b"\n"]
    header, *ends = ends
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        history = read(path, BOOT)
        count = sum(1 for end in ends if end <= cut)
        assert history.records == records[:count], cut
        if cut <= header:
            assert history.verdict == "corrupt", cut
        else:
            clean = cut in ends or whole[cut - 1 : cut] == b"\n"
            assert (history.verdict, history.seq) == ("whole" if clean else "torn", count), cut


def test_a_flipped_bit_costs_one_record(tmp_path: Path) -> None:
    """A damaged byte in the middle makes the file corrupt, and all the other records are still given."""
    path = write(tmp_path, *EVENTS)
    lines = path.read_bytes().split(b"\n")
    records = read(path, BOOT).records
    damaged = len(EVENTS) // 2
    for place in range(len(lines[damaged])):
        line = bytearray(lines[damaged])
        line[place] ^= 1
        path.write_bytes(b"\n".join([*lines[:damaged], bytes(line), *lines[damaged + 1 :]]))
        history = read(path, BOOT)
        assert history.verdict == "corrupt", place
        assert f"line {damaged + 1} " in history.note
        assert history.records == records[: damaged - 1] + records[damaged:], place


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (lambda lines: lines[:3] + lines[4:], [1, 2, 4, 5]),
        (lambda lines: lines[:4] + lines[3:], [1, 2, 3, 3, 4, 5]),
        (lambda lines: [*lines[:3], lines[4], lines[3], *lines[5:]], [1, 2, 4, 3, 5]),
        (lambda lines: [*lines[:4], b"", *lines[4:]], [1, 2, 3, 4, 5]),
        (lambda lines: [lines[0], *lines[2:]], [2, 3, 4, 5]),
    ],
    ids=["missing", "twice", "swapped", "empty line", "first missing"],
)
def test_lines_that_do_not_follow_are_noticed(
    tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], left: list[int]
) -> None:
    """A line that is missing, or is where it does not belong, makes the file corrupt; what can be read is given."""
    path = write(tmp_path, *EVENTS[:5])
    path.write_bytes(b"\n".join(change(path.read_bytes().split(b"\n"))))
    history = read(path, BOOT)
    assert history.verdict == "corrupt"
    assert [record.seq for record in history.records] == left


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_no_damage_makes_up_a_record(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever is written over a part of the file, reading does not fail and gives only records that were written."""
    path = write(tmp_path, *EVENTS)
    content = path.read_bytes()
    records = read(path, BOOT).records
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, min(len(content), start + 400)))
    path.write_bytes(content[:start] + data.draw(st.binary(max_size=400)) + content[end:])
    assert all(record in records for record in read(path, BOOT).records)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"once upon a time\nthere was a chip\n",
        b'{"leases": []}\n',
        b"\x7fELF\x02\x01\x01" + bytes(range(256)) * 8,
        bytes(4096),
        journal._line(msgspec.json.encode([])),
        journal._line(msgspec.json.encode("journal")),
        journal._line(msgspec.json.encode({"journal": 1})),
        b"00000000 \n",
        b"-0000001 {}\n",
    ],
    ids=["empty", "newline", "text", "json", "binary", "zeros", "list", "word", "incomplete", "no json", "sign"],
)
def test_a_foreign_file_is_not_taken_for_a_journal(tmp_path: Path, content: bytes) -> None:
    """A file that neurond did not write is corrupt and has no records, and the note names it."""
    path = tmp_path / "journal"
    path.write_bytes(content)
    history = read(path, BOOT)
    assert (history.verdict, history.records) == ("corrupt", [])
    assert str(path) in history.note
    assert path.read_bytes() == content


def test_a_newer_format_is_left_alone(tmp_path: Path) -> None:
    """A file of a newer neurond gives no records, and the note has both versions."""
    path = tmp_path / "journal"
    path.write_bytes(journal._line(msgspec.json.encode({"journal": 2, "boot": BOOT, "seq": 0})) + b"who knows\n")
    history = read(path, BOOT)
    assert (history.verdict, history.records) == ("newer", [])
    assert "format 2" in history.note
    assert "format 1" in history.note


@pytest.mark.parametrize("tail", [b"", b"torn"])
def test_another_boot_is_said(tmp_path: Path, tail: bytes) -> None:
    """A file of another boot is called that, even with a torn tail; its records are there for the log."""
    path = write(tmp_path, *EVENTS)
    path.write_bytes(path.read_bytes() + tail)
    history = read(path, "another")
    assert history.verdict == "other boot"
    assert BOOT in history.note
    assert events(history) == list(EVENTS)


def test_keep_aside_keeps(tmp_path: Path) -> None:
    """A file that is kept aside has its content under a name of its own, and at its old one until it is replaced."""
    keeper = Journal(tmp_path, BOOT)
    keeper.path.write_bytes(b"what is this?")
    aside = keeper.keep_aside()
    assert aside.name.startswith("journal.")
    assert aside.read_bytes() == keeper.path.read_bytes() == b"what is this?"
    keeper.start(0, [])
    assert aside.read_bytes() == b"what is this?"
    assert read(keeper.path, BOOT).verdict == "whole"
    keeper.close()


# -- compaction -----------------------------------------------------------------------------------------------------


def test_compaction_replaces_by_rename(keeper: Journal) -> None:
    """A compacted journal is another file under the same name; one who still reads the old one sees it unchanged."""
    keeper.append([encode_event(1, AT, EVENTS[0])])
    keeper.flush()
    old = keeper.path.read_bytes()
    with keeper.path.open("rb") as reader:
        keeper.start(1, [(AT, EVENTS[0])])
        assert os.fstat(reader.fileno()).st_ino != keeper.path.stat().st_ino
        assert reader.read() == old
    assert [path.name for path in keeper.path.parent.iterdir()] == ["journal"]
    assert keeper.records == 0


def test_compaction_pays_what_was_owed(keeper: Journal) -> None:
    """What was owed is in the snapshot, so it is not written again."""
    keeper.append([encode_event(1, AT, EVENTS[0])])
    keeper.start(1, [(AT, EVENTS[0])])
    keeper.flush()
    history = read(keeper.path, BOOT)
    assert (history.verdict, events(history)) == ("whole", [EVENTS[0]])


# -- a full file system ---------------------------------------------------------------------------------------------


@pytest.mark.root
def test_a_full_disk_loses_nothing(small_disk: Path) -> None:
    """On a full disk `flush` fails with the reason and the file stays whole; later everything owed is written."""
    keeper = Journal(small_disk, BOOT)
    keeper.start(0, [])
    keeper.append([encode_event(1, AT, EVENTS[0])])
    keeper.flush()
    filler = fill(small_disk)
    owed = [EVENTS[n % len(EVENTS)] for n in range(24)]
    for number, event in enumerate(owed, start=2):
        keeper.append([encode_event(number, AT, event)])
    for _ in range(3):
        with pytest.raises(JournalError, match=os.strerror(errno.ENOSPC)):
            keeper.flush()
        assert failed_with(keeper) == errno.ENOSPC
        history = read(keeper.path, BOOT)
        assert (history.verdict, events(history)) == ("whole", [EVENTS[0]])
    filler.unlink()
    keeper.append([encode_event(26, AT, LeaseEnded("abcd-1", "the last"))])
    keeper.flush()
    history = read(keeper.path, BOOT)
    assert failed_with(keeper) is None
    assert history.verdict == "whole"
    assert events(history) == [EVENTS[0], *owed, LeaseEnded("abcd-1", "the last")]
    keeper.close()


@pytest.mark.root
def test_a_full_disk_does_not_cost_the_old_journal(small_disk: Path) -> None:
    """If there is no room for a compacted journal, the old one is unchanged and goes on."""
    keeper = Journal(small_disk, BOOT)
    keeper.start(0, [])
    keeper.append([encode_event(1, AT, EVENTS[0])])
    keeper.flush()
    filler = fill(small_disk)
    before = keeper.path.read_bytes()
    with pytest.raises(JournalError, match=os.strerror(errno.ENOSPC)):
        keeper.start(1, [(AT, EVENTS[0])])
    assert keeper.is_open
    assert keeper.path.read_bytes() == before
    assert sorted(path.name for path in small_disk.iterdir()) == ["filler", "journal"]
    filler.unlink()
    keeper.append([encode_event(2, AT, EVENTS[1])])
    keeper.flush()
    assert events(read(keeper.path, BOOT)) == list(EVENTS[:2])
    keeper.close()


@pytest.mark.root
def test_a_disk_that_is_full_at_the_start_is_said(small_disk: Path) -> None:
    """Without room for the first file there is none, the failure is kept to be shown, and a later start works."""
    filler = fill(small_disk)
    keeper = Journal(small_disk, BOOT)
    with pytest.raises(JournalError, match=os.strerror(errno.ENOSPC)):
        keeper.start(0, [])
    assert not keeper.is_open
    assert failed_with(keeper) == errno.ENOSPC
    assert list(small_disk.iterdir()) == [filler]
    filler.unlink()
    keeper.start(0, [])
    assert failed_with(keeper) is None
    assert read(keeper.path, BOOT).verdict == "whole"
    keeper.close()
