"""Who gets which chips, who waits, and what every refusal says."""

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from neurond.catalog import look_up
from neurond.ledger.chips import chips_of
from neurond.ledger.errors import InvalidRequest, NoCapacity, NoSuchChip, NoSuchLease, Refused, clock
from neurond.ledger.events import (
    ChipAdded,
    ChipChanged,
    ChipRemoved,
    LeaseBound,
    LeaseDraining,
    LeaseEnded,
    LeaseGranted,
    LeaseQueued,
)
from neurond.ledger.leases import ByContainer, Want
from neurond.ledger.ledger import KEPT_ENDED, Ledger, describe
from tests.ledger.hosts import ALICE, BOB, CAROL, NOW, SHELL, chips, everything, host, states, take

ALL = Want(every=True)
TIME = datetime.fromtimestamp(NOW).astimezone().strftime("%H:%M")


# -- acquire ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "want", "granted"),
    [
        ("trn1.32xlarge", Want(count=1), (0,)),
        ("trn1.32xlarge", Want(count=4), (0, 1, 2, 3)),
        ("trn1.32xlarge", Want(count=16), tuple(range(16))),
        ("trn1.32xlarge", Want(chips=(5,)), (5,)),
        ("trn1.32xlarge", Want(chips=(7, 6, 5, 4)), (4, 5, 6, 7)),
        ("trn1.32xlarge", ALL, tuple(range(16))),
        ("inf2.24xlarge", Want(count=5), (0, 1, 2, 3, 4)),
        ("inf2.24xlarge", Want(chips=(4, 2, 3)), (2, 3, 4)),
        ("inf1.xlarge", ALL, (0,)),
    ],
)
def test_request_gets_its_chips(name: str, want: Want, granted: tuple[int, ...]) -> None:
    """Chips are leased by count, by number in any order, or all; the grant is one event with the whole lease."""
    ledger = host(name)
    lease, events = ledger.acquire(want, ALICE, SHELL, now=NOW, name="train.py")
    assert events == [LeaseGranted(lease)]
    assert (lease.state, lease.chips) == ("active", granted)
    assert (lease.owner, lease.want, lease.binding, lease.since, lease.name) == (ALICE, want, SHELL, NOW, "train.py")
    assert set(chips_of(ledger.free)) == set(ledger.chips) - set(granted)
    assert ledger.get(lease.id) == lease


def test_a_single_chip_keeps_larger_groups_whole() -> None:
    """After one chip of a row is gone, the next single chips come from that row, though others are free."""
    ledger = host("trn1.32xlarge")
    assert [take(ledger, Want(count=n)).chips for n in (8, 1, 4, 1)] == [
        (0, 1, 2, 3, 4, 5, 6, 7),
        (8,),
        (12, 13, 14, 15),
        (9,),
    ]


def test_all_chips_are_a_legal_set_or_nothing() -> None:
    """A request for all chips of a host that has a hole is refused with what is missing: no set spans a hole."""
    with pytest.raises(NoCapacity, match=r"of 6 that inf2.24xlarge should have \(missing: 2,4\)"):
        take(host("inf2.24xlarge", (0, 1, 3, 5)), ALL)
    assert take(host("trn9.huge", (0, 1, 3, 5)), ALL).chips == (0, 1, 3, 5)


