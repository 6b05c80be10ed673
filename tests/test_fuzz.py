"""Input from outside, made up at random: the wire, the journal, sysfs, core lists and the command line's words.

The ordinary run tries few inputs of each; NEUROND_TEST_LONG=1 tries many more.
"""

import argparse
import json
import os
import shutil
import string
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neurond import wire
from neurond.cli.options import chip_list, duration
from neurond.client import NeurondError
from neurond.host import journal
from neurond.host.journal import Journal
from neurond.host.sysfs import MOST_CORES, Sysfs
from neurond.ledger.chips import Chip, User, chips_of, mask_of
from neurond.ledger.cores import BadCoreList, contradiction, parse_cores
from neurond.ledger.events import (
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
    LeaseStuck,
    Opened,
)
from neurond.ledger.leases import Binding, ByConnection, ByContainer, ByProcess, ByTime, Lease, Owner, Want
from neurond.ledger.topology import Topology
from tests.daemon.support import Raw
from tests.harness import Daemon, eventually

T = TypeVar("T")

LONG = os.environ.get("NEUROND_TEST_LONG") == "1"
BOOT = "5f0b2c1e-8a53-4c5b-9d0e-3a4f1d2c6b7a"
tried: Counter[str] = Counter()
"""How many inputs there were, by what they were."""

pytestmark = pytest.mark.timeout(6 * 3600 if LONG else 120)


def budget(few: int, many: int) -> settings:
    """Return how many examples are tried in the ordinary and in the long run."""
    return settings(
        max_examples=many if LONG else few, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )


@pytest.fixture(autouse=True)
def count() -> Iterator[None]:
    """Say how many inputs a test tried."""
    tried.clear()
    yield
    print(", ".join(f"{number} {what}" for what, number in tried.items()))


# -- the wire -------------------------------------------------------------------------------------------------------

EPOCH_GUESS = st.sampled_from(["EPOCH-1", "EPOCH-2", "EPOCH-99999", "never-1", "", "EPOCH-", "1", "\x1b[31m"])
TEXT = st.text(max_size=12) | st.sampled_from(["job", "x" * 128, "x" * 129, "\n", "\ud7ff", "0", "null"])
SECONDS = st.sampled_from([0, 0.001, 0.05, 1, 60, -1, 1e308, wire.MAX_WAIT, wire.MAX_WAIT + 1]) | st.floats(
    allow_nan=False, allow_infinity=False
)
CHIP = st.integers(-1, 17) | st.sampled_from([63, 64, 1 << 31, 1 << 63, -(1 << 63)])
USUAL: dict[str, st.SearchStrategy[Any]] = {
    "action": st.sampled_from(["add", "remove"]),
    "chip": st.integers(12, 16) | CHIP,
    "chips": st.sampled_from([[0], [1], [0, 1, 2, 3], [4, 5, 6, 7], list(range(16)), []]) | st.lists(CHIP, max_size=20),
    "core_numbering": st.sampled_from(["none", "global", "local"]),
    "count": st.sampled_from([1, 4, 8, 16]) | CHIP,
    "lease": EPOCH_GUESS,
    "major": st.none() | st.sampled_from([241, 0, -1, 4095, 4096]),
    "pid": st.sampled_from([0, 1, -1, os.getpid(), 1 << 22, 1 << 31, 1 << 62]),
    "since": st.integers(-1, 40) | st.sampled_from([1 << 40, 1 << 63]),
    "timeout": st.integers(-1, 3),
    "tail": st.integers(-1, 3),
    "ttl": SECONDS,
    "wait": st.sampled_from([0, 0.001, 0.05]),
}
"""What is right for most fields, or nearly so; the others are strings, flags or lists of strings."""

ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
)


