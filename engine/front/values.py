"""The log-probabilities and vectors of an answer as plain values, for the offline API and the server."""

from collections.abc import Callable

import msgspec
import numpy as np

from penstock.executor.protocol import TokenLogprobs

TokenText = Callable[[int], str]  # returns the text of a token


class Logprob(msgspec.Struct, frozen=True):
    """A sampled or possible token at one position."""

    logprob: float
    rank: int  # 1 is the most likely
    decoded_token: str | None = None  # None without a tokenizer


Candidates = dict[int, Logprob]  # by token id: first the sampled one, then the most likely ones in order


def candidates(entry: TokenLogprobs, text: TokenText | None) -> Candidates:
    """Return the candidates of one position; `text` returns the text of a token."""
    ranks = (entry.rank, *range(1, len(entry.ids)))
    found: Candidates = {}
    for token_id, value, rank in zip(entry.ids, entry.values, ranks, strict=True):
        found.setdefault(token_id, Logprob(value, rank, None if text is None else text(token_id)))
    return found


def embedding_of(embedding: bytes, normalize: bool) -> np.ndarray:
    """Return the float32 vector in an answer's `embedding`, scaled to length 1 if `normalize` is set."""
    vector = np.frombuffer(embedding, "<f4")
    return vector / (np.linalg.norm(vector) or 1.0) if normalize else vector  # a vector of zeros stays as it is
