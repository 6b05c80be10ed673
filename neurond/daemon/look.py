"""One look at the containers."""

import asyncio
from contextlib import suppress

from neurond.daemon.threads import in_thread
from neurond.host.docker import Container, Engine, EngineError


class Look:
    """One look: each container is inspected once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._asked: dict[str, asyncio.Task[Container | None]] = {}

    async def inspect(self, container: str) -> Container | None:
        """Return a container by id or name as it is now; None if there is none. Raises EngineError."""
        if container not in self._asked:
            asking = in_thread(self._engine.inspect, container)
            self._asked[container] = asyncio.get_running_loop().create_task(asking)
        return await self._asked[container]

    async def latest(self, listed: Container) -> Container:
        """Return a container as it was when it was inspected, if it was: the list can lag behind."""
        asked = self._asked.get(listed.id)
        with suppress(EngineError):
            return (await asked if asked is not None else None) or listed
        return listed
