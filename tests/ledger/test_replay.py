"""Random commands against a plain model: the rules hold after every step, and the events are the whole state."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import chain, takewhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from neurond.ledger.chips import Chip, User
from neurond.ledger.errors import NoSuchLease, Refused
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
)
from neurond.ledger.leases import Binding, ByConnection, ByContainer, ByProcess, ByTime, Lease, Owner, Want
from neurond.ledger.ledger import Ledger
from neurond.ledger.topology import Topology
from tests.ledger.hosts import ALICE, BOB, NOW, chips, everything

pytestmark = pytest.mark.timeout(400)  # to make a failure small, hypothesis takes up to five minutes

Chips = frozenset[int]

TOPOLOGIES = (Topology("grid", 8), Topology("run", 6), Topology("single", 3))
BEYOND = 2
"""How many chips more than its type should have a host can turn out to have."""
INDICES = st.integers(0, 9)
ODD_WANTS = st.builds(
    Want,
    count=st.integers(-1, 9),
    chips=st.lists(INDICES, max_size=3).map(tuple),
    every=st.booleans(),
    missing_ok=st.booleans(),
)
BINDINGS: st.SearchStrategy[Binding] = st.sampled_from(
    [ByProcess(7, 8), ByConnection(7), ByTime(9.5), ByContainer("job"), ByContainer("job", "c0ffee")]
)
KEYS = st.sampled_from(["", "", "", "job 7", "job 8"])
OWNERS = st.sampled_from([ALICE, BOB])
USERS = st.sampled_from([(User(9, "eve", "train"),), (User(9, "eve", "train"), User(10, "eve", "watch", "c0ffee"))])


@cache
def legal_sets(shape: str, width: int) -> list[Chips]:
    """Return the sets that may be leased together on a host with this many chips."""
    if shape == "run":
        return [frozenset(range(a, b + 1)) for a in range(width) for b in range(a, width)]
    groups = (range(4), range(4, 8), range(8)) if shape == "grid" else ()
    return [*(frozenset([index]) for index in range(width)), *map(frozenset, groups)]


def whole(ledger: Ledger) -> tuple[object, ...]:
    """Return the whole state, the uses without a lease included."""
    return (*everything(ledger), ledger.foreign, ledger._foreign)


class Commands(RuleBasedStateMachine):
    """Drives a ledger and a model of it.

    The model has sets of chips instead of masks: `found` are the chips as they were looked at last, `held` the chips
    of each lease, `lost` those of them that vanished at some time, `draining` the leases at their end, `stuck` those
    that were there for too long with who is in the way, `waiting` the requests in the order in which they came, `users`
    who uses chips without a lease, `keys` the leases and requests by owner and key, `over` the ids of what has ended.
    """

    @initialize(topology=st.sampled_from(TOPOLOGIES))
    def start(self, topology: Topology) -> None:
        """Begin with a host of one shape and all its chips."""
        self.topology = topology
        legal = legal_sets(topology.shape, topology.width)
        self.wants = st.one_of(
            st.builds(Want, count=st.sampled_from([len(some) for some in legal]), missing_ok=st.booleans()),
            st.builds(Want, count=st.sampled_from(topology.sizes)),
            st.builds(Want, chips=st.sampled_from([tuple(some) for some in legal]), missing_ok=st.booleans()),
            st.builds(Want, every=st.just(value=True), missing_ok=st.booleans()),
            ODD_WANTS,
        )
        self.ledger = Ledger(topology, "a host")
        self.journal: list[Event] = self.ledger.open("k3mq")
        self.found: dict[int, Chip] = {}
        self.held: dict[str, Chips] = {}
        self.lost: dict[str, Chips] = {}
        self.draining: set[str] = set()
        self.stuck: dict[str, tuple[User, ...]] = {}
        self.waiting: dict[str, Want] = {}
        self.users: dict[int, tuple[User, ...]] = {}
        self.keys: dict[tuple[Owner, str], str] = {}
        self.over: list[str] = []
        self.bindings: dict[str, Binding] = {}
        self.paused = False
        self.look(missing=set(), beyond=set(), broken=set(), major=240)

    # -- the model --------------------------------------------------------------------------------------------

    def sound(self) -> Chips:
        """Return the chips that can be leased at all."""
        return frozenset(index for index, chip in self.found.items() if chip.problem is None)

    def free(self) -> Chips:
        """Return the chips that can be leased now."""
        return self.sound().difference(*self.held.values(), self.users)

    def width(self) -> int:
        """Return one more than the highest chip number that the type has, or the host."""
        return max(self.topology.width, *(index + 1 for index in self.found), 0)

    def legal(self) -> list[Chips]:
        """Return the sets that may be leased together now."""
        return legal_sets(self.topology.shape, self.width())

    def choices(self, want: Want, among: Chips) -> list[Chips]:
        """Return the sets of chips that may be given to this request."""
        if want.every:
            together = self.ledger.topology.shape == "single" or frozenset(self.found) in self.legal()
            sets = [frozenset(self.found)] if self.found and together else []
        elif want.chips:
            sets = [frozenset(want.chips)]
        else:
            sets = [some for some in self.legal() if len(some) == want.count]
        return [some for some in sets if some <= among]

    def makes_sense(self, want: Want) -> bool:
        """Tell whether this host could ever give this."""
        if (want.count != 0) + bool(want.chips) + want.every != 1:
            return False
        if want.chips:
            asked, there = frozenset(want.chips), set(range(self.width()) if want.missing_ok else self.found)
            return len(asked) == len(want.chips) and asked in self.legal() and asked <= there
        return want.every or want.count in {len(some) for some in self.legal()}

    def expected(self, want: Want, *, wait: bool) -> str:
        """Return the state that a request gets, or "refused"."""
        if self.paused or not self.makes_sense(want):
            return "refused"
        claimed = frozenset[int]().union(*(self.claim(other) for other in self.waiting.values()))
        if self.choices(want, self.free() - claimed):
            return "active"
        return "queued" if wait and (want.missing_ok or self.choices(want, self.sound())) else "refused"

    def claim(self, want: Want) -> Chips:
        """Return the chips that nobody behind gets while this waits: those it named, else all that could be had."""
        if not self.choices(want, self.sound()):
            return frozenset()
        return frozenset(want.chips) or self.sound()

    def served(self, events: list[Event]) -> None:
        """Take in grants from the queue: each is a set asked for, and takes nothing that one ahead waits for."""
        assert not (events and self.paused)
        for event in events:
            assert isinstance(event, LeaseGranted)
            lease = event.lease
            assert frozenset(lease.chips) in self.choices(self.waiting[lease.id], self.free())
            for other in takewhile(lease.id.__ne__, self.waiting):
                assert not self.claim(self.waiting[other]) & frozenset(lease.chips)
            del self.waiting[lease.id]
            self.held[lease.id] = frozenset(lease.chips)

    # -- commands ---------------------------------------------------------------------------------------------

    @rule(data=st.data(), binding=BINDINGS, owner=OWNERS, key=KEYS, wait=st.booleans())
    def acquire(self, data: st.DataObject, binding: Binding, owner: Owner, key: str, wait: bool) -> None:
        """Ask for chips, now or (`wait`) later; what is asked again with the same key is there already."""
        want = data.draw(self.wants)
        if (owner, key) not in self.keys:
            self.ask(want, owner, binding, key, wait=wait)

    def ask(self, want: Want, owner: Owner, binding: Binding, key: str, *, wait: bool) -> None:
        """See that chips are granted, queued for or refused as the model says; a refusal changes nothing."""
        before = whole(self.ledger)
        expected = self.expected(want, wait=wait)
        if expected == "refused":
            with pytest.raises(Refused):
                self.ledger.acquire(want, owner, binding, now=NOW, wait=wait, key=key)
            assert whole(self.ledger) == before
            return
        lease, events = self.ledger.acquire(want, owner, binding, now=NOW, wait=wait, key=key)
        assert lease.state == expected
        self.begun(lease, binding)
        if key:
            self.keys[owner, key] = lease.id
        self.journal += events
        if lease.state == "queued":
            assert events == [LeaseQueued(lease)]
            self.waiting[lease.id] = want
        else:
            assert events == [LeaseGranted(lease)]
            assert frozenset(lease.chips) in self.choices(want, self.free())
            self.held[lease.id] = frozenset(lease.chips)

    def begun(self, lease: Lease, binding: Binding) -> None:
        """Take note of a lease or request, whose id is new."""
        assert lease.id not in self.bindings, "an id is used again"
        self.bindings[lease.id] = binding

    @rule(binding=BINDINGS, owner=OWNERS, wanted=st.sets(INDICES, max_size=3))
    def adopt(self, binding: Binding, owner: Owner, wanted: set[int]) -> None:
        """Make a lease of a use: any set of chips, unless one is not there or held; who uses it is looked at later."""
        if not wanted or not wanted <= set(self.found) or wanted.intersection(chain(*self.held.values())):
            before = whole(self.ledger)
            with pytest.raises(Refused):
                self.ledger.adopt(owner, binding, tuple(wanted), now=NOW)
            assert whole(self.ledger) == before
            return
        lease, events = self.ledger.adopt(owner, binding, tuple(wanted), now=NOW)
        assert events == [LeaseGranted(lease)]
        assert (lease.state, lease.chips) == ("active", tuple(sorted(wanted)))
        self.begun(lease, binding)
        self.journal += events
        self.held[lease.id] = frozenset(wanted)

    @rule(users=st.one_of(st.just({}), st.dictionaries(st.integers(0, 3), USERS, min_size=1, max_size=2)))
    def use(self, users: dict[int, tuple[User, ...]]) -> None:
        """Look who uses chips without a lease: each change is an event, then the queue is served."""
        was, self.users = self.users, users
        events = self.ledger.used(users, NOW)
        news = [
            ChipForeign(index, users.get(index, ()))
            for index in sorted(was.keys() | users.keys())
            if was.get(index) != users.get(index)
        ]
        assert events[: len(news)] == news
        self.journal += events
        self.served(events[len(news) :])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        """Note that the binding of a lease ended: a second time changes nothing."""
        lease_id = data.draw(st.sampled_from(list(self.held)))
        events = self.ledger.drain(lease_id, "its process ended", NOW)
        at_its_end = lease_id in self.draining or lease_id in self.stuck
        assert events == ([] if at_its_end else [LeaseDraining(lease_id, "its process ended")])
        self.journal += events
        if not at_its_end:
            self.draining.add(lease_id)
            self.forget_key(lease_id)  # who asks again gets no chips that are about to go

    @precondition(lambda self: self.draining or self.stuck)
    @rule(data=st.data(), users=USERS)
    def stick(self, data: st.DataObject, users: tuple[User, ...]) -> None:
        """Note that a lease drains for too long, or that somebody else is in the way now: its chips stay withheld."""
        lease_id = data.draw(st.sampled_from([*sorted(self.draining), *self.stuck]))
        events = self.ledger.stick(lease_id, users)
        assert events == [LeaseStuck(lease_id, users)]
        self.journal += events
        self.draining.discard(lease_id)
        self.stuck[lease_id] = users

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """End a lease."""
        lease_id = data.draw(st.sampled_from(list(self.held)))
        self.ended(lease_id, self.ledger.end(lease_id, "released", NOW))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), by_drain=st.booleans())
    def cancel(self, data: st.DataObject, by_drain: bool) -> None:
        """End a request that waits: it has nothing to drain."""
        lease_id = data.draw(st.sampled_from(list(self.waiting)))
        self.ended(lease_id, (self.ledger.drain if by_drain else self.ledger.end)(lease_id, "released", NOW))

    def forget_key(self, lease_id: str) -> None:
        """Take it that a key has no lease any more."""
        self.keys = {key: other for key, other in self.keys.items() if other != lease_id}

    def ended(self, lease_id: str, events: list[Event]) -> None:
        """Take in the end of a lease or request, and what follows for the queue."""
        assert events[0] == LeaseEnded(lease_id, "released")
        self.journal += events
        self.held.pop(lease_id, None)
        self.lost.pop(lease_id, None)
        self.waiting.pop(lease_id, None)
        self.stuck.pop(lease_id, None)
        self.draining.discard(lease_id)
        self.forget_key(lease_id)
        self.over.append(lease_id)
        self.served(events[1:])

    @precondition(lambda self: self.held or self.waiting)
    @rule(data=st.data(), binding=BINDINGS)
    def bind(self, data: st.DataObject, binding: Binding) -> None:
        """Bind a lease or request to something else."""
        lease_id = data.draw(st.sampled_from([*self.held, *self.waiting]))
        events = self.ledger.bind(lease_id, binding)
        assert events == [LeaseBound(lease_id, binding)]
        self.journal += events
        self.bindings[lease_id] = binding

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def come_too_late(self, data: st.DataObject) -> None:
        """Name a lease that is over: nothing changes, whoever has its chips now."""
        lease_id = data.draw(st.sampled_from(self.over))
        before = whole(self.ledger)
        with pytest.raises(NoSuchLease):
            self.ledger.drain(lease_id, "late", NOW)
        with pytest.raises(NoSuchLease):
            self.ledger.end(lease_id, "late", NOW)
        with pytest.raises(NoSuchLease):
            self.ledger.bind(lease_id, ByConnection(7))
        with pytest.raises(NoSuchLease):
            self.ledger.stick(lease_id, ())
        assert whole(self.ledger) == before

    @rule(
        missing=st.sets(INDICES, max_size=2),
        beyond=st.sets(st.integers(0, BEYOND - 1), max_size=1),
        broken=st.sets(INDICES, max_size=1),
        major=st.integers(240, 241),
    )
    def look(self, missing: set[int], beyond: set[int], broken: set[int], major: int) -> None:
        """Look at the chips: this yields the news in order, then what follows for the queue."""
        was, width = self.found, self.topology.width
        indices: Iterable[int] = [*range(width), *(width + more for more in beyond)]
        self.found = {
            index: replace(chip, major=major, problem="no node" if index in broken else None)
            for index, chip in chips(indices).items()
            if index not in missing
        }
        events = self.ledger.look(self.found, NOW)
        news: list[Event] = [ChipRemoved(index) for index in was if index not in self.found]
        for index, chip in self.found.items():
            if index not in was:
                news.append(ChipAdded(chip))
            elif chip != was[index]:
                news.append(ChipChanged(chip))
        assert events[: len(news)] == news
        self.journal += events
        for lease_id, held in self.held.items():
            self.lost[lease_id] = self.lost.get(lease_id, frozenset()) | held & (set(was) - set(self.found))
        self.served(events[len(news) :])

    @rule(paused=st.sampled_from([True, False, False, False]))
    def pause_or_resume(self, paused: bool) -> None:
        """Forbid grants for a while, or allow them: then those who waited meanwhile are served in order."""
        self.paused = paused
        if paused:
            self.ledger.paused = "the disk is full"
        else:
            events = self.ledger.resume(NOW)
            self.journal += events
            self.served(events)

    @rule(compacted=st.booleans())
    def restart(self, compacted: bool) -> None:
        """Go on with a ledger made from the events so far, or from a snapshot."""
        if compacted:
            self.journal = self.ledger.snapshot()
        paused, self.ledger = self.ledger.paused, self.replayed(self.journal)
        self.ledger.paused = paused

    def replayed(self, events: list[Event]) -> Ledger:
        """Make a new ledger from events."""
        ledger = Ledger(self.topology, "a host")
        ledger.replay(events)
        return ledger

    # -- what holds after every step --------------------------------------------------------------------------

    @invariant()
    def leases_and_requests_are_those_of_the_model(self) -> None:
        """Leases and requests are the ones that the model has, the latter in its order."""
        assert {lease.id: frozenset(lease.chips) for lease in self.ledger.leases.values()} == self.held
        assert {lease.id: lease.want for lease in self.ledger.queue.values()} == self.waiting
        assert list(self.ledger.queue) == list(self.waiting)
        for lease in self.ledger.leases.values():
            state = "stuck" if lease.id in self.stuck else "draining" if lease.id in self.draining else "active"
            assert (lease.state, lease.users) == (state, self.stuck.get(lease.id, ()))
            assert frozenset(lease.lost) == self.lost.get(lease.id, frozenset())
            assert lease.binding == self.bindings[lease.id]
        for lease in self.ledger.queue.values():
            assert (lease.state, lease.chips, lease.binding) == ("queued", (), self.bindings[lease.id])

    @invariant()
    def a_chip_has_one_holder_at_most(self) -> None:
        """No chip is in two leases."""
        held = [index for lease in self.ledger.leases.values() for index in lease.chips]
        assert len(held) == len(set(held))

    @invariant()
    def a_key_has_one_lease(self) -> None:
        """Each owner's key gives the lease or request that was made with it while that lives, and then none."""
        for owner in (ALICE, BOB):
            for key in ("job 7", "job 8"):
                found = self.ledger.by_key(owner.uid, key)
                assert (found.id if found else None) == self.keys.get((owner, key))

    @invariant()
    def every_known_chip_is_in_one_class(self) -> None:
        """Free, leased, draining, stuck, foreign, quarantined and lost chips are disjoint, and are all chips known."""
        held = {lease.id: set(lease.chips) for lease in self.ledger.leases.values()}
        present = set(self.ledger.chips)
        lost = set().union(*held.values()) - present
        draining = set().union(*(held[lease_id] for lease_id in self.draining)) - lost
        stuck = set().union(*(held[lease_id] for lease_id in self.stuck)) - lost
        leased = set().union(*held.values()) - draining - stuck - lost
        foreign = (set(self.users) & present).difference(*held.values())
        broken = {index for index, chip in self.ledger.chips.items() if chip.problem}.difference(
            foreign, *held.values()
        )
        classes = {
            "lost": lost,
            "draining": draining,
            "stuck": stuck,
            "leased": leased,
            "foreign": foreign,
            "quarantined": broken,
            "free": set(self.free()),
        }
        assert sum(map(len, classes.values())) == len(present | lost), "the classes overlap or leave chips out"
        for name, members in classes.items():
            assert {self.ledger.state_of(index) for index in members} <= {name}

    @invariant()
    def masks_agree_with_chips_and_leases(self) -> None:
        """Chips and leases say which chips are free, and the mask agrees."""
        assert self.ledger.chips == self.found
        assert self.ledger.foreign == self.users
        assert self.ledger.topology == replace(self.topology, width=self.width())
        assert self.ledger.free == sum(2**index for index in self.free())

    @invariant()
    def events_and_snapshot_give_the_same_state(self) -> None:
        """All events so far, or a snapshot, give a ledger that is equal to this one."""
        for events in (self.journal, self.ledger.snapshot()):
            assert whole(self.replayed(events)) == whole(self.ledger)

    @invariant()
    def nobody_waits_for_what_is_free(self) -> None:
        """No wake-up is lost: none of the requests fits into what is free and claimed by nobody ahead."""
        claimed: Chips = frozenset()
        for want in () if self.paused else self.waiting.values():
            assert not self.choices(want, self.free() - claimed)
            claimed |= self.claim(want)


TestCommands = Commands.TestCase
TestCommands.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
