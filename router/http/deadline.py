"""Timeouts that do not expire because the event loop itself was blocked.

After a loop has been blocked for two seconds, timers are due and answers are waiting, and the loop runs the timers first. So a
timeout here expires only when its time has passed and the loop has run ROUNDS times since it was set, which is enough to
connect, write and read what was waiting.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

ROUNDS = 8


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """Raise TimeoutError after `seconds`, as asyncio.timeout does."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        num_left = ROUNDS
        timer: asyncio.TimerHandle

        def come_round() -> None:
            nonlocal num_left, timer
            num_left -= 1
            if num_left:
                timer = loop.call_later(seconds / ROUNDS, come_round)
            else:
                limit.reschedule(loop.time())

        timer = loop.call_later(seconds / ROUNDS, come_round)
        try:
            yield
        finally:
            timer.cancel()
