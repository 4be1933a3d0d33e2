"""Tokenizers of model folders: their ends of texts and special tokens, the files that are refused, and their export; and
`LLM.get_tokenizer()`, which has the interface of transformers."""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from benchmarks.export import save_tokenizer

from penstock.engine.front.hf_interface import FamiliarTokenizer
from penstock.engine.front.python_messages import messages_of
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.model_error import ModelError
from penstock.engine.model_files import ModelFiles
from penstock.engine.text.model_text import load_tokenizer
from penstock.engine.text.prompt import chat_prompt
from penstock.engine.text.template import ChatTemplate
from penstock.engine.text.tokenizer import Tokenizer
from tests.support import text_samples as samples
from tests.support.chat_samples import CALL, RESULT, TOOLS, USER
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


@pytest.mark.parametrize(("text", "sentence"), cases(__file__, "no text"))
def test_a_value_that_is_no_text_is_the_request_s_fault(tmp_path: Path, text: str, sentence: str) -> None:
    tokenizer = load(samples.folder(tmp_path, samples.byte_level()))
    with pytest.raises(InvalidRequest, match=sentence):
        tokenizer.encode(text)


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_an_id_that_no_vocabulary_has_is_the_request_s_fault(tmp_path: Path, token_id: int) -> None:
    tokenizer = load(samples.folder(tmp_path, samples.byte_level()))
    with pytest.raises(InvalidRequest, match=f"tokens: {token_id} is not a token id"):
        tokenizer.decode([token_id])


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
