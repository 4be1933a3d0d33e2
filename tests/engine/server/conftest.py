import contextlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import msgspec
import pytest

from penstock.engine.text.template import ChatTemplate
from penstock.engine.text.tools.harmony import TOKENS
from tests.support import chat_samples
from tests.support.fake_engine import INFO, FakeEngine, byte_tokenizer
from tests.support.refusals import cases
from tests.support.running_server import Running, running, until


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Run a server that repeats the prompt, or says `server.engine.reply`; after a module's tests nothing is left open."""
    with running() as started:
        yield started
        started.engine.reply = None
        assert started.complete(max_tokens=3).json()["choices"][0]["text"] == "abc"
        service = started.app.service
        until(lambda: started.call(lambda: service.num_open_requests + service._num_preparing) == 0)
        assert len(started.engine.answers) == 0


# Chat templates, and the marks of calls that are special tokens of their models, unlike <tool_call> and <think>.
TEMPLATES = dict(cases(__file__, "templates of servers", TOKENS=TOKENS, **vars(chat_samples)))


class Servers(dict[str, Running]):
    """Servers with these templates, and with one that knows no tools ("plain"), which start when they are asked for."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack

    def __missing__(self, name: str) -> Running:
        text, marks = TEMPLATES.get(name, (None, ()))
        tokenizer = byte_tokenizer(*marks)
        engine = FakeEngine(tokenizer=tokenizer, info=msgspec.structs.replace(INFO, max_model_len=1500))
        template = None if text is None else ChatTemplate(text, {"bos_token": ""})
        settings = {"constrain_auto_tools": False} if name == "free" else {}
        self[name] = self._stack.enter_context(running(engine, tokenizer, template, **settings))
        return self[name]


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with contextlib.ExitStack() as stack:
        yield Servers(stack)


@pytest.fixture
def qwen(servers: Servers) -> Running:
    """Return a server with the template of Qwen3; it says "Hello." until a test lets it say something else."""
    servers["qwen"].engine.reply = "Hello."
    return servers["qwen"]


@pytest.fixture(scope="session")
def openai() -> Any:
    """OpenAI's package. Importing it takes seconds, so only the processes that need it do."""
    return import_module("openai")


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with server.openai() as opened:
        yield opened
