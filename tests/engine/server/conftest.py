from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from penstock.engine.text.template import ChatTemplate
from tests.support.chat_samples import QWEN3
from tests.support.running_server import Running, running, until


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server that repeats the prompt, or says `server.engine.reply`; after a module's tests nothing is left open."""
    with running() as started:
        yield started
        started.engine.reply = None
        assert started.complete(max_tokens=3).json()["choices"][0]["text"] == "abc"
        service = started.app.service
        until(lambda: started.call(lambda: service.num_open_requests + service._num_preparing) == 0)
        assert len(started.engine.answers) == 0


@pytest.fixture(scope="module")
def _qwen() -> Iterator[Running]:
    with running(template=ChatTemplate(QWEN3, {"bos_token": ""})) as started:
        yield started


@pytest.fixture
def qwen(_qwen: Running) -> Running:
    """A server with the template of Qwen3; it says "Hello." until a test lets it say something else."""
    _qwen.engine.reply = "Hello."
    return _qwen


@pytest.fixture(scope="session")
def openai() -> Any:
    """OpenAI's package. Importing it takes seconds, so only the processes that need it do."""
    return import_module("openai")


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with server.openai() as made:
        yield made
