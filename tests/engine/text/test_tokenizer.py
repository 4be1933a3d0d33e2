"""Tokenizers of model folders: their ends of texts and special tokens, the files that are refused, and their export; and
`LLM.get_tokenizer()`, which has the interface of transformers. The server and the router render a request to the same ids,
or the server refuses it and the router leaves that to it."""

import contextlib
import json
import random
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from benchmarks.export import save_tokenizer

from penstock.engine.front.client import AsyncEngine
from penstock.engine.front.hf_interface import FamiliarTokenizer, messages_of
from penstock.engine.http.body import split_object
from penstock.engine.http.errors import HttpError
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.model_error import ModelError
from penstock.engine.model_files import ModelFiles
from penstock.engine.server.conversation import Conversation
from penstock.engine.server.prompts import render, to_ids
from penstock.engine.server.requests import ChatRequest, parse
from penstock.engine.server.server_config import ServerConfig, resolve
from penstock.engine.server.service import Service
from penstock.engine.text.model_text import load_tokenizer
from penstock.engine.text.prompt import NOT_VARIABLES, chat_prompt
from penstock.engine.text.template import ChatTemplate
from penstock.engine.text.tokenizer import Tokenizer
from penstock.router.placement.prompts import CHAT, PromptReader, RequestFields
from tests.support import text_samples as samples
from tests.support.chat_samples import CALL, RESULT, TOOLS, USER, VARIABLES
from tests.support.fake_engine import FakeEngine, byte_tokenizer
from tests.support.refusals import cases, table


def load(folder: Path) -> Tokenizer:
    return load_tokenizer(ModelFiles("m", folder, "hf", json.loads((folder / "config.json").read_text())))


@pytest.mark.parametrize(("files", "ids"), cases(__file__, "ends of texts"))
def test_ids_that_end_a_text_come_from_every_file(tmp_path: Path, files: dict[str, Any], ids: set[Any]) -> None:
    assert load(samples.folder(tmp_path, samples.byte_level(), **files)).eos_ids == ids


def test_named_tokens_are_special_even_if_tokenizer_json_does_not_say_so(tmp_path: Path) -> None:
    backend = samples.byte_level()
    size = backend.get_vocab_size()
    config = {"bos_token": "he", "pad_token": "[PAD]", "added_tokens_decoder": {str(size): {"content": "<think>"}}}
    tokenizer = load(samples.folder(tmp_path, backend, tokenizer_config=config))
    assert tokenizer.special_id("bos_token") == backend.token_to_id("he")
    assert tokenizer.special_id("bos_token") in tokenizer.special_ids
    assert tokenizer.special_id("pad_token") is None  # the model has no row for it
    assert tokenizer.encode("<think>") == [size]


@pytest.mark.parametrize(("name", "content", "sentence"), table(__file__, "tokenizers"))
def test_a_malformed_file_of_a_tokenizer_is_refused(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    folder = samples.folder(tmp_path, samples.byte_level())
    (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=sentence):
        load(folder)


def test_special_tokens_are_added_only_where_they_are_asked_for(tmp_path: Path) -> None:
    tokenizer = load(samples.folder(tmp_path, samples.sentencepiece(), tokenizer_config={"bos_token": "<s>"}))
    assert tokenizer.encode("hello")[0] == tokenizer.special_id("bos_token") == 1
    assert tokenizer.encode("hello", add_special_tokens=False)[0] != 1
    assert tokenizer.encode_batch(["hello", ""]) == [tokenizer.encode("hello"), [1]]


def test_truncation_and_padding_in_tokenizer_json_are_ignored(tmp_path: Path) -> None:
    backend = samples.byte_level()
    plain = backend.encode("hello world, hello").ids
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert load(samples.folder(tmp_path, backend)).encode("hello world, hello") == plain


def test_the_text_of_a_token_keeps_its_space_and_marks_half_a_character(tmp_path: Path) -> None:
    tokenizer = load(samples.folder(tmp_path, samples.sentencepiece()))
    assert tokenizer.token_text(tokenizer.backend.token_to_id("▁The") or 0) == " The"
    assert tokenizer.token_bytes(tokenizer.backend.token_to_id("<0xE6>") or 0) == b"\xe6"
    assert tokenizer.token_text(tokenizer.backend.token_to_id("<0xE6>") or 0) == "\ufffd"


@pytest.mark.parametrize(("method", "value", "sentence"), cases(__file__, "no text"))
def test_what_is_no_text_or_no_id_is_the_request_s_fault(
    tmp_path: Path, method: str, value: Any, sentence: str
) -> None:
    tokenizer = load(samples.folder(tmp_path, samples.byte_level()))
    with pytest.raises(InvalidRequest, match=sentence):
        getattr(tokenizer, method)(value)


def test_a_folder_without_any_vocabulary_says_so(tmp_path: Path) -> None:
    (samples.folder(tmp_path, samples.byte_level()) / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="no tokenizer.json and no vocabulary that could be converted"):
        load(tmp_path)


def test_tokenizer_code_of_a_folder_is_refused_and_not_run(tmp_path: Path) -> None:
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    folder = samples.folder(tmp_path, samples.byte_level(), tokenizer_config=config)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    with pytest.raises(ModelError, match="wants its own tokenizer code to run"):
        load(folder)
    assert not (tmp_path / "canary").exists()


@pytest.mark.slow
def test_transformers_converts_other_formats_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = samples.byte_level()
    (tmp_path / "transformers.py").write_text("raise SystemExit('a file of the current directory')")
    monkeypatch.chdir(tmp_path)
    folder = samples.folder(tmp_path / "m", backend, tokenizer_config={"tokenizer_class": "GPT2Tokenizer"})
    (folder / "tokenizer.json").unlink()
    backend.model.save(str(folder))  # vocab.json and merges.txt
    tokenizer = load(folder)
    assert [tokenizer.encode(text) for text in samples.CORPUS] == [backend.encode(text).ids for text in samples.CORPUS]


@pytest.mark.slow
def test_a_format_that_cannot_be_converted_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = samples.folder(tmp_path, samples.byte_level(), tokenizer_config={"tokenizer_class": "LlamaTokenizer"})
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"\x00not a model")
    with pytest.raises(ModelError, match="transformers cannot make one of what it has: .+"):
        load(folder)