@pytest.mark.parametrize(
    ("want", "error", "sentence"),
    [
        (Want(), InvalidRequest, "0 chips asked: ask for at least 1 chip (-n N), for chips by number (--chips) or"),
        (Want(count=-1), InvalidRequest, "-1 chips asked: ask for at least 1 chip"),
        (Want(count=3), InvalidRequest, "trn1.32xlarge cannot lease 3 chips together: the nearest legal sizes are"),
        (Want(count=3), InvalidRequest, " are 1 and 4 (legal: 1, 4 in a row (0-3, 4-7, 8-11, 12-15), 8 in a half"),
        (Want(count=99), InvalidRequest, "cannot lease 99 chips together: the nearest legal size is 16 (legal: "),
        (Want(count=4, every=True), InvalidRequest, "ask for chips in one way: by count (-n), by number (--chips)"),
        (Want(count=4, chips=(0,)), InvalidRequest, "ask for chips in one way"),
        (Want(chips=(0,), every=True), InvalidRequest, "ask for chips in one way"),
        (Want(chips=(16,)), NoSuchChip, "no chip 16 on this host (have 0-15)"),
        (Want(chips=(-1,)), NoSuchChip, "no chip -1 on this host (have 0-15)"),
        (Want(chips=(16,), missing_ok=True), NoSuchChip, "no chip 16 on this host (have 0-15)"),
        (Want(chips=(4, 5, 4)), InvalidRequest, "chip 4 is named twice in --chips 4,5,4"),
        (Want(chips=(0, 1)), InvalidRequest, "chips 0-1 are not a set that trn1.32xlarge leases together (legal: 1,"),
        (Want(chips=(1, 2, 3, 4)), InvalidRequest, "chips 1-4 are not a set that trn1.32xlarge leases together"),
        (Want(chips=(0, 4, 8, 12)), InvalidRequest, "chips 0,4,8,12 are not a set that"),
    ],
)
@pytest.mark.parametrize("wait", [False, True], ids=["now", "wait"])
def test_senseless_request_is_refused_with_a_sentence(
    want: Want, error: type[Refused], sentence: str, wait: bool
) -> None:
    """What this host can never give is refused, waiting or not, with the numbers in the sentence; nothing changes."""
    ledger = host("trn1.32xlarge")
    before = everything(ledger)
    with pytest.raises(error, match=re.escape(sentence)) as refused:
        take(ledger, want, wait=wait)
    assert refused.value.parameters() == {"message": str(refused.value)}
    assert everything(ledger) == before


@pytest.mark.parametrize(
    ("want", "sentence"),
    [
        (Want(chips=(5,)), "chip 5 asked, 0 free; held: ROW"),
        (Want(chips=tuple(range(8))), "chips 0-7 asked, 4 free (free: 0-3); held: ROW"),
        (Want(count=16), "16 chips asked, 11 free (free: 0-3,8,10-15); held: ROW; NINE"),
        (Want(count=8), "8 chips asked, 11 free but not a legal set (free: 0-3,8,10-15); held: ROW; NINE"),
        (ALL, "all 16 chips asked, 11 free (free: 0-3,8,10-15); held: ROW; NINE"),
    ],
)
def test_busy_chips_name_their_holders(want: Want, sentence: str) -> None:
    """A refusal says what was asked, what is free, who holds the rest and since when; all or nothing is granted."""
    ledger = host("trn1.32xlarge")
    take(ledger, Want(chips=(4, 5, 6, 7)))
    ledger.drain(take(ledger, Want(chips=(9,)), BOB).id, "its process ended", NOW)
    before = everything(ledger)
    with pytest.raises(NoCapacity) as refused:
        take(ledger, want)
    row, nine = f"4-7 by alice (lease k3mq-1, since {TIME})", f"9 by bob (lease k3mq-2, since {TIME}, draining)"
    assert str(refused.value) == sentence.replace("ROW", row).replace("NINE", nine)
    assert everything(ledger) == before


def test_holders_in_the_way_are_attributes_of_the_refusal() -> None:
    """A refusal carries the leases in the way, oldest first, and the client gets their ids."""
    ledger = host("trn1.32xlarge")
    leases = [take(ledger, Want(chips=(index,))) for index in (9, 3, 12)]
    with pytest.raises(NoCapacity) as refused:
        take(ledger, Want(count=8))
    assert refused.value.holders == tuple(leases)
    assert refused.value.parameters()["holders"] == ["k3mq-1", "k3mq-2", "k3mq-3"]
    with pytest.raises(NoCapacity) as refused:
        take(ledger, Want(chips=tuple(range(8, 16))))
    assert refused.value.holders == (leases[0], leases[2])


def test_refusal_names_four_holders_and_counts_the_others() -> None:
    """A refusal stays one readable sentence, however many leases are in the way."""
    ledger = host("trn1.32xlarge")
    for index in range(7):
        take(ledger, Want(chips=(index,)))
    with pytest.raises(NoCapacity, match=r"3 by alice \(lease k3mq-4, since [^)]+\); 3 more$"):
        take(ledger, Want(count=16))


