"""The calls about the daemon itself, and about the simulated host if it has one."""

import os

from neurond import __version__, wire
from neurond.daemon.broker import Broker
from neurond.daemon.server import Call, Handler
from neurond.host.docker import Engine
from neurond.host.simulated import SimulatedHost
from neurond.ledger.errors import InvalidRequest, NoSuchChip, NotAllowed

MOST_CHIPS = 64
"""The driver makes at most as many devices."""
MOST_MAJORS = 4095
"""A device number has 12 bits for its major."""


class About:
    """Answers Describe and Simulate."""

    def __init__(self, broker: Broker, simulated: SimulatedHost | None, engine: Engine) -> None:
        self.broker = broker
        self.simulated = simulated
        self.engine = engine

    def handlers(self) -> dict[str, Handler]:
        """Return the functions that answer calls, by the method's name."""
        return {"Describe": self._describe, "Simulate": self._simulate}

    def _describe(self, call: Call, request: wire.Nothing) -> wire.About:
        del call, request
        ledger = self.broker.ledger
        simulated = self.simulated is not None
        return wire.About(
            __version__, os.getpid(), ledger.instance_type, simulated, self.engine.url, ledger.paused or None
        )

    def _simulate(self, call: Call, request: wire.Simulate) -> wire.Done:
        if call.peer.uid not in {0, self.broker.rules.uid}:
            raise NotAllowed("only root, or the user that runs neurond, may pull and plug chips")
        if self.simulated is None:
            raise InvalidRequest("this is no simulated host: start one with neurond serve --simulate TYPE")
        if not 0 <= request.chip < MOST_CHIPS:
            raise NoSuchChip(f"no chip {request.chip}: the driver knows chips 0 to {MOST_CHIPS - 1}")
        if request.major is not None and not 0 < request.major <= MOST_MAJORS:
            raise InvalidRequest(f"major {request.major}: 1 to {MOST_MAJORS} are possible")
        try:
            if request.action == "add":
                self.simulated.add(request.chip, request.major)
            else:
                self.simulated.remove(request.chip)
        except (FileExistsError, FileNotFoundError) as error:
            raise NoSuchChip(str(error)) from None
        return wire.Done()
