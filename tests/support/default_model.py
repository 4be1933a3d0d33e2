"""The real server over the model that is served when none is named; a test that asks for it is skipped where it is not installed."""

import contextlib
from collections.abc import Iterator

from penstock.engine.text.model_text import load_text
from tests.support.default_file import default_file
from tests.support.running_server import MODEL, Running, engine_of, running


@contextlib.contextmanager
def default_model(name: str = MODEL) -> Iterator[Running]:
    path = default_file()
    tokenizer, template = load_text(None)
    engine = engine_of(path, tokenizer, kv_cache_bytes=2**27, max_model_len=1024)
    with running(engine, tokenizer, template, served_model_names=(name,)) as server:
        yield server
