"""The server's engine and the offline API over the oracle executor."""

from collections.abc import Callable
from typing import Any

from penstock.engine.config import EngineConfig, SchedulerConfig
from penstock.engine.front.client import AsyncEngine
from penstock.engine.front.llm import LLM
from penstock.executor.protocol import Executor, ExecutorConfig
from tests.support.fake_engine import byte_tokenizer
from tests.support.oracle import OracleExecutor
from tests.support.running_server import Running

SECRET = "a secret that is long enough"  # of engines that share blocks


class OracleLLM(LLM):
    @staticmethod
    def _open_executor(config: ExecutorConfig, progress: Callable[[str], None] = lambda _line: None) -> Executor:
        return OracleExecutor(config)


def oracle_llm(folder: object, **options: Any) -> LLM:
    """Return an LLM of the model in `folder`, which needs no weights and no tokenizer."""
    defaults = {"max_model_len": 64, "hf_overrides": {"vocab_size": 50}, "skip_tokenizer": True}
    return OracleLLM(str(folder), load_format="dummy", **{**defaults, **options})


def oracle_engine(vocab_size: int = 256, *, scheduler: SchedulerConfig | None = None, **executor: Any) -> AsyncEngine:
    """Return a server's engine with a tokenizer of bytes; `executor` are the options of its executor."""
    config = EngineConfig(
        executor=ExecutorConfig(hf_overrides={"vocab_size": vocab_size}, **executor),
        scheduler=scheduler or SchedulerConfig(),
    )
    return AsyncEngine(config, core="tests.support.oracle_core", tokenizer=byte_tokenizer())


def peer(**options: Any) -> AsyncEngine:
    """Return an engine that can share blocks over loopback."""
    return oracle_engine(max_model_len=2000, kv_host_bytes=2**22, **options)


def is_connected(server: Running) -> bool:
    server.complete(max_tokens=1)  # an idle core hears of nothing
    return 'kv_tier_is_open{model_name="tiny",tier="peer"} 1.0' in server.http.get("/metrics").text
