"""The systemd journal: entries over a real datagram socket, and a stream beside it that never makes anyone wait."""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from neurond.host.journald import Journald, Spill, encode, is_behind
from tests.journal import Heard, journal_at


@pytest.fixture
def heard(run_dir: Path) -> Iterator[Heard]:
    """Give a journal that listens."""
    with journal_at(run_dir / "journal") as journal:
        yield journal


@pytest.fixture
def journald(run_dir: Path) -> Iterator[Journald]:
    """Give a way to that journal."""
    to_journal = Journald(str(run_dir / "journal"))
    yield to_journal
    to_journal.close()


def test_the_bytes_of_an_entry() -> None:
    """An entry is what the protocol's document shows: lines, and a size before a value that has lines itself."""
    assert encode([("MESSAGE", "chip 3"), ("A", "1"), ("A", "2=3")]) == b"MESSAGE=chip 3\nA=1\nA=2=3\n"
    assert encode([("A", "x\ny"), ("B", "")]) == b"A\n\x03\0\0\0\0\0\0\0x\ny\nB=\n"


@pytest.mark.parametrize(
    "value", ["", "x", "two\nlines", "\n", "\n\nA=b\n", "Fu\N{LATIN SMALL LETTER SHARP S}=", "\x1b\0"]
)
def test_any_value_arrives_as_it_is(journald: Journald, heard: Heard, value: str) -> None:
    """What looks like a field or an end within a value is a part of that value."""
    journald.send(encode([("MESSAGE", value), ("MESSAGE", "2"), ("LAST", "3")]))
    assert heard.read() == [{"MESSAGE": [value, "2"], "LAST": ["3"]}]


def test_a_name_that_is_no_unicode_is_sent_all_the_same(journald: Journald, heard: Heard) -> None:
    """Half a character, as in the name of a process, is written as what it is."""
    journald.send(encode([("MESSAGE", "pid 3 (\udcff)")]))
    assert heard.read() == [{"MESSAGE": ["pid 3 (\\udcff)"]}]


def test_an_entry_that_fits_no_datagram_comes_as_a_sealed_file(journald: Journald, heard: Heard) -> None:
    """A large entry is handed over as a file in memory that can't be changed; the next small one is a datagram."""
    large = "a line\n" * 3_000_000
    journald.send(encode([("MESSAGE", large)]))
    journald.send(encode([("MESSAGE", "small")]))
    assert heard.read() == [{"MESSAGE": [large]}, {"MESSAGE": ["small"]}]
    assert heard.files == 1


def test_a_busy_journal_is_an_error_and_no_wait(journald: Journald, heard: Heard) -> None:
    """When nobody reads, the entry that has no room is refused at once; all that were taken arrive."""
    sent = 0
    with suppress(BlockingIOError):
        while sent < 1_000_000:
            journald.send(encode([("MESSAGE", str(sent))]))
            sent += 1
    assert 0 < sent < 1_000_000
    assert [entry["MESSAGE"] for entry in heard.read()] == [[str(number)] for number in range(sent)]
    journald.send(encode([("MESSAGE", "again")]))
    assert heard.read()[-1] == {"MESSAGE": ["again"]}


def test_a_journal_may_go_and_come_back(run_dir: Path, journald: Journald) -> None:
    """Without a journal there is an error for each entry; another one at the same path gets the next."""
    path = run_dir / "journal"
    with pytest.raises(FileNotFoundError):
        journald.send(b"MESSAGE=1\n")
    with journal_at(path) as first:
        journald.send(b"MESSAGE=2\n")
        assert first.read() == [{"MESSAGE": ["2"]}]
        first.socket.close()
        with pytest.raises(ConnectionRefusedError):
            journald.send(b"MESSAGE=3\n")
    with journal_at(path) as second:
        journald.send(b"MESSAGE=4\n")
        assert second.read() == [{"MESSAGE": ["4"]}]


def test_stderr_is_the_journal_where_systemd_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JOURNAL_STREAM counts for the very file that it names, so not for a stderr that was sent elsewhere."""
    with (tmp_path / "a").open("wb") as stream, (tmp_path / "b").open("wb") as other:
        monkeypatch.delenv("JOURNAL_STREAM", raising=False)
        assert not is_behind(stream.fileno())
        status = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        assert is_behind(stream.fileno())
        assert not is_behind(other.fileno())
        closed = os.dup(stream.fileno())
    os.close(closed)
    assert not is_behind(closed)


def test_what_a_stream_has_no_room_for_is_kept() -> None:
    """Lines that a full socket does not take are written later, in order and whole; nobody waits for its reader."""
    here, there = socket.socketpair()
    with here, there:
        spill = Spill(here.fileno())
        lines = [f"{number}\n".encode() * 100 for number in range(2000)]
        for line in lines:
            spill.write(line)
            spill.flush()
        assert spill.owes
        assert os.get_blocking(here.fileno()), "the flags are shared with others who have this stream"
        got = b""
        while len(got) < sum(map(len, lines)):
            got += there.recv(1 << 20)
            spill.flush()
        assert got == b"".join(lines)
        assert (spill.owes, spill.lost) == (False, 0)


def test_what_a_stream_never_takes_is_counted() -> None:
    """Lines that nobody reads fill no memory: those beyond a limit, and of a stream that ended, are counted."""
    here, there = socket.socketpair()
    with here:
        with there:
            spill = Spill(here.fileno(), most=1 << 20)
            for _ in range(3 << 10):
                spill.write(b"x" * 1023 + b"\n")
                spill.flush()
            assert 0 < spill.lost < 2 << 10
        spill.flush()
        assert not spill.owes
        assert spill.lost > 2 << 10


def test_a_stream_may_be_a_file(tmp_path: Path) -> None:
    """Lines go to a file as well."""
    with (tmp_path / "log").open("wb") as file:
        spill = Spill(file.fileno())
        spill.write(b"1\n")
        spill.write(b"2\n")
        spill.flush()
    assert (tmp_path / "log").read_bytes() == b"1\n2\n"