def values(name: str, hint: str) -> st.SearchStrategy[Any]:
    """Return good values for a field."""
    if name in USUAL:
        return USUAL[name]
    if "bool" in hint:
        return st.booleans() | st.none()
    return st.lists(TEXT, max_size=3) if "list" in hint else TEXT


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Make a call of one of the methods: right, or with something missing, odd or unknown in it."""
    name = draw(st.sampled_from(sorted(wire.METHODS)))
    fields = msgspec.structs.fields(wire.METHODS[name].parameters)
    required = {field.name: values(field.name, str(field.type)) for field in fields if field.required}
    optional = {field.name: values(field.name, str(field.type)) for field in fields if not field.required}
    parameters: dict[str, Any] = draw(st.fixed_dictionaries(required, optional=optional))
    if name == "Acquire" and draw(st.booleans()):  # mostly one way to ask, else hardly any is right
        for other in ("chips", "all"):
            parameters.pop(other, None)
        parameters["count"] = draw(st.sampled_from([1, 4, 8, 16]))
        if "ttl" in parameters:
            parameters.pop("pid", None)
    flaw = draw(st.sampled_from(["none"] * 6 + ["missing", "odd", "unknown"]))
    if flaw == "unknown":
        parameters[draw(TEXT)] = draw(ODD)
    elif parameters and flaw != "none":
        spoiled = draw(st.sampled_from(sorted(parameters)))
        del parameters[spoiled]
        if flaw == "odd":
            parameters[spoiled] = draw(ODD)
    return name, parameters


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """Make the message of a call; a few are cut or changed."""
    name, parameters = draw(calls())
    call: dict[str, Any] = {"method": f"io.neurond.{name}", "parameters": parameters}
    if draw(st.booleans()) or name == "Watch":
        call["more"] = True
    if draw(st.integers(0, 9)) == 0:
        call["oneway"] = True
    message = json.dumps(call).encode()
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(message)))
        message = message[:at] + draw(st.binary(max_size=3)) + message[at + draw(st.integers(0, 3)) :]
    return message


def check_invariants(daemon: Daemon) -> None:
    """Check that chips and leases, as the daemon lists them, can be true."""
    with daemon.client() as client:
        chips = {chip["neuron_device"]: chip for chip in client.call("ListChips")["chips"]}
        leases = client.call("ListLeases")["leases"]
        findings = client.call("Check")["findings"]
    assert chips.keys() <= set(range(64))
    held = [index for lease in leases for index in lease["chips"]]
    assert len(held) == len(set(held)), leases
    assert set(held) <= chips.keys()
    assert {lease["state"] for lease in leases} <= {"active", "queued", "draining"}
    assert all(chips[index]["state"] in {"leased", "lost", "draining"} for index in held)
    assert {chip["state"] for index, chip in chips.items() if index not in held} <= {"free"}
    assert {finding["kind"] for finding in findings} <= {"missing", "lost"}, findings


def tidy(daemon: Daemon) -> None:
    """End all leases, and plug exactly the chips that the host should have."""
    with daemon.client() as client:
        for lease in client.call("ListLeases")["leases"]:
            client.call("Release", lease=lease["lease"])
        client.call("Check")
        for chip in client.call("ListChips")["chips"]:
            with suppress(NeurondError):  # it may be on its way out already
                client.call("Simulate", chip=chip["neuron_device"], action="remove")
        for index in range(16):
            client.call("Simulate", chip=index, action="add")
        client.call("Check")


def test_the_wire(daemon: Daemon) -> None:
    """Whatever is called with whatever parameters, the daemon lives, keeps its invariants and logs no failure."""
    epoch = daemon.call("Acquire", count=1)["lease"].partition("-")[0].encode()

    @budget(700, 20_000)
    @given(st.lists(frames(), min_size=1, max_size=8))
    def send(messages: list[bytes]) -> None:
        tried["messages on the wire"] += len(messages)
        with Raw(daemon) as fuzzer, daemon.client() as other:
            fuzzer.socket.sendall(b"".join(message.replace(b"EPOCH", epoch) + b"\0" for message in messages))
            assert other.call("Describe")["pid"] == daemon.pid
            fuzzer.socket.settimeout(0.01)
            for _ in messages:  # as many as come soon, as some calls wait and others have no reply
                try:
                    reply = fuzzer.reply()
                except TimeoutError:
                    break
                if reply is None:
                    break
                check_reply(reply)
        if tried["messages on the wire"] % 8 == 0:
            check_invariants(daemon)

    def check_reply(reply: dict[str, Any]) -> None:
        tried["errors" if "error" in reply else "good replies"] += 1
        assert reply.get("error", "io.neurond.").startswith(("io.neurond.", "org.varlink.service."))
        assert "its log has the details" not in str(reply)

    send()
    check_invariants(daemon)
    assert daemon.process is not None
    assert daemon.process.poll() is None
    assert not daemon.logged("server.handler_failed")
    tidy(daemon)
    eventually(daemon.all_free)
    eventually(lambda: len(daemon.states()) == 16)  # a look that was under way may have come after that of Check


# -- the journal ----------------------------------------------------------------------------------------------------

NUMBER = st.integers(0, 1 << 40)
NUMBERS = st.lists(NUMBER, max_size=4).map(tuple)
MOMENT = st.floats(0, 1e12)
SOURCE = st.sampled_from(["sysfs", "catalog", "unknown"])
USERS = st.lists(st.builds(User, NUMBER, TEXT, TEXT, TEXT), max_size=3).map(tuple)
CHIPS = st.builds(
    Chip, NUMBER, TEXT, NUMBER, NUMBER, st.none() | NUMBER, SOURCE, NUMBERS, SOURCE, *[st.none() | TEXT] * 2
)
BINDINGS: st.SearchStrategy[Binding] = st.one_of(
    st.builds(ByProcess, NUMBER, NUMBER),
    st.builds(ByContainer, TEXT, TEXT),
    st.builds(ByConnection, NUMBER),
    st.builds(ByTime, MOMENT),
)
LEASES = st.builds(
    Lease,
    TEXT,
    st.sampled_from(["queued", "active", "draining", "stuck"]),
    st.builds(Owner, NUMBER, TEXT),
    st.builds(Want, NUMBER, NUMBERS, st.booleans(), st.booleans()),
    BINDINGS,
    MOMENT,
    NUMBERS,
    TEXT,
    lost=NUMBERS,
    why=TEXT,
    users=USERS,
)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(Opened, TEXT, NUMBER),
    st.builds(ChipAdded, CHIPS),
    st.builds(ChipChanged, CHIPS),
    st.builds(ChipRemoved, NUMBER),
    st.builds(ChipForeign, NUMBER, USERS),
    st.builds(LeaseQueued, LEASES),
    st.builds(LeaseGranted, LEASES),
    st.builds(LeaseBound, TEXT, BINDINGS),
    st.builds(LeaseDraining, TEXT, TEXT),
    st.builds(LeaseStuck, TEXT, USERS),
    st.builds(LeaseEnded, TEXT, TEXT),
)


def as_text(history: journal.History) -> set[bytes]:
    """Return the records of a history by all that is in them."""
    return {journal.encode_event(record.seq, record.at, record.event) for record in history.records}


def test_the_journal_is_bytes(tmp_path: Path) -> None:
    """Arbitrary bytes, and a valid header before them, are read without an error and give no record."""
    path = tmp_path / "journal"
    header = journal._line(msgspec.json.encode({"journal": journal.VERSION, "boot": BOOT, "seq": 0}))

    @budget(1500, 200_000)
    @given(st.binary(max_size=300), st.booleans())
    def read(content: bytes, headed: bool) -> None:
        tried["files of bytes"] += 1
        path.write_bytes(header + content if headed else content)
        history = journal.read(path, BOOT)
        assert history.records == []
        assert history.verdict in ({"whole", "torn", "corrupt"} if headed else {"corrupt"})

    read()


def test_a_journal_that_is_changed(tmp_path: Path) -> None:
    """A journal whose lines are changed, moved, doubled or lost gives records that were written, and no other."""
    path = tmp_path / "journal"

    @budget(700, 100_000)
    @given(st.lists(EVENTS, min_size=1, max_size=6), st.data())
    def read(events: list[Event], data: st.DataObject) -> None:
        tried["changed journals"] += 1
        keeper = Journal(tmp_path, BOOT)
        keeper.start(0, [])
        for seq, event in enumerate(events, start=1):
            keeper.append([journal.encode_event(seq, 1.5, event)])
        keeper.flush()
        keeper.close()
        written = journal.read(path, BOOT)
        assert written.verdict == "whole"
        assert [record.event for record in written.records] == events
        content = path.read_bytes()
        for _ in range(data.draw(st.integers(1, 3))):
            content = data.draw(changed(content))
        path.write_bytes(content)
        assert as_text(journal.read(path, BOOT)) <= as_text(written)

    read()


@st.composite
def changed(draw: st.DrawFn, content: bytes) -> bytes:
    """Change a file as disks, editors and crashes do."""
    how = draw(st.sampled_from(["cut", "overwrite", "lose a line", "double a line", "swap lines", "zeros"]))
    at = draw(st.integers(0, len(content)))
    if how == "cut":
        return content[:at]
    if how == "zeros":
        return content[:at] + bytes(draw(st.integers(1, 64)))
    if how == "overwrite":
        new = draw(st.binary(max_size=8))
        return content[:at] + new + content[at + len(new) :]
    lines = content.split(b"\n")
    one, other = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
    if how == "lose a line":
        del lines[one]
    elif how == "double a line":
        lines.insert(other, lines[one])
    else:
        lines[one], lines[other] = lines[other], lines[one]
    return b"\n".join(lines)


# -- sysfs ----------------------------------------------------------------------------------------------------------

CONTENT = (
    st.binary(max_size=24)
    | st.text(max_size=8).map(str.encode)
    | st.from_regex(r"\A-?[0-9]{1,9}(:[0-9]{1,10})?\n?\Z").map(str.encode)
    | st.lists(st.integers(-1, 100), max_size=5).map(lambda some: (", ".join(map(str, some)) + "\n").encode())
)
ATTRIBUTES = ("dev", "core_count", "connected_devices", "info/serial_number", "info/architecture/device_name")
PLACES = (*ATTRIBUTES, "info", "moved/core_count", "neuron_core0/core_count", "power/core_count")


def test_sysfs(tmp_path: Path) -> None:
    """Whatever the files of one chip contain, reading does not fail, and its facts are sound or unknown."""
    root = tmp_path / "sys/class/neuron_device"
    sound = root / "neuron1"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/neuron1").touch()
    sound.mkdir(parents=True)
    (sound / "dev").write_text("239:1\n")
    (sound / "core_count").write_text("8")
    sysfs = Sysfs(tmp_path / "sys", tmp_path / "dev", stand_ins=True)

    @budget(700, 50_000)
    @given(st.dictionaries(st.sampled_from(PLACES), CONTENT, max_size=5), st.booleans())
    def read(files: dict[str, bytes], numbered: bool) -> None:
        tried["sysfs trees"] += 1
        odd = root / "neuron0"
        shutil.rmtree(odd, ignore_errors=True)
        odd.mkdir()
        for place, content in sorted(files.items()):
            target = odd / place
            if not odd.joinpath("info").is_file() or not place.startswith("info/"):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
        if numbered:
            (odd / "dev").write_text("239:0\n")
        chips = sysfs.read(sorted(root.iterdir()))
        assert (chips[1].cores, chips[1].problem) == (8, None)
        assert chips.keys() == {0, 1} if numbered else chips.keys() <= {0, 1}
        if 0 in chips:
            check_facts(chips[0])
            json.dumps(msgspec.to_builtins(chips[0]))

    read()


def check_facts(chip: Chip) -> None:
    """Check that what is said of a chip is possible."""
    assert 0 <= chip.major < 10**9
    assert 0 <= chip.minor < 10**9
    assert chip.cores is None or 0 < chip.cores <= MOST_CORES
    assert (chip.cores is None) == (chip.cores_from == "unknown")
    assert list(chip.connected) == sorted(set(chip.connected))
    assert all(0 <= index < 100 for index in chip.connected)
    assert chip.problem is not None  # it has no node, at least


# -- words ----------------------------------------------------------------------------------------------------------

WORDS = st.text(max_size=12) | st.text(alphabet=string.digits + ",-. smhd", max_size=14)
CORE_LISTS = st.lists(st.integers(0, 140), max_size=6).map(lambda some: ",".join(map(str, some)))


def outcome(read: Callable[[str], T], text: str) -> tuple[T | None, str]:
    """Return what is read from a text, or the sentence that refuses it."""
    try:
        return read(text), ""
    except (BadCoreList, argparse.ArgumentTypeError) as error:
        return None, str(error)


@budget(3000, 300_000)
@given(WORDS | CORE_LISTS, st.frozensets(st.integers(0, 127), max_size=8))
def test_core_lists(text: str, leased: frozenset[int]) -> None:
    """A core list is a rising list of numbers or refused with a sentence, and only one within the lease is fitting."""
    tried["core lists"] += 1
    cores, refusal = outcome(parse_cores, text)
    if cores is None:
        assert repr(text) in refusal
        assert contradiction(text, leased) == f"NEURON_RT_VISIBLE_CORES={refusal}"
    else:
        assert cores
        assert cores == sorted(set(cores))
        assert parse_cores(",".join(map(str, cores))) == cores
        assert (contradiction(text, leased) is None) == (set(cores) <= leased)


@budget(2000, 200_000)
@given(
    st.sampled_from(["single", "run", "grid"]), st.integers(1, 64), st.integers(0, (1 << 64) - 1), st.integers(0, 65)
)
def test_topologies(shape: Any, width: int, free: int, size: int) -> None:
    """Any topology's choice is a legal set of the size that was asked, wholly free, or none where there is none."""
    tried["topologies"] += 1
    topology = Topology(shape, width)
    picked = topology.pick(free, size)
    possible = [group for group in topology.groups(size) if group & free == group]
    assert picked in possible if possible else picked == 0
    if picked:
        assert topology.is_legal(picked)
        assert picked.bit_count() == size
        assert mask_of(chips_of(picked)) == picked
    assert topology.describe().isprintable()


@budget(2000, 200_000)
@given(WORDS | CORE_LISTS)
def test_words_of_the_command_line(text: str) -> None:
    """A word is read as chips or as a time, or refused with a sentence that has it; no other error comes up."""
    tried["words"] += 1
    chips, refusal = outcome(chip_list, text)
    if chips is None:
        assert repr(text) in refusal
    else:
        assert chips
        assert all(0 <= chip <= 9999 for chip in chips)
    seconds, refusal = outcome(duration, text)
    if seconds is None:
        assert repr(text) in refusal
    else:
        assert seconds >= 0
