"""Time-outs that do not blame others for an event loop that was busy elsewhere.

A loop that is held up for two seconds finds, when it comes round again, timers that are due and answers that have long
been there, and it looks at the timers first. So a time-out here is reached only when its time has passed and the loop has
come round ROUNDS times since it was set: enough to connect, write and read what was waiting.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

ROUNDS = 8


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """As asyncio.timeout: TimeoutError after `seconds`."""
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
