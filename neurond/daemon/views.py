"""The ledger as clients see it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from neurond import wire
from neurond.catalog import InstanceType
from neurond.daemon.broker import Broker
from neurond.host import processes
from neurond.ledger.chips import Chip, User
from neurond.ledger.cores import core_ids
from neurond.ledger.leases import ByConnection, ByContainer, ByProcess, ByTask, ByTime, Lease, OnContainers
from neurond.ledger.ledger import Ledger, describe

Described = Mapping[int, processes.Process | None]
"""Processes by pid, None for those that are gone."""


def chip_view(broker: Broker, index: int, described: Described) -> wire.ChipView:
    """Return one chip, present or lost."""
    ledger, lnc = broker.ledger, broker.rules.lnc
    chip = ledger.chips.get(index)
    lease = ledger.holder_of(index)
    known = chip or Chip(index, f"/dev/neuron{index}", 0, 0, problem="vanished from the host")
    foreign = [user_view(user) for user in ledger.foreign.get(index, ())]
    holders = holders_of(broker, lease, described) if lease is not None else foreign
    return wire.ChipView(
        neuron_device=index,
        state=ledger.state_of(index),
        lease=lease.id if lease else None,
        owner=lease.owner.name if lease else None,
        since=lease.since if lease else None,
        name=lease.name if lease else None,
        holders=holders,
        problem=known.problem,
        enforcement=broker.access.level(lease)[0] if lease else None,
        foreign=foreign,
        node=known.node,
        device=f"{known.major}:{known.minor}",
        bdf=None,
        cpu_affinity=None,
        numa_node=None,
        connected_to=list(known.connected) or None,
        connected_from=known.connected_from,
        nc_count=known.cores // lnc if known.cores else None,
        cores_from=known.cores_from,
        logical_neuroncore_config=lnc if known.cores else None,
        memory_size=known.memory,
        neuroncore_ids=core_ids([index], known.cores, lnc) if known.cores else [],
        serial_number=known.serial,
        device_name=known.device_name,
        neuron_processes=[
            wire.NeuronProcess(holder.pid, holder.command or "", "unknown") for holder in holders if holder.pid
        ],
    )


def holders_of(broker: Broker, lease: Lease, described: Described) -> list[wire.Holder]:
    """Return who has the chips of a lease: by its binding, or at its end whoever has them open still."""
    if lease.state in {"draining", "stuck"}:
        return [user_view(user) for user in broker.left_over(lease.id) or lease.users]
    match lease.binding:
        case ByProcess(pid) | ByConnection(pid):
            process = described.get(pid)
            return [wire.Holder(pid, process.user, process.command)] if process else []
        case ByContainer() | ByTask():
            return [wire.Holder(container=name, container_id=one or None) for name, one in binding_of(lease)]
        case _:
            return []


def binding_of(lease: Lease) -> tuple[tuple[str, str], ...]:
    """Return name and id of the containers that a lease is bound to."""
    return lease.binding.containers if isinstance(lease.binding, OnContainers) else ()


def user_view(user: User) -> wire.Holder:
    """Return a process that has a chip open."""
    return wire.Holder(user.pid, user.user, user.command, None, user.container or None)


def ended_view(broker: Broker, lease: Lease, reason: str) -> wire.LeaseView:
    """Return a lease that has ended, and why."""
    return lease_view(broker, replace(lease, state="ended", why=reason), {})


def lease_view(broker: Broker, lease: Lease, described: Described) -> wire.LeaseView:
    """Return one lease."""
    binding = lease.binding
    holders = holders_of(broker, lease, described) if lease.state != "ended" else []
    holds = lease.state not in {"queued", "ended"}
    level, why_level = broker.access.level(lease) if holds else (None, None)
    named = binding_of(lease)
    until = None
    if isinstance(binding, ByTime):
        until = time.time() + binding.deadline - processes.boottime()
    return wire.LeaseView(
        lease=lease.id,
        state=lease.state,
        chips=list(lease.chips),
        owner=lease.owner.name,
        uid=lease.owner.uid,
        binding=binding.kind,
        since=lease.since,
        name=lease.name,
        pid=binding.pid if isinstance(binding, ByProcess | ByConnection) else None,
        command=holders[0].command if holders else None,
        container=", ".join(name for name, _ in named) or None,
        container_id=", ".join(one for _, one in named if one) or None,
        until=until,
        lost=list(lease.lost),
        asked=describe(lease.want),
        enforcement=level,
        enforcement_why=why_level,
        users=[user_view(user) for user in lease.users],
        why=lease.why or None,
    )


def environment(ledger: Ledger, lease: Lease, lnc: int) -> dict[str, str]:
    """Return the environment of a process that uses the lease's chips.

    NEURON_RT_VISIBLE_CORES is a list with commas, as some readers count a range as one core. It is left out where
    the number of cores is not known: the runtime then takes all cores of the chips that it can open.
    """
    env = {
        "NEUROND_LEASE": lease.id,
        "NEUROND_CHIPS": ",".join(map(str, lease.chips)),
        "NEURON_PROCESS_TAG": f"neurond-{lease.id}",
    }
    cores = cores_of(ledger, lease.chips, lnc)
    if cores:
        env["NEURON_RT_VISIBLE_CORES"] = ",".join(map(str, cores))
    return env


def cores_of(ledger: Ledger, chips: Sequence[int], lnc: int) -> list[int]:
    """Return the host-wide logical core ids of these chips; empty where they are not known."""
    counts = {ledger.chips[index].cores if index in ledger.chips else None for index in chips}
    cores = counts.pop() if len(counts) == 1 else None
    return core_ids(chips, cores, lnc) if cores else []


def lnc_of(kind: InstanceType, host: int | None) -> int:
    """Return the logical core configuration in force: the host's own setting, else the type's default."""
    return host if host and (not kind.known or kind.cores % host == 0) else kind.lnc


def nodes(ledger: Ledger, lease: Lease) -> dict[str, str]:
    """Return the device nodes of a lease's chips on the host, by the chip's number."""
    return {str(index): ledger.chips[index].node for index in lease.chips if index in ledger.chips}
