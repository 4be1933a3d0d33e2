"""Converts the engine's log-probabilities to the three formats of the API.

Each position becomes JSON at once: encoding a long answer as a whole would hold the GIL, in a thread too.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

from msgspec import Raw
from msgspec.json import encode

from penstock.engine.front.values import candidates
from penstock.engine.text.detokenize import TextStream
from penstock.engine.text.tokenizer import Tokenizer
from penstock.executor.protocol import TokenLogprobs

FLOOR = -9999.0  # replaces minus infinity, which JSON cannot represent
_id_text = "token_id:{}".format  # the text of a token with `return_tokens_as_token_ids`


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs], as_ids: bool | None) -> dict[str, Any]:
    read = _id_text if as_ids else tokenizer.token_text

    def shown(id_: int, value: float) -> dict[str, Any]:
        return {"token": read(id_), "logprob": value, "bytes": list(tokenizer.token_bytes(id_))}

    content = []
    for token in map(_bounded, tokens):
        chosen, *top = [shown(id_, value) for id_, value in zip(token.ids, token.values, strict=True)]
        content.append(Raw(encode(chosen | {"top_logprobs": top})))
    return {"content": content, "refusal": None}


def begins_characters(tokenizer: Tokenizer, id_: int) -> list[bool]:
    """Return for each byte of a token whether it begins a UTF-8 character."""
    return [byte & 0xC0 != 0x80 for byte in tokenizer.token_bytes(id_)]


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs], offset: int, first_id: int | None, as_ids: bool | None
) -> tuple[dict[str, Any], int]:
    """Return the completions format (parallel lists) and the text offset after it. `first_id` is a first token without
    a probability. All tokens of one character have the same offset."""
    reply: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    read = _id_text if as_ids else tokenizer.token_text

    def add(id_: int, value: float | None, top: Raw | None) -> None:
        nonlocal offset
        reply["tokens"].append(read(id_))
        reply["token_logprobs"].append(value)
        reply["top_logprobs"].append(top)
        begins = begins_characters(tokenizer, id_)
        reply["text_offset"].append(max(offset - (begins[:1] == [False]), 0))
        offset += sum(begins)

    if first_id is not None:
        add(first_id, None, None)
    for token in map(_bounded, tokens):
        # Two ids may have the same text; the likelier one comes first and is kept.
        top: dict[str, float] = {}
        for id_, value in (*zip(token.ids[1:], token.values[1:], strict=True), (token.ids[0], token.values[0])):
            top.setdefault(read(id_), value)
        add(token.ids[0], token.values[0], Raw(encode(top)))
    return reply, offset


class TextLogprobs:
    """Assigns the tokens of an answer to the runs of its text that are returned, such as the text between two calls. A token
    belongs to the first run that has a part of its text; special tokens that are not shown belong to none."""

    def __init__(self, tokenizer: Tokenizer, stream: TextStream, as_ids: bool | None) -> None:
        """`stream` decodes the answer a second time, token by token."""
        self._tokenizer, self._stream, self._as_ids = tokenizer, stream, as_ids
        self._num_chars = 0
        self._tokens: deque[tuple[int, int, Raw]] = deque()  # where a token's text begins and ends; its entry

    def add(self, tokens: Sequence[TokenLogprobs]) -> None:
        entries = chat_logprobs(self._tokenizer, tokens, self._as_ids)["content"]
        for token, entry in zip(tokens, entries, strict=True):
            begin, self._num_chars = self._num_chars, self._num_chars + len(self._stream.push([token.ids[0]]))
            if begin < self._num_chars or token.ids[0] not in self._tokenizer.special_ids:
                self._tokens.append((begin, self._num_chars, entry))

    def take(self, begin: int, end: int) -> list[Raw]:
        """Return the entries of the run of text from `begin` to `end`, and drop those before it."""
        while self._tokens and self._tokens[0][0] < begin and self._tokens[0][1] <= begin:
            self._tokens.popleft()
        taken = []
        while self._tokens and self._tokens[0][0] < end:
            taken.append(self._tokens.popleft()[2])
        return taken


def prompt_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs] | None) -> list[Raw | None]:
    """Return, in vLLM's format, one entry per prompt position, by token id; the entry of the first position is None."""
    return [None, *(Raw(encode(candidates(_bounded(token), tokenizer.token_text))) for token in tokens or ())]


def _bounded(token: TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(token.ids, tuple(max(value, FLOOR) for value in token.values), token.rank)
