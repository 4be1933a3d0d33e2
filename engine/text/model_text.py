"""Loads the tokenizer and chat template of a model, and computes a digest that identifies both.

Two processes with equal digests turn a request into the same token ids. The router sends token ids only to an engine
with the same digest.
"""

import hashlib

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


def load_text(model: str | None, chat_template: str | None = None) -> tuple[Tokenizer, ChatTemplate | None]:
    """Load the tokenizer and the template of a model, without its weights; raise ModelError."""
    files = resolve_model(model, need_weights=False)
    tokenizer = load_tokenizer(files)
    return tokenizer, load_template(tokenizer, chat_template)


def text_digest(tokenizer: Tokenizer, template: ChatTemplate | None) -> str:
    """Return a digest of 32 hexadecimal characters over everything that determines the token ids of a text."""
    parts = (tokenizer.backend.to_str(), "" if template is None else template.digest)
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:32]