def test_refusal_names_what_a_lease_was_called() -> None:
    """The name that a lease was given is in the sentence."""
    ledger = host("inf1.xlarge")
    ledger.acquire(ALL, ALICE, SHELL, now=NOW, name="train.py")
    with pytest.raises(NoCapacity, match=r"held: 0 by alice \(lease k3mq-1, train\.py, since "):
        take(ledger, ALL)


@pytest.mark.parametrize(("days", "form"), [(0, "%H:%M"), (1, "%Y-%m-%d %H:%M"), (400, "%Y-%m-%d %H:%M")])
def test_moments_of_other_days_have_a_date(days: int, form: str) -> None:
    """A moment of today is a time of day; one of another day has the date."""
    then = datetime(2025, 6, 15, 14, 2).astimezone()
    now = then + timedelta(days=days, hours=1)
    assert clock(then.timestamp(), now.timestamp()) == then.strftime(form)


@pytest.mark.parametrize(
    ("want", "words"),
    [
        (ALL, "all chips"),
        (Want(count=1), "1 chip"),
        (Want(count=4), "4 chips"),
        (Want(chips=(7,)), "chip 7"),
        (Want(chips=(3, 0, 1, 2)), "chips 0-3"),
    ],
)
def test_requests_are_described_in_words(want: Want, words: str) -> None:
    """A request is named as a person would say it."""
    assert describe(want) == words


def test_host_without_chips_refuses() -> None:
    """Where there is no chip, nothing is granted, not even all of none."""
    ledger = host("trn1.32xlarge", ())
    with pytest.raises(NoCapacity, match=r"^all 0 chips asked, of 16 that trn1.32xlarge should have"):
        take(ledger, ALL)
    with pytest.raises(NoCapacity, match=r"^4 chips asked, 0 on the host, 0 free$"):
        take(ledger, Want(count=4))
    with pytest.raises(NoSuchChip, match=r"^no chip 0 on this host \(have none\)$"):
        take(ledger, Want(chips=(0,)))


# -- unknown instance types -----------------------------------------------------------------------------------


def test_unknown_type_leases_single_chips_and_all() -> None:
    """Where the wiring is not known, chips are leased one at a time, by number, or all of them."""
    ledger = host("trn9.96xlarge", range(3))
    leases = [take(ledger, Want(count=1)), take(ledger, Want(chips=(2,)))]
    assert [lease.chips for lease in leases] == [(0,), (2,)]
    for lease in leases:
        ledger.end(lease.id, "released", NOW)
    assert take(ledger, ALL).chips == (0, 1, 2)


@pytest.mark.parametrize(
    ("want", "sentence"),
    [
        (Want(count=2), "cannot lease 2 chips together: the nearest legal size is 1 (legal: one chip at a time)"),
        (Want(count=3), "cannot lease 3 chips together: the nearest legal size is 1 (legal: one chip at a time)"),
        (Want(chips=(0, 1)), "chips 0-1 are not a set that trn9.96xlarge leases together (legal: one chip at a time)"),
    ],
)
def test_unknown_type_leases_no_pairs(want: Want, sentence: str) -> None:
    """Where the wiring is not known, no two chips are claimed to belong together."""
    with pytest.raises(InvalidRequest, match=re.escape(sentence)):
        take(host("trn9.96xlarge", range(3)), want)


# -- release and drain ----------------------------------------------------------------------------------------


def test_release_names_the_lease() -> None:
    """The end of one lease frees its chips and no others."""
    ledger = host("trn1.32xlarge")
    first, second = take(ledger, Want(count=4)), take(ledger, Want(count=4), BOB)
    assert ledger.end(first.id, "released", NOW) == [LeaseEnded(first.id, "released")]
    assert states(ledger, range(8)) == ["free"] * 4 + ["leased"] * 4
    assert list(ledger.leases.values()) == [second]