def test_chat_templates_are_read_from_every_file_that_may_have_one(tmp_path: Path) -> None:
    def templates(**files: dict[str, Any]) -> dict[str, str]:
        return load(samples.folder(tmp_path, samples.byte_level(), **files)).chat_templates

    assert templates() == {}
    assert templates(chat_template={"chat_template": "of a processor"}) == {"default": "of a processor"}
    assert templates(tokenizer_config={"chat_template": "one"}) == {"default": "one"}
    several = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    assert templates(tokenizer_config={"chat_template": several}) == {"default": "a", "tool_use": "b"}
    (tmp_path / "chat_template.jinja").write_text("of a file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("c")
    expected = {"default": "of a file", "rag": "c"}
    assert templates(tokenizer_config={"chat_template": "one"}) == expected
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match="chat_template.jinja is not UTF-8 text"):
        templates()


@pytest.mark.parametrize("make", [samples.byte_level, samples.sentencepiece])
def test_transformers_loads_a_saved_tokenizer_and_tokenizes_alike(tmp_path: Path, make: Callable[[], Any]) -> None:
    transformers = import_module("transformers")
    ends = {"bos_token": "<s>", "eos_token": "</s>"} if make is samples.sentencepiece else {"eos_token": "<|im_end|>"}
    config = {**ends, "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"}
    folder = samples.folder(tmp_path / "a", make(), tokenizer_config=config, generation_config={"eos_token_id": [0, 2]})
    ours = load(folder)
    save_tokenizer(ours, tmp_path / "b")
    (tmp_path / "b" / "config.json").write_text("{}")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "b")
    again = load(tmp_path / "b")
    for text in samples.texts(500):
        ids = ours.encode(text)
        assert theirs.encode(text) == ids == again.encode(text)
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
    assert theirs.chat_template == config["chat_template"]
    assert (theirs.eos_token_id, theirs.bos_token_id) == (2, ours.special_id("bos_token"))
    assert again.eos_ids == ours.eos_ids == {0, 2}
    assert (again.special_tokens, again.chat_templates) == (ours.special_tokens, ours.chat_templates)


LINES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def familiar(folder: Path) -> FamiliarTokenizer:
    return FamiliarTokenizer(load(folder), ChatTemplate(LINES))


def test_the_end_token_is_the_tokenizer_s_own_whatever_ends_generation(tmp_path: Path) -> None:
    config = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    generation = {"eos_token_id": [0, 2]}
    folder = samples.folder(tmp_path, samples.byte_level(), tokenizer_config=config, generation_config=generation)
    ours, theirs = familiar(folder), import_module("transformers").AutoTokenizer.from_pretrained(folder)
    assert ours.eos_token == theirs.eos_token == "<|im_end|>"
    assert ours.eos_token_id == theirs.eos_token_id == 2
    without = familiar(samples.folder(tmp_path / "b", samples.byte_level(), generation_config=generation))
    assert (without.eos_token, without.eos_token_id) == (None, None)


