"""The server and the router render a request to the same ids, or the server refuses it and the router leaves that to it."""

import asyncio
import contextlib
import json
import random
from typing import Any, cast

import msgspec
import pytest

from penstock.engine.front.client import AsyncEngine
from penstock.engine.front.python_messages import messages_of
from penstock.engine.http.body import split_object
from penstock.engine.http.errors import HttpError
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.server.conversation import Conversation
from penstock.engine.server.prompts import render, to_ids
from penstock.engine.server.requests import ChatRequest, parse
from penstock.engine.server.server_config import ServerConfig, resolve
from penstock.engine.server.service import Service
from penstock.engine.text.prompt import NOT_VARIABLES, chat_prompt
from penstock.engine.text.template import ChatTemplate
from penstock.router.placement.prompts import CHAT, PromptReader, RequestFields
from tests.support.fake_engine import FakeEngine, byte_tokenizer
from tests.support.refusals import cases

TOKENIZER = byte_tokenizer()
TEMPLATE = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.reasoning_content or '' }}{{ m.name or '' }}\n{% endfor %}"
    "{{ tools }}{{ documents }}{{ reasoning_effort or '' }}{{ enable_thinking or '' }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def service_of(template: ChatTemplate, **settings: Any) -> Service:
    config = resolve(ServerConfig(served_model_names=("m",), **settings), {})
    return Service(cast(AsyncEngine, FakeEngine()), TOKENIZER, template, config)


SERVICE = service_of(TEMPLATE)
ASK = msgspec.json.Decoder(RequestFields)
HELLO = {"role": "user", "content": "hello"}
REPLY = {"role": "assistant", "content": "good day"}


def served(body: bytes, service: Service = SERVICE) -> list[int] | str:
    """Return the ids that the server makes of a request, or its refusal."""

    async def ids() -> list[int]:
        request = parse(body, ChatRequest, [])
        conversation = Conversation(len(body), {})
        conversation.read(request.messages, service.info, [])
        text = await render(request, conversation, service)
        (packed,) = await to_ids("messages", [text], service, request)
        return memoryview(packed).cast("i").tolist()

    try:
        return asyncio.run(ids())
    except (HttpError, InvalidRequest) as error:
        return str(error)


def hinted(body: bytes, template: ChatTemplate = TEMPLATE) -> tuple[list[int] | None, bool]:
    """Return the ids that the router places a request by, and whether it sends them in place of the text."""
    with contextlib.closing(PromptReader(TOKENIZER, template)) as texts:
        try:
            hint = texts.ids(CHAT, body, ASK.decode(body), split_object(body))
        except HttpError:
            hint = None
    return (None, False) if hint is None else (memoryview(hint[0]).cast("i").tolist(), hint[1])


def routed(body: bytes) -> list[int] | None:
    """Return the ids that the router sends in place of the text, or None if it sends the text itself, for the replica to judge."""
    ids, is_sent = hinted(body)
    return ids if is_sent else None


@pytest.mark.parametrize("name", sorted(NOT_VARIABLES))
def test_a_field_of_the_request_is_no_variable_of_the_template(name: str) -> None:
    body = json.dumps({"messages": [HELLO], "chat_template_kwargs": {name: True}}).encode()
    assert served(body) == f"chat_template_kwargs: {name!r} cannot be set there"
    assert routed(body) is None
    with pytest.raises(InvalidRequest, match=f"^chat_template_kwargs: {name!r} cannot"):
        chat_prompt(TEMPLATE, messages_of([HELLO]), chat_template_kwargs={name: True})


@pytest.mark.parametrize("parser", ["auto", "none", "llama3_json"])
def test_a_template_without_tools_gets_calls_as_text_for_every_parser(parser: str) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages: list[dict[str, Any]] = [HELLO, called, {"role": "tool", "tool_call_id": "1", "content": "4"}]
    text = chat_prompt(template, messages_of(messages))
    assert '<tool_call>\n{"name": "f"' in text and "<tool_response>\n4" in text
    body = json.dumps({"messages": messages}).encode()
    assert served(body, service_of(template, tool_call_parser=parser)) == TOKENIZER.encode(text, False)
    assert hinted(body, template)[0] == TOKENIZER.encode(text, False)


FIELDS: dict[str, list[Any]] = dict(cases(__file__, "fields", HELLO=HELLO, REPLY=REPLY))


def test_server_and_router_make_the_same_ids_or_the_server_judges() -> None:
    rng, num_equal, num_refused = random.Random(0), 0, 0
    for _ in range(200):
        body: dict[str, Any] = {"messages": rng.choice(FIELDS["messages"])}
        for name in rng.sample([*FIELDS][1:], rng.randrange(4)):
            body[name] = rng.choice(FIELDS[name])
        raw = json.dumps(body).encode()
        ids, sent = served(raw), routed(raw)
        if sent is not None:
            assert sent == ids, body
            num_equal += 1
        num_refused += isinstance(ids, str)
    assert num_equal > 30 and num_refused > 30
