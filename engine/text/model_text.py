"""Loads the tokenizer and the chat template of a model."""

from typing import Any

from penstock.engine.model_files import ModelFiles, resolve_model
from penstock.engine.text.gguf_tokenizer import tokenizer_from_gguf
from penstock.engine.text.hf_tokenizer import tokenizer_from_folder
from penstock.engine.text.template import ChatTemplate, load_template
from penstock.engine.text.tokenizer import Tokenizer


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Load the tokenizer of a model; raise ModelError if there is no usable one."""
    if files.kind == "gguf":
        return tokenizer_from_gguf(files.path)
    return tokenizer_from_folder(files.path, files.config)


def load_text(
    model: str | None, chat_template: str | None = None, defaults: dict[str, Any] | None = None
) -> tuple[Tokenizer, ChatTemplate | None]:
    """Load the tokenizer and the template of a model, without its weights; raise ModelError."""
    files = resolve_model(model, need_weights=False)
    tokenizer = load_tokenizer(files)
    return tokenizer, load_template(tokenizer, chat_template, defaults)