def test_tools_that_a_template_does_not_know_are_written_as_text_as_in_a_chat(tmp_path: Path) -> None:
    ours = familiar(samples.folder(tmp_path, samples.byte_level()))
    chat: list[dict[str, Any]] = [USER, CALL, RESULT]
    text = ours.apply_chat_template(chat, tools=TOOLS, tokenize=False)
    assert isinstance(text, str) and '"weather"' in text and "<tool_response>" in text
    assert text == chat_prompt(ChatTemplate(LINES), messages_of(chat), add_generation_prompt=False, tools=TOOLS)


TOKENIZER = byte_tokenizer()
TEMPLATE = ChatTemplate(VARIABLES)


def service_of(template: ChatTemplate, **settings: Any) -> Service:
    config = resolve(ServerConfig(served_model_names=("m",), **settings), {})
    return Service(cast(AsyncEngine, FakeEngine()), TOKENIZER, template, config)


SERVICE = service_of(TEMPLATE)
ASK = msgspec.json.Decoder(RequestFields)
HELLO = {"role": "user", "content": "hello"}
REPLY = {"role": "assistant", "content": "good day"}


async def served(body: bytes, service: Service = SERVICE) -> list[int] | str:
    """Return the ids that the server makes of a request, or its refusal."""
    try:
        request = parse(body, ChatRequest, [])
        conversation = Conversation(len(body), {})
        conversation.read(request.messages, service.info, [])
        text = await render(request, conversation, service)
        (packed,) = await to_ids("messages", [text], service, request)
        return memoryview(packed).cast("i").tolist()
    except (HttpError, InvalidRequest) as error:
        return str(error)


def hinted(body: bytes, template: ChatTemplate = TEMPLATE) -> tuple[list[int] | None, bool]:
    """Return the ids that the router places a request by, and whether it sends them in place of the text."""
    with contextlib.closing(PromptReader(TOKENIZER, template)) as texts:
        try:
            hint = texts.ids(CHAT, body, ASK.decode(body), split_object(body), is_ours=True)
        except HttpError:
            hint = None
    return (None, False) if hint is None else (memoryview(hint[0]).cast("i").tolist(), hint[1])


def routed(body: bytes) -> list[int] | None:
    """Return the ids that the router sends in place of the text, or None if it sends the text itself, for the replica to judge."""
    ids, is_sent = hinted(body)
    return ids if is_sent else None


@pytest.mark.parametrize("name", sorted(NOT_VARIABLES))
async def test_a_field_of_the_request_is_no_variable_of_the_template(name: str) -> None:
    body = json.dumps({"messages": [HELLO], "chat_template_kwargs": {name: True}}).encode()
    assert await served(body) == f"chat_template_kwargs: {name!r} cannot be set there"
    assert routed(body) is None
    with pytest.raises(InvalidRequest, match=f"^chat_template_kwargs: {name!r} cannot"):
        chat_prompt(TEMPLATE, messages_of([HELLO]), chat_template_kwargs={name: True})


@pytest.mark.parametrize("parser", ["auto", "none", "llama3_json"])
async def test_a_template_without_tools_gets_calls_as_text_for_every_parser(parser: str) -> None:
    template = ChatTemplate(LINES)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages: list[dict[str, Any]] = [HELLO, called, {"role": "tool", "tool_call_id": "1", "content": "4"}]
    text = chat_prompt(template, messages_of(messages))
    assert '<tool_call>\n{"name": "f"' in text and "<tool_response>\n4" in text
    body = json.dumps({"messages": messages}).encode()
    assert await served(body, service_of(template, tool_call_parser=parser)) == TOKENIZER.encode(text, False)
    assert hinted(body, template)[0] == TOKENIZER.encode(text, False)


FIELDS: dict[str, list[Any]] = dict(cases(__file__, "fields", HELLO=HELLO, REPLY=REPLY))


async def test_server_and_router_make_the_same_ids_or_the_server_judges() -> None:
    rng, num_equal, num_refused = random.Random(0), 0, 0
    for _ in range(200):
        body: dict[str, Any] = {"messages": rng.choice(FIELDS["messages"])}
        for name in rng.sample([*FIELDS][1:], rng.randrange(4)):
            body[name] = rng.choice(FIELDS[name])
        raw = json.dumps(body).encode()
        ids, sent = await served(raw), routed(raw)
        if sent is not None:
            assert sent == ids, body
            num_equal += 1
        num_refused += isinstance(ids, str)
    assert num_equal > 30 and num_refused > 30
