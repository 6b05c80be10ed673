"""The log in the systemd journal: entries of a real daemon on a real socket, their ids, sentences and texts."""

import ast
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from string import Formatter
from typing import Any

import pytest

import neurond
from neurond.daemon.entries import ToJournal, fields_of_line, sentence_of
from neurond.daemon.logs import fields_of
from neurond.daemon.messages import MESSAGES
from neurond.host.journald import Journald, Spill
from neurond.ledger.events import KINDS
from tests.daemon.support import Raw
from tests.harness import Daemon, eventually
from tests.host.test_journal import EVENTS
from tests.journal import Heard, journal_at

CATALOG = Path(__file__).parents[2] / "systemd/neurond.catalog"
OWN_RUN = """
mount -t tmpfs neurond-test /run
mkdir -p /run/systemd/journal
ln -s {} /run/systemd/journal/socket
exec "$@"
"""
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
LINE = {"timestamp": "2026-12-01T02:03:04.5Z", "level": "info", "event": "lease.revived"}


# -- ids, sentences and texts -----------------------------------------------------------------------------------------


def calls_of_the_log() -> Iterator[tuple[str, set[str], str]]:
    """Yield what the code logs: the event, the fields that it always gives, and where."""
    for file in sorted(Path(neurond.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "log"
                and node.func.attr in LEVELS
            ):
                fields = {keyword.arg for keyword in node.keywords if keyword.arg}
                for part in ast.walk(node.args[0]):
                    if isinstance(part, ast.Constant):
                        yield str(part.value), fields, f"{file.name}:{node.lineno}"


def entries_of_the_catalog() -> dict[str, tuple[str, str]]:
    """Return the event and the text of each id in the catalog."""
    parts = re.split(r"^# (\S+)\n-- ([0-9a-f]{32})\n", CATALOG.read_text(), flags=re.MULTILINE)[1:]
    ids = parts[1::3]
    assert len(set(ids)) == len(ids)
    return {found: (event, text) for event, found, text in zip(parts[::3], ids, parts[2::3], strict=True)}


def test_each_event_has_a_message_and_each_message_an_event() -> None:
    """What the code logs is what the table has, and no id stands for two."""
    assert {event for event, _, _ in calls_of_the_log()} | set(KINDS) | {"log.lost"} == set(MESSAGES)
    assert len({message.id for message in MESSAGES.values()}) == len(MESSAGES)


def test_each_id_has_a_text_and_each_text_an_id() -> None:
    """The catalog has a subject and a text for every id of the code, and for none else."""
    texts = entries_of_the_catalog()
    assert {found: event for found, (event, _) in texts.items()} == {
        message.id: event for event, message in MESSAGES.items()
    }
    for event, text in texts.values():
        head, _, body = text.partition("\n\n")
        assert re.fullmatch(r"Subject: .+\nDefined-By: neurond", head), event
        assert body.strip(), event


def test_sentences_name_fields_that_are_there() -> None:
    """Whatever a sentence speaks of is given wherever that event is logged."""
    for event, fields, where in calls_of_the_log():
        named = {name for _, name, _, _ in Formatter().parse(MESSAGES[event].sentence) if name}
        assert named <= fields, f"{event} in {where}"


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)
def test_every_event_has_its_sentence_and_fields(event: Any) -> None:
    """The sentence of an event has all its words, and the entry has event, id and chips one by one."""
    line = LINE | {"event": event.kind, **fields_of(event)}
    assert "unknown" not in sentence_of(line)
    fields = list(fields_of_line(line))
    assert ("NEUROND_EVENT", event.kind) in fields
    assert ("MESSAGE_ID", MESSAGES[event.kind].id) in fields
    chips = fields_of(event).get("chips", [])
    assert isinstance(chips, list)
    for chip in chips:
        assert ("NEUROND_CHIP", str(chip)) in fields
    assert all(re.fullmatch(r"[A-Z][A-Z0-9_]{0,63}", name) for name, _ in fields)


