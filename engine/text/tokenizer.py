"""The engine's tokenizer: converts text to token ids and back, using the `tokenizers` library.

`load_tokenizer` (model_text.py) creates it for any model. It also holds the end token ids, the special tokens by
name, and the sources of the chat templates (template.py renders them).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from penstock.engine.invalid_request import InvalidRequest, check_unicode
from penstock.engine.model_error import ModelError, check_size
from penstock.engine.text.detokenize import Detokenizer

MAX_TOKEN_ID = 2**32 - 1  # largest id that the library accepts
MAX_TEMPLATE_BYTES = 1 << 20


class Tokenizer:
    """A model's tokenizer, created by `load_tokenizer`. Thread-safe; its streams are not."""

    def __init__(
        self,
        backend: Backend,
        *,
        vocab_size: int | None = None,
        eos_ids: frozenset[int] = frozenset(),
        special_tokens: dict[str, str] | None = None,
        chat_templates: dict[str, str] | None = None,
    ) -> None:
        backend.no_truncation()  # a tokenizer.json may enable truncation and padding, which would change prompts
        backend.no_padding()
        self.backend = backend
        self.vocab_size = vocab_size or backend.get_vocab_size()
        self.eos_ids = eos_ids
        self.special_tokens = special_tokens or {}  # "bos_token", "eos_token" … → their text, as templates name them
        self.chat_templates = chat_templates or {}  # "default", "tool_use" … → source
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        detokenizer = Detokenizer(backend, self.special_ids)
        self.stream, self.token_bytes = detokenizer.stream, detokenizer.token_bytes

    def special_id(self, name: str) -> int | None:
        """Return the id of a special token by its name, such as "bos_token"; None if there is none."""
        token = self.special_tokens.get(name)
        token_id: int | None = None if token is None else self.backend.token_to_id(token)
        return token_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. Special tokens spelled out in the text are encoded as special tokens."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        try:
            encodings: list[Encoding] = self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError):
            for text in texts:
                if not isinstance(text, str):
                    raise InvalidRequest("prompt", f"{type(text).__name__} given; a string is expected") from None
                check_unicode(text, "prompt")
            raise
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of all ids. A stream's pushes and its flush concatenate to the same text."""
        for token_id in ids:
            if not 0 <= token_id <= MAX_TOKEN_ID:
                raise InvalidRequest("tokens", f"{token_id} is not a token id; it must be from 0 to {MAX_TOKEN_ID}")
        text: str = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """Return the text of one token for display, with U+FFFD in place of an incomplete character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


@contextmanager
def refusing(problem: str) -> Iterator[None]:
    """Convert an error of the `tokenizers` library, which raises plain Exception only, to ModelError with `problem`."""
    try:
        yield
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise ModelError(f"{problem}: {error}") from None


def read_template(name: str, path: Path) -> str:
    """Read the source of a chat template."""
    check_size(name, path, MAX_TEMPLATE_BYTES)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{name}: {path} is not UTF-8 text ({error})") from None
