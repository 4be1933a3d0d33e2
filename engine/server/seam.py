"""What the server needs of the text room: a tokenizer and a chat template. `engine.text` has the real ones."""

from collections.abc import Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class Template(Protocol):
    def render(self, messages: list[dict[str, Any]], **variables: Any) -> str: ...
