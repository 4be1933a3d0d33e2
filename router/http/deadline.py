"""A timeout that does not expire because the event loop was blocked.

After the loop was blocked for two seconds, it runs expired timers before it reads answers that arrived long ago. So this
timeout expires only after its time has passed and the loop has run ROUNDS iterations since it was set: enough to connect,
write and read what was waiting.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

ROUNDS = 8


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """Raise TimeoutError after `seconds`, like asyncio.timeout."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        num_left = ROUNDS
        timer: asyncio.TimerHandle

        def count_round() -> None:
            nonlocal num_left, timer
            num_left -= 1
            if num_left:
                timer = loop.call_later(seconds / ROUNDS, count_round)
            else:
                limit.reschedule(loop.time())

        timer = loop.call_later(seconds / ROUNDS, count_round)
        try:
            yield
        finally:
            timer.cancel()
