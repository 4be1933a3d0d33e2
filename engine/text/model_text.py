"""The text room of one model, whole: its tokenizer and its chat template, and a digest that says which they are.

Two processes with equal digests make the same ids of the same request. The router forwards ids only to an engine
whose digest is its own.
"""

import hashlib

from penstock.engine.model_files import resolve_model
from penstock.engine.text.load_tokenizer import load_tokenizer
from penstock.engine.text.template import ChatTemplate, load_template
from penstock.engine.text.tokenizer import Tokenizer


def load_text(model: str | None, chat_template: str | None = None) -> tuple[Tokenizer, ChatTemplate | None]:
    """Load the tokenizer and the template from the model's files; needs no weights. Raise ModelNotFound or ModelRefused."""
    files = resolve_model(model, need_weights=False)
    tokenizer = load_tokenizer(files)
    return tokenizer, load_template(tokenizer, chat_template)


def text_digest(tokenizer: Tokenizer, template: ChatTemplate | None) -> str:
    """Return 32 hexadecimal characters over everything that decides which ids a text becomes."""
    parts = (tokenizer.backend.to_str(), "" if template is None else template.digest)
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:32]