@pytest.mark.parametrize("command", ["end", "drain", "bind"])
@pytest.mark.parametrize("regranted", [False, True])
def test_stale_command_changes_nothing(command: str, regranted: bool) -> None:
    """A second or late release, or a late binding, is refused by name; whoever has the chips now keeps them."""
    ledger = host("trn1.32xlarge")
    stale = take(ledger, ALL)
    ledger.end(stale.id, "released", NOW)
    if regranted:
        assert take(ledger, ALL, BOB).chips == stale.chips
    before = everything(ledger), list(ledger.ended)
    commands: dict[str, Callable[[], object]] = {
        "end": lambda: ledger.end(stale.id, "released again", NOW),
        "drain": lambda: ledger.drain(stale.id, "released again", NOW),
        "bind": lambda: ledger.bind(stale.id, ByContainer("late")),
    }
    with pytest.raises(NoSuchLease, match=r"^no lease 'k3mq-1': it has ended or never was"):
        commands[command]()
    assert (everything(ledger), list(ledger.ended)) == before


def test_draining_withholds_the_chips() -> None:
    """After the end of a binding, the chips are not given out until the lease ends."""
    ledger = host("trn1.32xlarge")
    lease = take(ledger, ALL)
    assert ledger.drain(lease.id, "its process ended", NOW) == [LeaseDraining(lease.id, "its process ended")]
    assert set(states(ledger, range(16))) == {"draining"}
    assert ledger.free == 0
    with pytest.raises(NoCapacity, match="0 free; held: 0-15 by alice"):
        take(ledger, Want(count=1), BOB)
    ledger.end(lease.id, "no process has its chips open", NOW)
    assert take(ledger, Want(count=1), BOB).chips == (0,)


def test_second_drain_changes_nothing() -> None:
    """A lease that drains keeps the first reason."""
    ledger = host("trn1.32xlarge")
    lease = take(ledger, Want(count=1))
    ledger.drain(lease.id, "its process ended", NOW)
    before = everything(ledger)
    assert ledger.drain(lease.id, "released by root", NOW) == []
    assert everything(ledger) == before
    assert ledger.get(lease.id).why == "its process ended"


@pytest.mark.parametrize("state", ["active", "draining", "queued"])
def test_hand_over_is_one_event_and_leaves_the_chips(state: str) -> None:
    """A lease changes hands from a shell to a container in one event, and holds its chips throughout."""
    ledger = host("inf1.xlarge")
    lease = take(ledger, ALL)
    if state == "draining":
        ledger.drain(lease.id, "its shell ended", NOW)
    elif state == "queued":
        lease = take(ledger, ALL, BOB, wait=True)
    before = ledger.get(lease.id)
    container = ByContainer("job", "c0ffee")
    assert ledger.bind(lease.id, container) == [LeaseBound(lease.id, container)]
    assert ledger.get(lease.id) == replace(before, binding=container)
    assert ledger.free == 0


# -- queue ----------------------------------------------------------------------------------------------------


def test_queue_is_first_come_first_served() -> None:
    """A small request does not overtake a large one that waits, whether it would wait or not."""
    ledger = host("trn1.32xlarge")
    first = take(ledger, Want(count=4))
    large, events = ledger.acquire(ALL, BOB, SHELL, now=NOW, wait=True)
    assert events == [LeaseQueued(large)]
    assert (large.state, large.chips) == ("queued", ())
    with pytest.raises(NoCapacity, match=r"request k3mq-2 \(bob\) waits ahead for all chips$"):
        take(ledger, Want(count=1), CAROL)
    small = take(ledger, Want(count=1), CAROL, wait=True)
    assert small.state == "queued"

    granted = replace(large, state="active", chips=tuple(range(16)), since=NOW + 60)
    assert ledger.end(first.id, "released", NOW + 60) == [LeaseEnded(first.id, "released"), LeaseGranted(granted)]
    assert list(ledger.queue) == [small.id]
    events = ledger.end(large.id, "released", NOW + 90)
    assert events[1:] == [LeaseGranted(replace(small, state="active", chips=(0,), since=NOW + 90))]
    assert not ledger.queue


def test_one_end_serves_all_that_fit() -> None:
    """When chips get free, requests are granted from the head of the queue up to the first that does not fit."""
    ledger = host("trn1.32xlarge")
    held = take(ledger, ALL)
    wants = (Want(count=8), Want(chips=(15,)), Want(count=8), Want(count=1))
    waiting = [take(ledger, want, BOB, wait=True).id for want in wants]
    ledger.end(held.id, "released", NOW)
    assert {lease.id: lease.chips for lease in ledger.leases.values()} == {
        waiting[0]: tuple(range(8)),
        waiting[1]: (15,),
    }
    assert list(ledger.queue) == waiting[2:]


