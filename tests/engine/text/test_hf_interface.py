"""`LLM.get_tokenizer()`: a tokenizer with the interface of transformers."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from penstock.engine.front.hf_interface import FamiliarTokenizer
from penstock.engine.front.python_messages import messages_of
from penstock.engine.model_files import resolve_model
from penstock.engine.text.model_text import load_tokenizer
from penstock.engine.text.prompt import chat_prompt
from penstock.engine.text.template import ChatTemplate
from tests.support import text_samples
from tests.support.chat_samples import CALL, RESULT, TOOLS, USER

LINES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def tokenizer_of(folder: Path, source: str = LINES) -> FamiliarTokenizer:
    return FamiliarTokenizer(load_tokenizer(resolve_model(str(folder), need_weights=False)), ChatTemplate(source))


def test_the_end_token_is_the_tokenizer_s_own(tmp_path: Path) -> None:
    config = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    generation = {"eos_token_id": [0, 2]}
    folder = text_samples.folder(
        tmp_path, text_samples.byte_level(), tokenizer_config=config, generation_config=generation
    )
    ours, theirs = tokenizer_of(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.eos_token == theirs.eos_token == "<|im_end|>"
    assert ours.eos_token_id == theirs.eos_token_id == 2


def test_a_tokenizer_without_an_end_token_has_none_whatever_ends_generation(tmp_path: Path) -> None:
    folder = text_samples.folder(tmp_path, text_samples.byte_level(), generation_config={"eos_token_id": [0, 2]})
    ours = tokenizer_of(folder)
    assert (ours.eos_token, ours.eos_token_id) == (None, None)


def test_tools_that_a_template_does_not_know_are_written_as_text_as_in_a_chat(tmp_path: Path) -> None:
    ours = tokenizer_of(text_samples.folder(tmp_path, text_samples.byte_level()))
    chat: list[dict[str, Any]] = [USER, CALL, RESULT]
    text = ours.apply_chat_template(chat, tools=TOOLS, tokenize=False)
    assert isinstance(text, str) and '"weather"' in text and "<tool_response>" in text
    assert text == chat_prompt(ChatTemplate(LINES), messages_of(chat), add_generation_prompt=False, tools=TOOLS)
