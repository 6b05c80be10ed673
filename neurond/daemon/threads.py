"""Work that blocks, in threads of its own."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[..., T], *arguments: object) -> T:
    """Run something that blocks in a thread of its own.

    Not in the loop's pool: an engine that hangs would use that up, and would keep neurond from stopping.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if not future.done():
            future.set_result(result) if error is None else future.set_exception(error)

    def run() -> None:
        result, problem = None, None
        try:
            result = work(*arguments)
        except Exception as error:  # noqa: BLE001 - handed to who waits
            problem = error
        with suppress(RuntimeError):  # the loop is closed: neurond stops
            loop.call_soon_threadsafe(settle, result, problem)

    threading.Thread(target=run, name=getattr(work, "__name__", "work"), daemon=True).start()
    return await future
