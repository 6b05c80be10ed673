"""What an earlier daemon left behind, compared with what is true now, before anything is granted.

The journal is replayed, then every lease is held against its process, container or deadline. What can't be found out
counts as in use. Each lease that is not taken over is named in the log with the reason.
"""

import re
import secrets
import time
from dataclasses import dataclass

import structlog

from neurond.daemon import containers
from neurond.host import journal, processes
from neurond.host.docker import LABEL, Container, Engine, EngineError
from neurond.ledger.chips import Chip, mask_of
from neurond.ledger.events import Event, LeaseEnded, LeaseGranted
from neurond.ledger.leases import ByConnection, ByContainer, ByProcess, ByTime, Lease, Owner, Want
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


def recover(ledger: Ledger, keeper: journal.Journal, engine: Engine, chips: dict[int, Chip]) -> Recovered:
    """Fill the ledger from the journal, and compare it with chips, processes and containers as they are."""
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
        reason = why_over(lease, engine)
        if reason:
            events += ledger.drain(lease.id, reason, now)
    if history.verdict in {"new", *UNUSABLE}:
        events += _adopt(ledger, engine, now)
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


def why_over(lease: Lease, engine: Engine) -> str | None:
    """Say why a lease is over, or None if it lives on, or if the engine can't be asked about its container."""
    if lease.state == "queued":
        return "its request was waiting when neurond stopped"
    match lease.binding:
        case ByProcess(pid, ticks):
            try:
                alive = processes.start_ticks(pid) == ticks
            except processes.ProcessGone:
                alive = False
            return None if alive else f"process {pid} ended while neurond was away"
        case ByConnection():
            return "its connection ended with the daemon"
        case ByTime(deadline):
            return None if deadline > processes.boottime() else "its time limit passed while neurond was away"
        case ByContainer(_, container_id):
            return _why_container_over(lease, container_id, engine)
        case _:
            return None


def _why_container_over(lease: Lease, container_id: str, engine: Engine) -> str | None:
    try:
        found = engine.inspect(container_id or containers.container_name(lease))
    except EngineError as error:
        log.warning("engine.failed", lease=lease.id, error=str(error), follows="keeping its chips leased")
        return None
    if not container_id and found is not None and found.labels.get(LABEL) != lease.id:
        found = None  # somebody else's, of the name that we had in mind
    return containers.why_over(lease, found)


def _say_what_is_void(history: journal.History) -> None:
    held: dict[str, Lease] = {}
    for record in history.records:
        if isinstance(record.event, LeaseGranted):
            held[record.event.lease.id] = record.event.lease
        elif isinstance(record.event, LeaseEnded):
            held.pop(record.event.id, None)
    for lease in held.values():
        log.info("lease.dropped", lease=lease.id, chips=list(lease.chips), reason="the host was rebooted")


def _adopt(ledger: Ledger, engine: Engine, now: float) -> list[Event]:
    """Lease the chips of running containers that neurond launched, by the nodes that they really have.

    Labels alone are no proof: an image can carry them, as `docker commit` keeps them.
    """
    by_node = {chip.node: chip.index for chip in ledger.chips.values()}
    known = {lease.binding.id for lease in ledger.leases.values() if isinstance(lease.binding, ByContainer)}
    events: list[Event] = []
    try:
        found = [engine.inspect(container.id) for container in engine.containers() if container.lives]
    except EngineError as error:
        log.info("engine.absent", error=str(error), follows="no lease is rebuilt from containers")
        return []
    for container in found:
        lease_id = container.labels[LABEL] if container is not None else ""
        if container is None or container.id in known or lease_id in ledger.leases or not LEASE_ID.fullmatch(lease_id):
            continue
        chips = tuple(sorted(by_node[node] for node in set(container.devices) if node in by_node))
        if chips and mask_of(chips) & ledger.free == mask_of(chips):
            granted = LeaseGranted(_lease_of(container, chips, now))
            log.info("lease.rebuilt", lease=granted.lease.id, chips=list(chips), container=container.name)
            ledger.replay([granted])
            events.append(granted)
    return events


def _lease_of(container: Container, chips: tuple[int, ...], now: float) -> Lease:
    label = container.labels.get(containers.OWNER_LABEL, "")
    uid = int(label) if label.isdigit() else 0
    return Lease(
        container.labels[LABEL],
        "active",
        Owner(uid, processes.user_name(uid)),
        Want(chips=chips),
        ByContainer(container.name, container.id),
        now,
        chips,
        container.name,
    )
