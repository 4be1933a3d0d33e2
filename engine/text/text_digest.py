"""A digest that identifies a tokenizer and a chat template.

Two processes with equal digests turn a request into the same token ids. The router sends token ids only to an engine
with the same digest.
"""

import hashlib

from penstock.engine.text.template import ChatTemplate
from penstock.engine.text.tokenizer import Tokenizer


def text_digest(tokenizer: Tokenizer, template: ChatTemplate | None) -> str:
    """Return a digest of 32 hexadecimal characters over everything that determines the token ids of a text."""
    parts = (tokenizer.backend.to_str(), "" if template is None else template.digest)
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:32]
