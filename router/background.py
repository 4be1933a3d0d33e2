"""Tasks on the router's event loop."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger("penstock.router")

RESTART_S = 1.0  # before a task that failed is started again


class Tasks:
    """The tasks of one owner. Keeps each until it is done, and logs the exception of one that fails."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def keep_running(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Run `work` until it returns. If it raises, log the traceback and start it again after a pause: a bug in one
        task must not silently end what the router knows about a replica."""

        async def run() -> None:
            while True:
                try:
                    return await work()
                except Exception:
                    log.exception("%s failed; it is started again in %g s", name, RESTART_S)
                    await asyncio.sleep(RESTART_S)

        return self.spawn(run())

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request failed in the router", exc_info=error)

    async def close(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
