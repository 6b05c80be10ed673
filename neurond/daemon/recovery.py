"""What an earlier daemon left behind, compared with what is true now, before anything is granted.

The journal is replayed, then every lease is held against its process, container or deadline. What can't be found out
counts as in use. Each lease that is not taken over is named in the log with the reason.
"""

import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass

import structlog

from neurond.daemon import labels, openable
from neurond.host import journal, processes
from neurond.host.docker import Container, Engine, EngineError, EngineUnreachable
from neurond.ledger.chips import Chip, mask_of
from neurond.ledger.events import Event, LeaseEnded, LeaseGranted
from neurond.ledger.leases import ByConnection, ByContainer, ByProcess, ByTime, Lease, Owner, Want, container_ids
from neurond.ledger.ledger import Ledger

log = structlog.get_logger()

ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"
LEASE_ID = re.compile(r"[a-z0-9]{4}-[0-9]{1,12}")
UNUSABLE = {"corrupt", "newer"}


@dataclass(frozen=True, slots=True)
class Recovered:
    """The sequence number of the last event in the old journal, and the events that recovery added to the ledger."""

    seq: int
    events: list[Event]


def recover(ledger: Ledger, keeper: journal.Journal, engine: Engine, home: str, chips: dict[int, Chip]) -> Recovered:
    """Fill the ledger from the journal, and compare it with chips and processes as they are.

    Containers are compared by the first look at them, before anything is granted; only a journal that is gone is
    made up for from the containers of this daemon (`home` is its runtime directory) here.
    """
    history = journal.read(keeper.path, keeper.boot)
    if history.note:
        log.warning("journal.found", verdict=history.verdict, note=history.note)
    if history.verdict in UNUSABLE:
        log.warning("journal.kept_aside", path=str(keeper.keep_aside()))
    now = time.time()
    events: list[Event] = []
    if history.verdict == "other boot":
        _say_what_is_void(history)
    else:
        _replay(ledger, history)
    if history.verdict in {"new", "other boot", *UNUSABLE} or not ledger.epoch:
        events += ledger.open("".join(secrets.choice(ALPHABET) for _ in range(4)))
    events += ledger.look(chips, now)
    for lease in (*ledger.leases.values(), *ledger.queue.values()):
        reason = why_over(lease)
        if reason:
            events += ledger.drain(lease.id, reason, now)
    if history.verdict in {"new", *UNUSABLE}:
        events += _adopt(ledger, engine, home, now)
    return Recovered(history.seq, events)


def _replay(ledger: Ledger, history: journal.History) -> None:
    """Replay a journal. Where lines are damaged, the end of a lease may be among them: a later grant then tells."""
    for record in history.records:
        if isinstance(record.event, LeaseGranted):
            wanted = mask_of(record.event.lease.chips)
            for lease in [lease for lease in ledger.leases.values() if mask_of(lease.chips) & wanted]:
                if lease.id != record.event.lease.id:
                    ledger.replay([LeaseEnded(lease.id, "its chips were granted to another lease later")])
        ledger.replay([record.event])


def why_over(lease: Lease) -> str | None:
    """Say why a lease is over, or None if it lives on as far as can be told without asking the engine."""
    if lease.state == "queued":
        return "its request was waiting when neurond stopped"
    match lease.binding:
        case ByProcess(pid, ticks) if not lease.for_container:
            try:
                alive = processes.start_ticks(pid) == ticks
            except processes.ProcessGone:
                alive = False
            return None if alive else f"process {pid} ended while neurond was away"
        case ByConnection():
            return "its connection ended with the daemon"
        case ByTime(deadline):
            return None if deadline > processes.boottime() else "its time limit passed while neurond was away"
        case _:
            return None  # the first look at the containers will tell


def _say_what_is_void(history: journal.History) -> None:
    held: dict[str, Lease] = {}
    for record in history.records:
        if isinstance(record.event, LeaseGranted):
            held[record.event.lease.id] = record.event.lease
        elif isinstance(record.event, LeaseEnded):
            held.pop(record.event.id, None)
    for lease in held.values():
        log.info("lease.dropped", lease=lease.id, chips=list(lease.chips), reason="the host was rebooted")


def _adopt(ledger: Ledger, engine: Engine, home: str, now: float) -> list[Event]:
    """Lease the chips of this daemon's running containers, by the nodes that they really have.

    Labels alone are no proof: an image can carry them, as `docker commit` keeps them.
    """
    known = {one for lease in ledger.leases.values() for one in container_ids(lease.binding)}
    events: list[Event] = []
    for container in _running(engine, home):
        lease_id = container.labels[labels.LEASE]
        if container.id in known or lease_id in ledger.leases or not LEASE_ID.fullmatch(lease_id):
            continue
        chips = tuple(openable.chips_in(ledger, container, home))
        if chips and mask_of(chips) & ledger.free == mask_of(chips):
            granted = LeaseGranted(_lease_of(container, chips, now))
            log.info("lease.rebuilt", lease=granted.lease.id, chips=list(chips), container=container.name)
            ledger.replay([granted])
            events.append(granted)
    return events


def _running(engine: Engine, home: str) -> Iterator[Container]:
    """Yield the running containers of this daemon; one that can't be inspected is left to later looks."""
    try:
        listed = [one for one in engine.containers() if one.lives and one.labels.get(labels.HOME) == home]
        for one in listed:
            try:
                found = engine.inspect(one.id)
            except EngineUnreachable:
                raise
            except EngineError as error:
                log.warning("container.not_inspected", container=one.name, error=str(error))
            else:
                yield from [found] if found is not None else ()
    except EngineError as error:
        log.info("engine.absent", error=str(error), follows="no lease is rebuilt from containers")


def _lease_of(container: Container, chips: tuple[int, ...], now: float) -> Lease:
    uid = labels.uid_of(container.labels) or 0
    return Lease(
        container.labels[labels.LEASE],
        "active",
        Owner(uid, processes.user_name(uid)),
        Want(chips=chips),
        ByContainer(container.name, container.id),
        now,
        chips,
        container.name,
        up=max(0.0, processes.boottime() - processes.age(container.pid)),
    )
