"""POST /reset_prefix_cache, before a stand-in and before a real core."""

import asyncio

from tests.engine.test_client import GREEDY, read
from tests.engine.test_client import running as running_engine
from tests.support.fake_engine import FakeEngine
from tests.support.running_server import running, until


def test_an_idle_server_resets_and_a_busy_one_says_409() -> None:
    engine = FakeEngine(delay_s=0.005)
    with running(engine) as server:
        assert server.post("/reset_prefix_cache", {}).json() == {"status": "reset"}
        generation = server.call(lambda: engine.generate([1, 2, 3], GREEDY))
        engine.hold = True
        answer = server.post("/reset_prefix_cache", {})
        assert answer.status_code == 409 and "try again" in answer.json()["error"]["message"]
        server.call(generation.abort)
        until(lambda: engine.num_open == 0)
        assert server.post("/reset_prefix_cache", {}).status_code == 200


def test_a_core_forgets_what_it_had_cached() -> None:
    async def run() -> None:
        async with running_engine() as engine:
            prompt = list(range(40))
            for expected in (0, 32, None, 0):  # blocks of 16
                if expected is None:
                    assert await engine.reset_prefix_cache()
                    continue
                generation = engine.generate(prompt, GREEDY)
                await read(generation)
                assert generation.num_cached_tokens == expected

    asyncio.run(run())
