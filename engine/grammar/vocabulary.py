"""Describes a tokenizer to llguidance: the bytes of each token, the special tokens, and how text is tokenized.

The bytes come from our own detokenizer, so the grammar accepts exactly the text that the user receives. Building one
takes a few hundred milliseconds for a large vocabulary; the `Compiler` does it in its thread, on first use.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from tokenizers import Tokenizer as Backend

from penstock.engine.text.tokenizer import Tokenizer

NO_END = b"<no end>"  # name of an additional id beyond the vocabulary, for a model without end token


class GrammarVocabulary:
    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        """Describe a tokenizer for `size` logits, which may differ from the number of its ids."""
        from llguidance import LLTokenizer

        self.size = size
        self.eos_ids = frozenset(token_id for token_id in tokenizer.eos_ids if token_id < size)
        num_known, ends = min(size, tokenizer.vocab_size), sorted(self.eos_ids)
        special = {token_id for token_id in tokenizer.special_ids if token_id < num_known}
        # The bytes of each id: its text, a special token's name, or nothing.
        tokens = [tokenizer.token_bytes(token_id) for token_id in range(num_known)] + [b""] * (size - num_known)
        for token_id in special:
            tokens[token_id] = (tokenizer.backend.id_to_token(token_id) or "").encode()
        if not ends:  # llguidance needs an end token: add an id that no model samples
            ends = [size]
            tokens.append(NO_END)
        self.num_words = -(-len(tokens) // 32)  # number of 32-bit words in one row of a mask
        encoder = ExactEncoder(tokenizer.backend, tokens, special | {*ends}, ends[0])
        self.backend = LLTokenizer(encoder, len(tokens), ends)  # type: ignore[arg-type]


class ExactEncoder:
    """Tokenizes a forced text as the tokenizer does, provided that the tokens give exactly the bytes of the text.

    SentencePiece prepends a space, replaces spaces with its own mark, and has several tokens with the same text, so the
    bytes of its tokens are compared with the bytes of the text.
    """

    MARK = "\n"  # prepended to a text, so that the tokenizer adds its space before the mark instead
    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(
        self, backend: Backend, tokens: Sequence[bytes], special_ids: AbstractSet[int], eos_token_id: int
    ) -> None:
        # LLTokenizer reads these attributes:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, sorted(special_ids), eos_token_id
        # Forced text that looks like a special token is still text; encoded as the token it could end the answer early.
        self._backend = _another(backend)
        self._backend.encode_special_tokens = True
        self._by_bytes = {piece: index for index, piece in enumerate(tokens) if piece and index not in special_ids}
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
        return b"".join(self.tokens[token_id] if token_id < len(self.tokens) else b"" for token_id in ids)

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
