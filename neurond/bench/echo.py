"""The limit: a server on the same loop that sends back what it gets. `python -m neurond.bench.echo SOCKET`."""

import asyncio
import sys
from typing import cast

import uvloop


class Echo(asyncio.Protocol):
    """One connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where to write."""
        self._write = cast("asyncio.Transport", transport).write

    def data_received(self, data: bytes) -> None:
        """Send it back."""
        self._write(data)


async def serve(path: str) -> None:
    """Serve on a Unix socket until killed."""
    server = await asyncio.get_running_loop().create_unix_server(Echo, path, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(sys.argv[1]))