def test_who_waits_for_one_chip_holds_up_nobody_else() -> None:
    """A request for a chip by its number keeps that chip for itself, and lets others have the rest."""
    ledger = host("trn1.32xlarge")
    held = take(ledger, Want(chips=(3,)))
    waiting = take(ledger, Want(chips=(3,)), BOB, wait=True)
    assert take(ledger, Want(count=4), CAROL).chips == (4, 5, 6, 7)
    with pytest.raises(NoCapacity, match=r"held: 3 by alice"):
        take(ledger, Want(chips=(3,)), CAROL)
    events = ledger.end(held.id, "released", NOW)
    assert events[1:] == [LeaseGranted(replace(waiting, state="active", chips=(3,), since=NOW))]


def test_who_waits_is_not_overtaken_for_the_chips_it_named() -> None:
    """A later request gets no chip that an earlier one has named, though it is free while the other is not."""
    ledger = host("trn1.32xlarge")
    take(ledger, Want(chips=(3,)))
    take(ledger, Want(chips=(0, 1, 2, 3)), BOB, wait=True)
    with pytest.raises(NoCapacity, match=r"request k3mq-2 \(bob\) waits ahead for chips 0-3$"):
        take(ledger, Want(chips=(0,)), CAROL)
    assert take(ledger, Want(count=1), CAROL).chips == (4,)


def test_draining_does_not_serve_the_queue() -> None:
    """Who waits gets the chips when the lease ends, not when its end was asked for."""
    ledger = host("inf1.xlarge")
    held, waiting = take(ledger, ALL), take(ledger, ALL, BOB, wait=True)
    ledger.drain(held.id, "its process ended", NOW)
    assert ledger.get(waiting.id).state == "queued"
    ledger.end(held.id, "no process has its chips open", NOW)
    assert ledger.get(waiting.id).state == "active"


def test_request_that_missing_chips_make_impossible_holds_up_nobody() -> None:
    """When a chip vanishes, who waits for it is passed by, keeps the place, and is served first when it is back."""
    ledger = host("trn1.32xlarge")
    take(ledger, Want(count=1))
    large = take(ledger, Want(count=16), BOB, wait=True)
    small = take(ledger, Want(count=1), CAROL, wait=True)
    ledger.look(chips(range(15)), NOW)
    assert ledger.get(small.id).chips == (1,)
    assert take(ledger, Want(count=1), CAROL).chips == (2,)
    ledger.look(chips(range(16)), NOW)
    with pytest.raises(NoCapacity, match=r"request k3mq-2 \(bob\) waits ahead for 16 chips$"):
        take(ledger, Want(count=1), CAROL)
    for lease_id in list(ledger.leases):
        ledger.end(lease_id, "released", NOW)
    assert {lease.id: lease.chips for lease in ledger.leases.values()} == {large.id: tuple(range(16))}


@pytest.mark.parametrize("want", [Want(count=16), Want(chips=tuple(range(16))), Want(chips=(15,))])
def test_waiting_for_what_the_host_cannot_give_is_refused(want: Want) -> None:
    """A request does not wait for chips that are withheld or not there, unless it says so."""
    ledger = host("trn1.32xlarge")
    ledger.look(chips(range(15)) | {15: replace(chips([15])[15], problem="its node is gone")}, NOW)
    with pytest.raises(NoCapacity, match=r"withheld: 15 \(its node is gone\)"):
        take(ledger, want, wait=True)
    assert take(ledger, replace(want, missing_ok=True), wait=True).state == "queued"


@pytest.mark.parametrize("want", [Want(count=4), Want(chips=(0, 1, 2, 3)), ALL])
def test_request_may_wait_for_chips_that_are_not_there_yet(want: Want) -> None:
    """At boot, a request waits for chips that the driver has yet to bring, and gets them when they appear."""
    ledger = host("inf1.6xlarge", ())
    waiting = take(ledger, replace(want, missing_ok=True), wait=True)
    events = ledger.look(chips(range(4)), NOW + 5)
    granted = replace(waiting, state="active", chips=(0, 1, 2, 3), since=NOW + 5)
    assert events == [*(ChipAdded(chip) for chip in chips(range(4)).values()), LeaseGranted(granted)]


