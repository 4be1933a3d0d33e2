"""The real server over the model that is served when none is named; a test that asks for it is skipped where it is not installed."""

import contextlib
from collections.abc import Iterator

from penstock.engine.config import EngineConfig, SchedulerConfig
from penstock.engine.front.client import AsyncEngine
from penstock.engine.text.model_text import load_text
from penstock.executor.protocol import ExecutorConfig
from tests.support.default_file import default_file
from tests.support.running_server import MODEL, Running, running


@contextlib.contextmanager
def default_model(name: str = MODEL) -> Iterator[Running]:
    path = default_file()
    tokenizer, template = load_text(None)
    executor = ExecutorConfig(model=str(path), kv_cache_bytes=2**27, max_model_len=1024)
    engine = AsyncEngine(
        EngineConfig(executor=executor, scheduler=SchedulerConfig()),
        tokenizer=tokenizer,
    )
    with running(engine, tokenizer, template, served_model_names=(name,)) as server:
        yield server
