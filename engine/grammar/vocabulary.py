"""Describes a tokenizer to llguidance: the bytes of each token, the special tokens, and how text is tokenized.

The bytes come from our own detokenizer, so the grammar accepts exactly the text that the user receives. Building one
takes a few hundred milliseconds for a large vocabulary; the `Compiler` does it in its thread, on first use.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer as Backend

from penstock.engine.model_files import resolve_model
from penstock.engine.text.model_text import load_tokenizer
from penstock.engine.text.tokenizer import Tokenizer
from penstock.executor.protocol import ExecutorConfig, ModelInfo

NO_END = b"<no end>"  # name of an additional id beyond the vocabulary, for a model without end token


class GrammarVocabulary:
    def __init__(
        self,
        tokens: Sequence[bytes],
        special_ids: Iterable[int],
        eos_ids: Iterable[int],
        encode: Callable[[str], list[int]],
    ) -> None:
        """Build the vocabulary. `tokens` holds the bytes of each id: its text, a special token's name, or nothing."""
        from llguidance import LLTokenizer

        self.size = len(tokens)
        self.eos_ids = frozenset(token_id for token_id in eos_ids if token_id < self.size)
        special, ends, tokens = {*special_ids, *self.eos_ids}, sorted(self.eos_ids), list(tokens)
        if not ends:  # llguidance needs an end token: add an id that no model samples
            ends = [self.size]
            special.add(self.size)
            tokens.append(NO_END)
        self.num_words = -(-len(tokens) // 32)  # number of 32-bit words in one row of a mask
        self.backend = LLTokenizer(_Wrapper(tokens, sorted(special), ends[0], encode), len(tokens), ends)  # type: ignore[arg-type]

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int) -> "GrammarVocabulary":
        """Build the vocabulary of a tokenizer for `size` logits, which may differ from the number of its ids."""
        num_known = min(size, tokenizer.vocab_size)
        special = [token_id for token_id in tokenizer.special_ids if token_id < num_known]
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(num_known)]
        for token_id in special:
            tokens[token_id] = (tokenizer.backend.id_to_token(token_id) or "").encode()
        tokens += [b""] * (size - num_known)
        return cls(tokens, special, tokenizer.eos_ids, ExactEncoder(tokenizer.backend, tokens, special))


def load_vocabulary(config: ExecutorConfig, info: ModelInfo) -> GrammarVocabulary:
    """Load the vocabulary of the executor's model, for a process that has no tokenizer loaded."""
    return GrammarVocabulary.of(load_tokenizer(resolve_model(config.model, need_weights=False)), info.vocab_size)


class ExactEncoder:
    """Tokenizes a forced text as the tokenizer does, provided that the tokens give exactly the bytes of the text.

    SentencePiece prepends a space, replaces spaces with its own mark, and has several tokens with the same text, so the
    bytes of its tokens are compared with the bytes of the text.
    """

    MARK = "\n"  # prepended to a text, so that the tokenizer adds its space before the mark instead

    def __init__(self, backend: Backend, tokens: Sequence[bytes], special_ids: Iterable[int]) -> None:
        self._tokens = tokens
        # Forced text that looks like a special token is still text; encoded as the token it could end the answer early.
        self._backend = _another(backend)
        self._backend.encode_special_tokens = True
        special = set(special_ids)
        self._by_bytes = {piece: index for index, piece in enumerate(tokens) if piece and index not in special}
        self._longest = max(map(len, self._by_bytes), default=0)

    def __call__(self, text: str) -> list[int]:
        wanted = text.encode()
        ids = self._encode(text)
        if self._bytes(ids) == wanted:
            return ids
        ids = self._encode(self.MARK + text)
        for index in range(1, min(len(ids), 4)):  # the space and the mark are at most 3 tokens
            if self._bytes(ids[index:]) == wanted:
                return ids[index:]
        return self._longest_first(wanted)

    def _encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def _bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self._tokens[token_id] if token_id < len(self._tokens) else b"" for token_id in ids)

    def _longest_first(self, rest: bytes) -> list[int]:
        """Tokenize greedily by longest match until no token fits. The model samples the rest itself."""
        ids = []
        while rest:
            size = next((n for n in range(min(self._longest, len(rest)), 0, -1) if rest[:n] in self._by_bytes), 0)
            if size == 0:
                break
            ids.append(self._by_bytes[rest[:size]])
            rest = rest[size:]
        return ids


def _another(backend: Backend) -> Backend:
    """Return a tokenizer with separate settings for the same model. Loading one with 152k tokens again takes 0.8 s."""
    other = Backend(backend.model)
    other.normalizer, other.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    added = backend.get_added_tokens_decoder()
    for token_id in sorted(added):
        (other.add_special_tokens if added[token_id].special else other.add_tokens)([added[token_id]])
    # The library numbers added tokens consecutively; if the file assigns other ids, rebuild from the file's text.
    same = {token_id: token.content for token_id, token in other.get_added_tokens_decoder().items()}
    if same != {token_id: token.content for token_id, token in added.items()}:
        other = Backend.from_str(backend.to_str())
    return other


@dataclass
class _Wrapper:
    """Provides the attributes that LLTokenizer reads."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    encode: Callable[[str], list[int]]
    bos_token_id: None = None
    is_tokenizer_wrapper: bool = True

    def __call__(self, text: str) -> list[int]:
        return self.encode(text)