def test_chips_that_are_not_there_yet_are_refused_to_who_does_not_wait() -> None:
    """Without waiting, a chip that may come later is refused as not on the host now."""
    with pytest.raises(NoCapacity, match=r"^chip 3 asked, 0 free; withheld: 3 \(not on the host now\)$"):
        take(host("inf1.6xlarge", range(3)), Want(chips=(3,), missing_ok=True))


@pytest.mark.parametrize("command", ["end", "drain"])
def test_cancelled_request_makes_way(command: str) -> None:
    """A request that stops waiting ends at once, and those behind it are served."""
    ledger = host("trn1.32xlarge")
    take(ledger, Want(count=4))
    large = take(ledger, ALL, BOB, wait=True)
    small = take(ledger, Want(count=8), CAROL, wait=True)
    cancel = ledger.end if command == "end" else ledger.drain
    events = cancel(large.id, "its connection closed", NOW)
    assert events == [
        LeaseEnded(large.id, "its connection closed"),
        LeaseGranted(replace(small, state="active", chips=tuple(range(8, 16)))),
    ]


def test_cancelled_request_in_the_middle_leaves_the_others() -> None:
    """When a request in the middle stops waiting, the others keep their order and nothing is granted."""
    ledger = host("inf1.xlarge")
    take(ledger, ALL)
    waiting = [take(ledger, ALL, BOB, wait=True).id for _ in range(3)]
    assert ledger.end(waiting[1], "timed out", NOW) == [LeaseEnded(waiting[1], "timed out")]
    assert list(ledger.queue) == [waiting[0], waiting[2]]


def test_paused_ledger_grants_nothing_and_resumes_in_order() -> None:
    """While paused, leases can end but nothing is granted, to whom it may be; then the queue is served in order."""
    ledger = host("trn1.32xlarge")
    held = take(ledger, ALL)
    waiting = [take(ledger, Want(count=8), BOB, wait=True).id for _ in range(3)]
    ledger.paused = "nothing can be granted: the disk is full"
    assert ledger.end(held.id, "released", NOW) == [LeaseEnded(held.id, "released")]
    ledger.look(chips(range(15)), NOW)
    ledger.look(chips(range(16)), NOW)
    for wait in (False, True):
        with pytest.raises(NoCapacity, match=r"^nothing can be granted: the disk is full$"):
            take(ledger, Want(count=1), CAROL, wait=wait)
    assert (list(ledger.leases), list(ledger.queue)) == ([], waiting)
    assert [getattr(event, "lease", held).id for event in ledger.resume(NOW)] == waiting[:2]
    assert list(ledger.queue) == waiting[2:]


# -- chips ----------------------------------------------------------------------------------------------------


def test_look_tells_what_is_different() -> None:
    """A look at the whole set yields the chips removed, added and changed, in numeric order, and nothing else."""
    ledger = host("trn1.32xlarge", range(11))
    found = chips((*range(2, 10), 12, 11))
    found[9] = replace(found[9], major=241)
    assert ledger.look(found, NOW) == [
        *(ChipRemoved(index) for index in (0, 1, 10)),
        ChipChanged(found[9]),
        ChipAdded(found[11]),
        ChipAdded(found[12]),
    ]
    assert ledger.chips == found
    assert ledger.look(found, NOW) == []


def test_changed_chip_stays_with_its_lease() -> None:
    """A leased chip that comes back under another major is one event, and the lease is as it was."""
    ledger = host("trn1.32xlarge")
    lease = take(ledger, ALL)
    found = {index: replace(chip, major=241) for index, chip in chips(range(16)).items()}
    ledger.look(found, NOW)
    assert ledger.get(lease.id) == lease
    assert ledger.chips == found


def test_vanished_chip_stays_leased_until_its_holder_goes() -> None:
    """A chip that vanishes is lost to its lease; when it returns nobody else gets it until the lease has ended."""
    ledger = host("inf1.6xlarge")
    lease = take(ledger, Want(chips=(1, 2)))
    ledger.look(chips((0, 1, 3)), NOW)
    assert ledger.get(lease.id).lost == (2,)
    assert states(ledger, range(4)) == ["free", "leased", "lost", "free"]
    ledger.look(chips(range(4)), NOW)
    assert states(ledger, range(4)) == ["free", "leased", "leased", "free"]
    assert chips_of(ledger.free) == (0, 3)
    ledger.end(lease.id, "released", NOW)
    assert states(ledger, range(4)) == ["free"] * 4


