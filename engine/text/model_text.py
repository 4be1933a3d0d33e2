"""Loads the tokenizer and the chat template of a model."""

import os
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


def is_on_this_machine(model: str) -> bool:
    """Return whether a folder of a model, a .gguf file or an entry of the hub's cache has this name."""
    from huggingface_hub.constants import HF_HUB_CACHE  # follows HF_HOME and HF_HUB_CACHE

    if os.path.isdir(os.path.join(HF_HUB_CACHE, f"models--{model.replace('/', '--')}", "snapshots")):
        return True
    return os.path.isfile(os.path.join(model, "config.json")) or (model.endswith(".gguf") and os.path.isfile(model))
