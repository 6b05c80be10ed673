"""Ledger, processes, nodes and containers, compared now: everything in which they disagree."""

from neurond import wire
from neurond.catalog import InstanceType
from neurond.daemon.broker import Broker
from neurond.daemon.containers import Containers
from neurond.daemon.discovery import Discovery
from neurond.daemon.server import Call, Handler
from neurond.host.docker import EngineError
from neurond.ledger.leases import OnContainers
from neurond.ledger.words import ranges


class Checking:
    """Answers Check. Looks afresh at everything before it judges."""

    def __init__(self, broker: Broker, containers: Containers, discovery: Discovery) -> None:
        self.broker = broker
        self.containers = containers
        self.discovery = discovery

    def handlers(self) -> dict[str, Handler]:
        """Return the functions that answer calls, by the method's name."""
        return {"Check": self._check}

    async def _check(self, call: Call, request: wire.Nothing) -> wire.Findings:
        del call, request
        chips, _ = await self.discovery.look_now()
        self.broker.take_chips(chips)
        await self.broker.usage.look()
        findings = self._judge_chips(self.discovery.kind) + self._judge_leases()
        try:
            await self.containers.look()
        except EngineError as error:
            if any(isinstance(lease.binding, OnContainers) for lease in self.broker.ledger.leases.values()):
                findings.append(wire.Finding("engine", f"containers hold chips, but {error}"))
        findings += [wire.Finding("conflict", sentence) for sentence in self.containers.strangers.conflicts.values()]
        if self.broker.ledger.leases:
            findings += [
                wire.Finding("privileged", f"container {container.name} is privileged: it can open every chip")
                for container in self.containers.strangers.privileged()
            ]
        if self.broker.ledger.paused:
            findings.append(wire.Finding("journal", self.broker.ledger.paused))
        return wire.Findings(findings)

    def _judge_chips(self, kind: InstanceType) -> list[wire.Finding]:
        ledger = self.broker.ledger
        findings = []
        for index, users in sorted(ledger.foreign.items()):
            holder = ledger.holder_of(index)
            whose = f"leased to {holder.owner.name} ({holder.id}), but" if holder else "not leased, but"
            findings.append(wire.Finding("foreign", f"chip {index} is {whose} in use by {', '.join(map(str, users))}"))
        for index, chip in sorted(ledger.chips.items()):
            if chip.problem:
                findings.append(wire.Finding("quarantined", f"chip {index} is withheld: {chip.problem}"))
        missing = set(range(kind.chips)) - ledger.chips.keys()
        if kind.known and missing:
            findings.append(
                wire.Finding("missing", f"{kind.name} has {kind.chips} chips, missing here: {ranges(missing)}")
            )
        return findings

    def _judge_leases(self) -> list[wire.Finding]:
        findings = []
        for lease in self.broker.ledger.leases.values():
            if lease.lost:
                findings.append(
                    wire.Finding("lost", f"lease {lease.id} ({lease.owner.name}) lost chips {ranges(lease.lost)}")
                )
            if lease.state == "stuck":
                users = ", ".join(map(str, lease.users))
                findings.append(wire.Finding("stuck", f"lease {lease.id} is at its end ({lease.why}), but {users}"))
        return findings