def test_lease_ends_whose_chip_is_gone() -> None:
    """The end of a lease does not bring back the chip that it has lost."""
    ledger = host("inf1.6xlarge")
    lease = take(ledger, Want(count=2))
    ledger.look(chips((1, 2, 3)), NOW)
    ledger.end(lease.id, "released", NOW)
    assert chips_of(ledger.free) == (1, 2, 3)
    assert ledger.look(chips(range(4)), NOW) == [ChipAdded(chips([0])[0])]
    assert chips_of(ledger.free) == (0, 1, 2, 3)


def test_all_vanished_chips_of_a_lease_are_lost_in_order() -> None:
    """A lease lists its lost chips in numeric order and once each, however often they come and go."""
    ledger = host("trn1.32xlarge")
    lease = take(ledger, ALL)
    for present in (range(10), range(16), range(9), ()):
        ledger.look(chips(present), NOW)
    assert ledger.get(lease.id).lost == tuple(range(16))


def test_quarantined_chip_is_withheld_and_says_why() -> None:
    """A chip with a problem is not given out, and the refusal has the problem in it."""
    ledger = host("inf1.6xlarge")
    ledger.look(chips((0, 1, 3)) | {2: replace(chips([2])[2], problem="its node is gone")}, NOW)
    assert states(ledger, range(4)) == ["free", "free", "quarantined", "free"]
    for want in (Want(count=3), Want(chips=(2,)), ALL):
        with pytest.raises(NoCapacity, match=r"withheld: 2 \(its node is gone\)$"):
            take(ledger, want)
    assert take(ledger, Want(count=2)).chips == (0, 1)


def test_problem_of_a_leased_chip_counts_when_the_lease_ends() -> None:
    """A leased chip that gets a problem stays leased, then is withheld; cured, it goes to who waits for it."""
    ledger = host("inf1.xlarge")
    held, waiting = take(ledger, ALL), take(ledger, ALL, BOB, wait=True)
    broken = {0: replace(chips([0])[0], problem="its node is gone")}
    assert ledger.look(broken, NOW) == [ChipChanged(broken[0])]
    assert states(ledger, [0]) == ["leased"]
    ledger.end(held.id, "released", NOW)
    assert states(ledger, [0]) == ["quarantined"]
    granted = replace(waiting, state="active", chips=(0,))
    assert ledger.look(chips([0]), NOW) == [ChipChanged(chips([0])[0]), LeaseGranted(granted)]


def test_chip_beyond_the_catalog_can_be_leased() -> None:
    """A chip with a higher number than the type should have is there all the same, and leased by itself."""
    ledger = host("trn1.32xlarge", range(17))
    assert take(ledger, Want(chips=(16,))).chips == (16,)
    assert take(ledger, Want(count=16)).chips == tuple(range(16))


# -- ids and history ------------------------------------------------------------------------------------------


def test_lease_ids_are_never_used_again() -> None:
    """Ids count up over grants, requests that wait, ends, and a ledger rebuilt from its events or a snapshot."""
    ledger = Ledger(look_up("inf1.xlarge").topology, "inf1.xlarge")
    journal = [*ledger.open("k3mq"), *ledger.look(chips([0]), NOW)]
    ids = []
    for restart in ("none", "replay", "snapshot") * 3:
        for _ in range(2):
            lease, granted = ledger.acquire(ALL, ALICE, SHELL, now=NOW)
            waiting, queued = ledger.acquire(ALL, BOB, SHELL, now=NOW, wait=True)
            ids += [lease.id, waiting.id]
            journal += granted + queued + ledger.end(waiting.id, "timed out", NOW) + ledger.end(lease.id, "done", NOW)
        if restart != "none":
            events = ledger.snapshot() if restart == "snapshot" else journal
            journal = list(events)
            ledger = Ledger(look_up("inf1.xlarge").topology, "inf1.xlarge")
            ledger.replay(events)
    assert ids == [f"k3mq-{number}" for number in range(1, len(ids) + 1)]


