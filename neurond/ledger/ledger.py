"""The ledger of one host: which chips there are, who holds them, who waits.

A command computes the events that follow from it, applies them and returns them, or raises Refused and changes
nothing. `replay` applies events from elsewhere (the journal); `snapshot` gives events that rebuild the state.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from typing import Any, Literal

from neurond.ledger.chips import Chip, User, chips_of, mask_of
from neurond.ledger.errors import InvalidRequest, NoCapacity, NoSuchChip, NoSuchLease, why_not
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
    LeaseRevived,
    LeaseStuck,
    Opened,
)
from neurond.ledger.leases import Binding, Lease, Owner, Want
from neurond.ledger.topology import Topology
from neurond.ledger.words import ranges

KEPT_ENDED = 200
MOST_NAMED = 3
"""How many processes a sentence names."""
ChipState = Literal["free", "leased", "draining", "stuck", "foreign", "lost", "quarantined"]


class Ledger:
    """Chips, leases and the queue of one host.

    `instance_type` is the name that the rules are said to come from ("trn1.32xlarge"), for sentences only; `uptime`
    gives the seconds since boot.
    """

    def __init__(self, topology: Topology, instance_type: str, uptime: Callable[[], float] = lambda: 0.0) -> None:
        self.topology = topology
        self._type_width = topology.width
        self.instance_type = instance_type
        self._uptime = uptime
        self.epoch = ""
        self.chips: dict[int, Chip] = {}
        self.foreign: dict[int, tuple[User, ...]] = {}
        """Who has a chip open without a lease, also where somebody else has a lease for it."""
        self.leases: dict[str, Lease] = {}
        """Leases that hold chips, active or draining, oldest first."""
        self.queue: dict[str, Lease] = {}
        """Requests that wait, first come first."""
        self.paused = ""
        """Why nothing may be granted for now; empty if it may. Leases can still end."""
        self.doubted = 0
        """The mask of the chips that a stranger may just have opened: those who wait get none until that is known."""
        self.ended: deque[tuple[Lease, str]] = deque(maxlen=KEPT_ENDED)
        """Leases and requests that ended lately as they were last, with the reason; latest last."""
        self._next_number = 1
        self._next_id = "-1"
        # Masks and indices of the fold, changed only by _apply and what it calls.
        self._lines: dict[Want, dict[str, int]] = {}  # who waits for the same: ids, and how many came before them
        self._arrivals = 0
        self._claims: int | None = 0  # None where it has to be found out again
        self._waiting: Counter[int] = Counter()
        self._present = 0
        self._usable = 0
        self._held = 0
        self._foreign = 0

    # -- what holds now -------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """The mask of the chips that could be given out now: present, sound, held and used by nobody."""
        return self._usable & ~self._held & ~self._foreign

    def get(self, lease_id: str) -> Lease:
        """Return a lease or a waiting request by its id; raises NoSuchLease."""
        lease = self.leases.get(lease_id) or self.queue.get(lease_id)
        if lease is None:
            raise NoSuchLease(f"no lease {lease_id!r}: it has ended or never was (neurond ps lists the leases)")
        return lease

    def holder_of(self, index: int) -> Lease | None:
        """Return the lease that holds a chip, if any."""
        return next((lease for lease in self.leases.values() if index in lease.chips), None)

    def state_of(self, index: int) -> ChipState:
        """Return the state of a chip that is present, or held though it vanished."""
        holder = self.holder_of(index)
        if index not in self.chips:
            return "lost"
        if holder is not None:
            return "leased" if holder.state == "active" else "stuck" if holder.state == "stuck" else "draining"
        if index in self.foreign:
            return "foreign"
        return "quarantined" if self.chips[index].problem else "free"

    def waits_ahead(self, among: int = -1) -> Lease | None:
        """Return the first waiting request that has a claim on one of these chips, if any."""
        ahead = [next(iter(line.items())) for want, line in self._lines.items() if self._claim(want) & among]
        return self.queue[min(ahead, key=itemgetter(1))[0]] if ahead else None

    def waiting(self, uid: int) -> int:
        """Return how many requests of a user wait."""
        return self._waiting[uid]

    def why_not(self, want: Want, now: float) -> NoCapacity:
        """Return the error that says why this request can't be had now, and who is in the way."""
        if want.every:
            size, asked, wanted = (
                self._present.bit_count(),
                f"all {self._present.bit_count()} chips asked",
                -1,
            )
        elif want.chips:
            size, asked = len(want.chips), f"chip{'s' * (len(want.chips) > 1)} {ranges(want.chips)} asked"
            wanted = mask_of(want.chips)
        else:
            size, asked, wanted = want.count, f"{want.count} chip{'s' * (want.count > 1)} asked", -1
        problems = {i: c.problem for i, c in self.chips.items() if c.problem and wanted >> i & 1}
        for index, users in self.foreign.items():
            if wanted >> index & 1 and self.holder_of(index) is None:
                problems[index] = "in use without a lease by " + ", ".join(map(str, users[:MOST_NAMED]))
        missing = [i for i in want.chips if i not in self.chips]
        if missing:
            problems |= dict.fromkeys(missing, "not on the host now")
        elif want.every and self._present.bit_count() < self.topology.width and self.topology.shape != "single":
            gone = [i for i in range(self.topology.width) if i not in self.chips]
            asked += f", of {self.topology.width} that {self.instance_type} should have (missing: {ranges(gone)})"
        elif not want.chips and self._present.bit_count() < size:
            asked += f", {self._present.bit_count()} on the host"
        holders = [lease for lease in self.leases.values() if mask_of(lease.chips) & wanted]
        fits = bool(self._fit(want, self.free))
        sentence = why_not(asked, self.free & wanted, size, fits=fits, holders=holders, problems=problems, now=now)
        ahead = self.waits_ahead(wanted)
        if ahead is not None and fits:
            sentence += f"; request {ahead.id} ({ahead.owner.name}) waits ahead for {describe(ahead.want)}"
        return NoCapacity(sentence, holders)

    # -- commands -------------------------------------------------------------------------------------------

    def open(self, epoch: str) -> list[Event]:
        """Begin a new ledger, whose lease ids start with `epoch`."""
        return [self._apply(Opened(epoch))]

    def look(self, found: Mapping[int, Chip], now: float) -> list[Event]:
        """Take in the whole set of chips that the host has now."""
        events: list[Event] = [self._apply(ChipRemoved(index)) for index in sorted(self.chips) if index not in found]
        for index in sorted(found):
            if index not in self.chips:
                events.append(self._apply(ChipAdded(found[index])))
            elif self.chips[index] != found[index]:
                events.append(self._apply(ChipChanged(found[index])))
        return events + self._serve(now) if events else events

    def acquire(
        self,
        want: Want,
        owner: Owner,
        binding: Binding,
        *,
        now: float,
        name: str = "",
        wait: bool = False,
        key: str = "",
        ttl: float = 0,
        enforce: bool = False,
        for_container: Literal["", "run", "create"] = "",
    ) -> tuple[Lease, list[Event]]:
        """Grant chips, or queue the request if `wait`; `now` is the wall clock.

        Raises InvalidRequest or NoSuchChip for what can never be, NoCapacity for what can't be now.
        """
        if want.chips or want.every:
            self.check(want)
        mask = self._fit(want, self.free & ~self._claimed())
        if not mask:  # a count for which there is a set is legal
            self.check(want)
        if self.paused:
            raise NoCapacity(self.paused)
        if not mask and not (wait and (want.missing_ok or self._fit(want, self._usable))):
            raise self.why_not(want, now)
        lease = Lease(
            self._next_id,
            "active" if mask else "queued",
            owner,
            want,
            binding,
            now,
            chips_of(mask),
            name,
            key=key,
            ttl=ttl,
            enforce=enforce,
            for_container=for_container,
            up=self._uptime(),
        )
        return lease, [self._apply(LeaseGranted(lease) if mask else LeaseQueued(lease))]

    def resume(self, now: float) -> list[Event]:
        """Grant again, beginning with those who waited meanwhile."""
        self.paused = ""
        return self._serve(now)

    def settle(self, doubted: int, now: float) -> list[Event]:
        """Doubt only these chips from now on, and serve those who wait for others."""
        self.doubted = doubted
        return self._serve(now)

    def bind(self, lease_id: str, binding: Binding) -> list[Event]:
        """Bind a lease to something else, as one event; the chips stay held throughout."""
        self.get(lease_id)
        return [self._apply(LeaseBound(lease_id, binding))]

    def adopt(
        self, owner: Owner, binding: Binding, chips: tuple[int, ...], *, now: float, name: str = ""
    ) -> tuple[Lease, list[Event]]:
        """Turn a use without a lease into a lease in place, whatever set of chips it is.

        Raises NoSuchChip, or NoCapacity if one of the chips is leased to somebody.
        """
        want = Want(chips=tuple(sorted(chips)))
        missing = [index for index in want.chips if index not in self.chips]
        if missing or not chips:
            raise NoSuchChip(f"no chip {missing[0] if missing else ''} on this host (have {ranges(self.chips)})")
        if mask_of(want.chips) & self._held:
            raise self.why_not(want, now)
        lease = Lease(self._next_id, "active", owner, want, binding, now, want.chips, name, up=self._uptime())
        return lease, [self._apply(LeaseGranted(lease))]

    def used(self, users: Mapping[int, tuple[User, ...]], now: float) -> list[Event]:
        """Take in who uses chips without a lease, by chip: the whole set, as it is now."""
        events: list[Event] = [
            self._apply(ChipForeign(index, users.get(index, ())))
            for index in sorted(self.foreign.keys() | users.keys())
            if users.get(index, ()) != self.foreign.get(index, ())
        ]
        return events + self._serve(now) if events else events

    def stick(self, lease_id: str, users: tuple[User, ...]) -> list[Event]:
        """Note that a lease drains for too long, or who is in the way now."""
        self.get(lease_id)
        return [self._apply(LeaseStuck(lease_id, users))]

    def by_key(self, uid: int, key: str) -> Lease | None:
        """Return the lease or request of a user that carries this key, unless it is at its end."""
        living = (*self.leases.values(), *self.queue.values())
        same = (lease for lease in living if lease.key == key and lease.owner.uid == uid)
        return next((lease for lease in same if lease.state in {"active", "queued"}), None)

    def drain(self, lease_id: str, reason: str, now: float) -> list[Event]:
        """Note the end of a binding: the chips stay withheld until `end`. A second time changes nothing.

        A waiting request ends at once, which may serve those behind it.
        """
        lease = self.get(lease_id)
        if lease.state == "queued":
            return self.end(lease_id, reason, now)
        return [self._apply(LeaseDraining(lease_id, reason))] if lease.state == "active" else []

    def revive(self, lease_id: str) -> list[Event]:
        """Let a lease go on that was at its end, as what it is bound to has come back before its chips were free."""
        lease = self.get(lease_id)
        return [self._apply(LeaseRevived(lease_id))] if lease.state in {"draining", "stuck"} else []

    def end(self, lease_id: str, reason: str, now: float) -> list[Event]:
        """End a lease or a waiting request, and serve the queue. Raises NoSuchLease the second time."""
        lease = self.get(lease_id)
        ended = self._apply(LeaseEnded(lease_id, reason))
        if not self.queue or (lease.chips and not mask_of(lease.chips) & self._claimed()):
            return [ended]  # nobody waits for these chips
        return [ended, *self._serve(now)]

    # -- fold -----------------------------------------------------------------------------------------------

    def replay(self, events: Iterable[Event]) -> None:
        """Apply events that were decided before, in their order."""
        for event in events:
            self._apply(event)

    def snapshot(self) -> list[Event]:
        """Return events that rebuild this state, but for the memory of what has ended."""
        return [
            Opened(self.epoch, self._next_number),
            *(ChipAdded(self.chips[index]) for index in sorted(self.chips)),
            *(ChipForeign(index, users) for index, users in sorted(self.foreign.items())),
            *(LeaseGranted(lease) for lease in self.leases.values()),
            *(LeaseQueued(lease) for lease in self.queue.values()),
        ]

    def _apply(self, event: Event) -> Event:  # noqa: C901 - one place where state changes, a case per event
        """Change the state as one event says. Unknown leases are no error: a journal may have lost lines."""
        match event:
            case LeaseGranted():
                self._on_granted(event.lease)
            case LeaseEnded():
                self._on_ended(event.id, event.reason)
            case LeaseDraining(lease_id, reason):
                self._change(lease_id, state="draining", why=reason)
            case LeaseQueued(lease):
                self._on_queued(lease)
            case LeaseBound(lease_id, binding):
                self._change(lease_id, binding=binding)
            case ChipAdded(chip) | ChipChanged(chip):
                self._on_chip(chip)
            case ChipRemoved(index):
                self._on_chip_removed(index)
            case ChipForeign(index, users):
                self._on_chip_foreign(index, users)
            case LeaseStuck(lease_id, users):
                self._change(lease_id, state="stuck", users=users)
            case LeaseRevived(lease_id):
                self._change(lease_id, state="active", why="", users=())
            case Opened():
                self.epoch = event.epoch
                self._number(event.next_number)
        return event

    def _change(self, lease_id: str, **what: Any) -> None:
        for place in (self.leases, self.queue):
            if lease_id in place:
                place[lease_id] = replace(place[lease_id], **what)

    def _on_queued(self, lease: Lease) -> None:
        self._leave_queue(lease.id)
        self.queue[lease.id] = lease
        self._arrivals += 1
        self._claims = None
        self._lines.setdefault(lease.want, {})[lease.id] = self._arrivals
        self._waiting[lease.owner.uid] += 1
        self._count(lease.id)

    def _leave_queue(self, lease_id: str) -> Lease | None:
        lease = self.queue.pop(lease_id, None)
        if lease is not None:
            line = self._lines[lease.want]
            del line[lease_id]
            if not line:
                del self._lines[lease.want]
                self._claims = None
            self._waiting[lease.owner.uid] -= 1
            if not self._waiting[lease.owner.uid]:
                del self._waiting[lease.owner.uid]
        return lease

    def _on_granted(self, lease: Lease) -> None:
        if self.queue:
            self._leave_queue(lease.id)
        earlier = self.leases.get(lease.id)
        if earlier is not None:  # only a damaged journal says so
            self._held &= ~mask_of(earlier.chips)
        self.leases[lease.id] = lease
        self._held |= mask_of(lease.chips)
        self._count(lease.id)

    def _on_ended(self, lease_id: str, reason: str) -> None:
        lease = self.leases.pop(lease_id, None) or self._leave_queue(lease_id)
        if lease is not None:
            self._held &= ~mask_of(lease.chips)
            self.ended.append((lease, lease.why or reason))

    def _on_chip(self, chip: Chip) -> None:
        bit = 1 << chip.index
        self.chips[chip.index] = chip
        self._set_width()
        self._present |= bit
        self._usable = self._usable & ~bit if chip.problem else self._usable | bit
        self._claims = None

    def _set_width(self) -> None:
        """Allow for chips beyond what the type should have, for as long as they are there."""
        width = max(self._type_width, max(self.chips, default=-1) + 1)
        if width != self.topology.width:
            self.topology = replace(self.topology, width=width)

    def _on_chip_removed(self, index: int) -> None:
        self.chips.pop(index, None)
        self._set_width()
        self._present &= ~(1 << index)
        self._usable &= ~(1 << index)
        self._claims = None
        holder = self.holder_of(index)
        if holder is not None:
            self.leases[holder.id] = replace(holder, lost=tuple(sorted({*holder.lost, index})))

    def _on_chip_foreign(self, index: int, users: tuple[User, ...]) -> None:
        if users:
            self.foreign[index] = users
            self._foreign |= 1 << index
        else:
            self.foreign.pop(index, None)
            self._foreign &= ~(1 << index)

    # -- rules ----------------------------------------------------------------------------------------------

    def _count(self, lease_id: str) -> None:
        """Never give out a number again that was seen in an event."""
        if lease_id == self._next_id:  # one of our own, as nearly always
            self._number(self._next_number + 1)
            return
        epoch, _, number = lease_id.rpartition("-")
        if epoch == self.epoch and int(number) >= self._next_number:
            self._number(int(number) + 1)

    def _number(self, number: int) -> None:
        self._next_number = number
        self._next_id = f"{self.epoch}-{number}"

    def _fit(self, want: Want, among: int) -> int:
        """Return the mask of the chips that this request would get from `among`, or 0."""
        if want.count:
            return self.topology.pick(among, want.count)
        mask = self._present if want.every else mask_of(want.chips)
        if want.every and self.topology.shape != "single" and not self.topology.is_legal(mask):
            return 0  # chips are missing, and those that are there do not belong together
        return mask if mask & among == mask else 0

    def _claim(self, want: Want) -> int:
        """Return the mask of the chips that a request has a claim on while it waits: those it named, else all.

        One that the chips on this host could not serve (some are missing) keeps its place, but holds up nobody.
        """
        if not self._fit(want, self._usable):
            return 0
        return mask_of(want.chips) if want.chips else self._usable

    def _claimed(self) -> int:
        """Return the mask of the chips that somebody waits for, whom a later request must not overtake."""
        if self._claims is None:
            self._claims = 0
            for want in self._lines:
                self._claims |= self._claim(want)
        return self._claims

    def _serve(self, now: float) -> list[Event]:
        """Grant to those who wait, in their order; nobody gets a chip that one before waits for.

        Where one can't be served, those who came later for the same can't either, so only the first of each line is
        asked.
        """
        events: list[Event] = []
        claimed = 0
        lines = {} if self.paused else dict(self._lines)
        while lines and claimed != self._usable:
            want, line = min(lines.items(), key=_first_arrival) if len(lines) > 1 else next(iter(lines.items()))
            mask = self._fit(want, self.free & ~self.doubted & ~claimed)
            if mask:
                lease = self.queue[next(iter(line))]
                granted = replace(lease, state="active", chips=chips_of(mask), since=now, up=self._uptime())
                events.append(self._apply(LeaseGranted(granted)))
            else:
                claimed |= self._claim(want)
            if not mask or not line:
                del lines[want]
        return events

    def check(self, want: Want) -> None:
        """Raise InvalidRequest or NoSuchChip for what this kind of host can never give."""
        given = (want.count != 0) + bool(want.chips) + want.every
        if given != 1 or want.count < 0:
            raise InvalidRequest(
                f"{want.count} chips asked: ask for at least 1 chip (-n N), for chips by number (--chips) or --all"
                if given < 2
                else "ask for chips in one way: by count (-n), by number (--chips) or --all"
            )
        if want.count:
            self._check_count(want.count)
        elif want.chips:
            self._check_chips(want)

    def _check_count(self, count: int) -> None:
        if count in self.topology.sizes:
            return
        nearest = " and ".join(str(size) for size in self.topology.nearest_sizes(count))
        raise InvalidRequest(
            f"{self.instance_type} cannot lease {count} chips together: the nearest legal "
            f"size{'s are' if ' ' in nearest else ' is'} {nearest} (legal: {self.topology.describe()})"
        )

    def _check_chips(self, want: Want) -> None:
        twice = next((one for one, next_one in pairwise(sorted(want.chips)) if one == next_one), None)
        if twice is not None:
            raise InvalidRequest(f"chip {twice} is named twice in --chips {','.join(map(str, want.chips))}")
        missing = [index for index in want.chips if index not in self.chips]
        never = [index for index in missing if not (want.missing_ok and 0 <= index < self.topology.width)]
        if never:
            raise NoSuchChip(f"no chip {never[0]} on this host (have {ranges(self.chips)})")
        if not self.topology.is_legal(mask_of(tuple(sorted(want.chips)))):
            raise InvalidRequest(
                f"chips {ranges(want.chips)} are not a set that {self.instance_type} leases together "
                f"(legal: {self.topology.describe()})"
            )


def _first_arrival(line: tuple[Want, dict[str, int]]) -> int:
    return next(iter(line[1].values()))


def describe(want: Want) -> str:
    """Say what a request asks for: "4 chips", "chips 0-3", "all chips"."""
    if want.every:
        return "all chips"
    if want.chips:
        return f"chip{'s' * (len(want.chips) > 1)} {ranges(want.chips)}"
    return f"{want.count} chip{'s' * (want.count > 1)}"
