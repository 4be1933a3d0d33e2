"""Runs the router's endless background tasks: probes, event links, discovery."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger("penstock.router")

RESTART_S = 1.0  # before a task that failed is started again


async def keep_running(name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `work` until it returns. If it raises, log the traceback and start it again after a pause: a bug in one task must
    not silently end what the router knows about a replica."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("%s failed; it is started again in %g s", name, RESTART_S)
            await asyncio.sleep(RESTART_S)
        else:
            return