def test_ids_of_another_epoch_do_not_count() -> None:
    """A lease of an earlier epoch that is taken over keeps its id, and new ones count from 1 in the new epoch."""
    ledger = host("inf1.6xlarge")
    old = replace(take(host("inf1.6xlarge"), Want(count=1)), id="abcd-70")
    ledger.replay([LeaseGranted(old)])
    assert [take(ledger, Want(count=1)).id for _ in range(2)] == ["k3mq-1", "k3mq-2"]
    assert list(ledger.leases) == ["abcd-70", "k3mq-1", "k3mq-2"]


def test_replay_of_a_torn_journal_goes_on() -> None:
    """Events about leases that are not known, as after lost lines of a journal, change nothing."""
    ledger = host("inf1.6xlarge")
    before = everything(ledger)
    ledger.replay([LeaseDraining("k3mq-9", "?"), LeaseBound("k3mq-9", SHELL), LeaseEnded("k3mq-9", "?")])
    assert everything(ledger) == before
    assert not ledger.ended


def test_grant_that_is_read_twice_counts_once() -> None:
    """A grant that stands in the journal twice changes nothing the second time."""
    ledger = host("inf1.6xlarge")
    lease = take(ledger, Want(count=2))
    before = everything(ledger)
    ledger.replay([LeaseGranted(lease)])
    assert everything(ledger) == before


def test_ended_leases_are_remembered_as_they_were() -> None:
    """The history has leases and requests as they were last, with the first reason of their end, latest last."""
    ledger = host("inf1.xlarge")
    lease, waiting = take(ledger, ALL), take(ledger, ALL, BOB, wait=True)
    ledger.end(waiting.id, "timed out", NOW)
    ledger.drain(lease.id, "its process ended", NOW)
    ledger.end(lease.id, "no process has its chips open", NOW)
    assert list(ledger.ended) == [
        (waiting, "timed out"),
        (replace(lease, state="draining", why="its process ended"), "its process ended"),
    ]


def test_history_is_bounded() -> None:
    """Only the latest leases are remembered."""
    ledger = host("inf1.xlarge")
    for _ in range(KEPT_ENDED + 5):
        ledger.end(take(ledger, ALL).id, "released", NOW)
    assert [lease.id for lease, _ in ledger.ended] == [f"k3mq-{number}" for number in range(6, KEPT_ENDED + 6)]


def test_a_refusal_for_the_queues_sake_says_nothing_else() -> None:
    """Who is refused only because somebody waits ahead is told that, and that the chips are free."""
    ledger = host("trn1.32xlarge")
    take(ledger, Want(count=4))
    take(ledger, Want(count=16), BOB, wait=True)
    said = r"12 free \(free: 4-15\); held: .*; request k3mq-2 \(bob\) waits ahead"
    with pytest.raises(NoCapacity, match=said) as why:
        take(ledger, Want(count=1))
    assert "legal" not in str(why.value)


def test_all_chips_are_those_that_the_host_should_have() -> None:
    """A request for all chips that waits for missing ones is served when the last one has come."""
    ledger = host("trn1.32xlarge", ())
    waiting = take(ledger, Want(every=True, missing_ok=True), wait=True)
    ledger.look(chips(range(15)), NOW)
    assert ledger.get(waiting.id).state == "queued"
    ledger.look(chips(range(16)), NOW)
    assert ledger.get(waiting.id).chips == tuple(range(16))


def test_a_chip_beyond_the_type_widens_it_while_it_is_there() -> None:
    """A fifth chip on a host of four can be leased with the others, and no longer when it has gone, replayed or not."""
    ledger = host("inf1.6xlarge", range(5))
    assert max(ledger.topology.sizes) == 5
    ledger.look({index: ledger.chips[index] for index in range(4)}, NOW)
    assert max(ledger.topology.sizes) == 4


def test_a_lease_that_is_granted_twice_holds_what_it_was_granted_last() -> None:
    """A damaged journal that grants a lease other chips leaves none of the first ones held for ever."""
    ledger = host("inf1.6xlarge")
    lease = take(ledger, Want(count=1))
    ledger.replay([LeaseGranted(replace(lease, chips=(3,)))])
    ledger.end(lease.id, "over", NOW)
    assert ledger.free == 0b1111
