"""Replicas for fleets: the real HTTP server and the real scheduler over the oracle executor, at the speed of a GPU.

    python -m tests.support.mock_replica '{"prefill_tps": 20000, "inter_token_s": 0.01}'

Prints its port. Fleets fork theirs (tests/support/fork_server.py), so that eight of them start at once; kill, stop and drain them
as you like. The engine core lives in the server's process: a step takes the time that its tokens would take, and no
more CPU.
"""

import asyncio
import contextlib
import json
import sys
import time
from typing import Any

import uvloop

from penstock.engine.config import EngineConfig
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.engine_options import engine_config
from penstock.engine.front.client import AsyncEngine
from penstock.engine.front.engine import EngineDead
from penstock.engine.http.sockets import bind_sockets
from penstock.engine.http.telemetry import Telemetry
from penstock.engine.messages import Abort, Heartbeat, Output, Outputs, Ready, Shutdown, Submit, ToCore, WatchCache
from penstock.engine.server.lifetime import serve
from penstock.engine.server.server_config import KvEventsConfig, ServerConfig, resolve
from penstock.engine.server.service import Service
from tests.support.fake_engine import byte_tokenizer, line_template
from tests.support.oracle import OracleExecutor

TRANSFER_STEP_S = 0.001  # of a step that only waits for blocks


class MockEngine(AsyncEngine):
    """The engine's client with its core in the same process, whose steps take `tokens / prefill_tps + inter_token_s`."""

    def __init__(self, config: EngineConfig, *, prefill_tps: float, inter_token_s: float, **options: Any) -> None:
        super().__init__(config, **options)
        self._prefill_tps = prefill_tps
        self._inter_token_s = inter_token_s
        self._work = asyncio.Event()
        self._core = EngineCore(config, OracleExecutor(config.executor, max_in_flight=1))

    async def start(self) -> None:
        self._receive(Ready(self._core.info))
        self._task = asyncio.create_task(self._run())

    async def close(self, reason: str = "the engine is closed") -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._die(reason)

    def _send(self, message: ToCore) -> None:
        outputs: list[Output] = []
        if isinstance(message, Submit):
            self._core.submit(message)
        elif isinstance(message, Abort):
            outputs += filter(None, map(self._core.abort, message.request_ids))
        elif isinstance(message, WatchCache):
            self._core.cache_log.watch(message.is_on, message.with_blocks)
            asyncio.get_running_loop().call_soon(self._report_cache)
            return
        else:
            assert isinstance(message, Shutdown)
            raise EngineDead("the core has no process of its own")
        self._work.set()
        if outputs:
            # Not from here: the request is not listed yet.
            asyncio.get_running_loop().call_soon(self._receive, Outputs(outputs, self._core.stats(), 0))

    def _report_cache(self) -> None:
        for update in self._core.cache_log.updates():
            self._receive(update)

    async def _run(self) -> None:
        """Step while there is work. Time is slept, so that many replicas fit on a core."""
        core, beaten_s = self._core, 0.0
        while True:
            if (now_s := time.monotonic()) > beaten_s + 1.0:
                self._receive(Heartbeat(0.0))
                beaten_s = now_s
            if not core.has_work() and not core.is_settled:
                core.step()  # blocks in flight to the host tier
                await asyncio.sleep(TRANSFER_STEP_S)
                continue
            if not core.has_work():
                self._work.clear()
                core.scheduler.check()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await self._work.wait()
                continue
            outputs = core.step()
            num_tokens = core.last_step_tokens
            step_s = num_tokens / self._prefill_tps + self._inter_token_s if num_tokens else TRANSFER_STEP_S
            await asyncio.sleep(step_s)
            self._receive(Outputs(outputs, core.stats(), core.last_step_tokens))
            self._report_cache()


async def replica(
    *,
    port: int = 0,
    prefill_tps: float = 1e6,
    inter_token_s: float = 0.0,
    kv_tokens: int = 1 << 20,
    kv_events: str = "",
    otlp_traces_endpoint: str | None = None,
    **options: Any,
) -> int:
    """Serve until a signal comes. `kv_events`: publish them as vLLM does, at two sockets of this name. `options`: of the
    engine."""
    defaults = {
        "max_model_len": 65536,
        "max_num_batched_tokens": 2048,  # of a step, which answers all at its end
        "max_queued_requests": 4096,
        "hf_overrides": {"vocab_size": 300},  # of the byte tokenizer
    }
    config = engine_config("oracle", {**defaults, "kv_cache_bytes": 8 * kv_tokens, **options})
    endpoints: dict[str, Any] = {
        "endpoint": f"ipc://{kv_events}.events",
        "replay_endpoint": f"ipc://{kv_events}.replay",
    }
    server = ServerConfig(
        port=port,
        served_model_names=("mock",),
        kv_events_config=KvEventsConfig(enable_kv_cache_events=True, **endpoints) if kv_events else None,
        telemetry=Telemetry(otlp_traces_endpoint=otlp_traces_endpoint),
    )
    tokenizer = byte_tokenizer()
    tokenizer.eos_ids = frozenset()  # an answer has the length that is asked for
    engine = MockEngine(config, prefill_tps=prefill_tps, inter_token_s=inter_token_s, tokenizer=tokenizer)
    await engine.start()
    try:
        sockets = bind_sockets(server.host, port)
        return await serve(Service(engine, tokenizer, line_template(), resolve(server, {})), sockets, report)
    finally:
        await engine.close()


def report(url: str) -> None:
    print(url.rpartition(":")[2], flush=True)


def main() -> int:
    return uvloop.run(replica(**json.loads(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())