def test_a_line_that_nobody_foresaw_is_an_entry_too() -> None:
    """An event without a message, with any kind of field, is sent by its name; what is empty is left out."""
    line = LINE | {
        "event": "new.thing",
        "a.b": {"x": 1},
        "l": [1, "2"],
        "none": None,
        "": "",
        "x" * 99: 1,
        "error": "no",
    }
    assert list(fields_of_line(line | {"level": "critical", "exception": "Traceback\nOSError: gone"})) == [
        ("MESSAGE", "new.thing: no: OSError: gone"),
        ("PRIORITY", "2"),
        ("SYSLOG_IDENTIFIER", "neurond"),
        ("NEUROND_EVENT", "new.thing"),
        ("NEUROND_A_B", "x = 1"),
        ("NEUROND_L", "1"),
        ("NEUROND_L", "2"),
        ("NEUROND_" + "X" * 56, "1"),
        ("NEUROND_ERROR", "no"),
        ("NEUROND_EXCEPTION", "Traceback\nOSError: gone"),
    ]


def test_systemd_takes_the_catalog(tmp_path: Path) -> None:
    """Journalctl compiles the catalog without a word, and finds every id in it."""
    directory = tmp_path / "usr/lib/systemd/catalog"
    directory.mkdir(parents=True)
    (directory / CATALOG.name).write_text(CATALOG.read_text())
    command = ["journalctl", "--root", str(tmp_path)]
    done = subprocess.run([*command, "--update-catalog"], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
    listed = subprocess.run([*command, "--list-catalog"], capture_output=True, text=True, check=True).stdout
    assert {line.split()[0] for line in listed.splitlines()} == {message.id for message in MESSAGES.values()}


# -- without a loop ---------------------------------------------------------------------------------------------------


def test_what_a_busy_journal_does_not_take_goes_to_stderr(run_dir: Path) -> None:
    """Where nobody would try again, lines that have no room go to the stream at once; together nothing is missing."""
    here, there = socket.socketpair()
    with here, there, journal_at(run_dir / "journal") as heard:
        journal = Journald(str(heard.path))
        to_journal = ToJournal(journal, Spill(here.fileno()))
        for number in range(2000):
            to_journal.put(LINE | {"lease": f"abcd-{number}", "more": "x" * 1000})
            if number % 100 == 0:
                there.setblocking(False)
        sent = {entry["NEUROND_LEASE"][0] for entry in heard.read()}
        to_journal.put(LINE | {"lease": "last"})
        assert heard.read()[-1]["NEUROND_LEASE"] == ["last"]
        written = b""
        while len(re.findall(rb"\n", written)) < 2000 - len(sent):
            there.settimeout(10)
            written += there.recv(1 << 20)
            to_journal.finish()
            to_journal.put(LINE | {"lease": "more"})
        journal.close()
    spilled = set(re.findall(r"abcd-\d+", written.decode()))
    assert sent
    assert spilled
    assert not sent & spilled
    assert sent | spilled == {f"abcd-{number}" for number in range(2000)}


# -- a daemon -------------------------------------------------------------------------------------------------------


@pytest.fixture
def heard(run_dir: Path) -> Iterator[Heard]:
    """Give a journal that listens."""
    with journal_at(run_dir / "journal") as journal:
        yield journal


@pytest.fixture
def under_journal(run_dir: Path, heard: Heard) -> Iterator[Daemon]:
    """Give a daemon whose stderr is the journal, as far as it can tell."""
    daemon = Daemon(run_dir / "0")
    daemon.log.touch()
    status = daemon.log.stat()
    daemon.env["JOURNAL_STREAM"] = f"{status.st_dev}:{status.st_ino}"
    daemon.prefix = ["unshare", "--mount", "sh", "-c", OWN_RUN.format(shlex.quote(str(heard.path))), "sh"]
    yield daemon.start()
    daemon.close()


@pytest.mark.root
def test_the_life_of_a_lease_is_found_by_its_fields(under_journal: Daemon, heard: Heard) -> None:
    """Under systemd all lines are entries, with lease, chips and owner as fields, and stderr has none."""
    lease = under_journal.call("Acquire", chips=[4, 5, 6, 7], ttl=60, name="a job")["lease"]
    under_journal.call("Release", lease=lease)
    eventually(lambda: heard.of("lease.ended"))
    (granted,) = heard.of("lease.granted")
    assert granted == {
        "MESSAGE": [f"root got chips 4-7 as lease {lease}, bound to its time"],
        "PRIORITY": ["6"],
        "SYSLOG_IDENTIFIER": ["neurond"],
        "MESSAGE_ID": [MESSAGES["lease.granted"].id],
        "NEUROND_EVENT": ["lease.granted"],
        "NEUROND_LEASE": [lease],
        "NEUROND_OWNER": ["root"],
        "NEUROND_BINDING": ["time"],
        "NEUROND_NAME": ["a job"],
        "NEUROND_CHIP": ["4", "5", "6", "7"],
    }
    of_lease = [entry["NEUROND_EVENT"] for entry in heard.read() if entry.get("NEUROND_LEASE") == [lease]]
    assert of_lease == [["lease.granted"], ["lease.ended"]]
    (ready,) = heard.of("neurond.ready")
    assert ready["MESSAGE"] == ["neurond is ready on a trn1.32xlarge with 16 chips and 0 leases"]
    assert under_journal.stop() == 0
    assert [entry["NEUROND_EVENT"] for entry in heard.read()][-1] == ["neurond.stopped"]
    assert under_journal.log.read_text() == ""


@pytest.mark.root
def test_a_journal_that_is_gone_costs_no_line(under_journal: Daemon, heard: Heard) -> None:
    """Without a journal lines are JSON on stderr; once it is back they are entries again."""
    heard.close()
    lease = under_journal.call("Acquire", chips=[3], ttl=60)["lease"]
    (line,) = eventually(lambda: under_journal.logged("lease.granted"))
    assert (line["lease"], line["chips"], line["level"]) == (lease, [3], "info")
    with journal_at(heard.path) as back:
        under_journal.call("Release", lease=lease)
        eventually(lambda: back.of("lease.ended"))


@pytest.mark.root
def test_a_journal_that_hangs_keeps_nobody_waiting(under_journal: Daemon, heard: Heard) -> None:
    """While nobody reads the journal clients are answered, and of each lease every line is in it or on stderr."""
    leases: list[str] = []
    with Raw(under_journal) as client:
        begun = time.monotonic()
        while time.monotonic() - begun < 2 or len(leases) < 100:
            lease = client.ask("Acquire", count=1)["lease"]
            client.ask("Release", lease=lease)
            leases.append(lease)
            time.sleep(0.005)
    eventually(lambda: under_journal.logged("lease.granted"))

    def told(event: str) -> list[str]:
        entries = [entry["NEUROND_LEASE"][0] for entry in heard.of(event)]
        return entries + [line["lease"] for line in under_journal.logged(event)]

    for event in ("lease.granted", "lease.ended"):
        eventually(lambda event=event: len(told(event)) == len(leases))  # type: ignore[misc]
        assert sorted(told(event)) == sorted(leases)


@pytest.mark.root
def test_a_journal_that_is_busy_for_a_moment_gets_all(under_journal: Daemon, heard: Heard) -> None:
    """More lines at once than the journal has room for are entries all the same, in their order."""
    room = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text())
    leases = []
    with Raw(under_journal) as client:
        for _ in range(room // 2 + 20):  # which is not long enough to give the journal up
            lease = client.ask("Acquire", count=1)["lease"]
            client.ask("Release", lease=lease)
            leases.append(lease)
    assert len(heard.of("lease.ended")) < len(leases), "the journal had room for all, so this test shows nothing"
    eventually(lambda: len(heard.of("lease.ended")) == len(leases))
    assert [entry["NEUROND_LEASE"][0] for entry in heard.of("lease.granted")] == leases
    assert under_journal.log.read_text() == ""
