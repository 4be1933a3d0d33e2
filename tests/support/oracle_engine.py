"""The server's engine and the offline API over the oracle executor."""

from collections.abc import Callable
from typing import Any

from penstock.engine.config import EngineConfig
from penstock.engine.front.client import AsyncEngine
from penstock.engine.front.llm import LLM
from penstock.executor.protocol import Executor, ExecutorConfig
from tests.support.oracle import OracleExecutor


class OracleLLM(LLM):
    @staticmethod
    def _open_executor(config: ExecutorConfig, progress: Callable[[str], None] = lambda _line: None) -> Executor:
        return OracleExecutor(config)


def oracle_engine(config: EngineConfig, **options: Any) -> AsyncEngine:
    return AsyncEngine(config, core="tests.support.oracle_core", **options)
