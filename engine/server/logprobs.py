"""Log-probabilities as clients know them: three formats over the engine's one."""

from collections.abc import Sequence

from penstock.engine.server.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from penstock.engine.text.tokenizer import Tokenizer
from penstock.executor.protocol import TokenLogprobs

FLOOR = -9999.0  # stands for minus infinity, which JSON cannot say


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            TokenLogprob(
                tokenizer.token_text(token.ids[0]),
                _bounded(token.values[0]),
                list(tokenizer.token_bytes(token.ids[0])),
                [
                    TopLogprob(tokenizer.token_text(id_), _bounded(value), list(tokenizer.token_bytes(id_)))
                    for id_, value in zip(token.ids[1:], token.values[1:], strict=True)
                ],
            )
            for token in tokens
        ]
    )


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs], offset: int, first_id: int | None = None
) -> CompletionLogprobs:
    """The old format: parallel lists. `first_id` is a token before the others that has no probability."""
    reply = CompletionLogprobs([], [], [], [])
    if first_id is not None:
        reply.tokens.append(tokenizer.token_text(first_id))
        reply.token_logprobs.append(None)
        reply.top_logprobs.append(None)
        reply.text_offset.append(offset)
        offset += len(reply.tokens[0])
    for token in tokens:
        text = tokenizer.token_text(token.ids[0])
        # Two ids may read the same; the likelier one comes first and keeps the place.
        top: dict[str, float] = {}
        for id_, value in (*zip(token.ids[1:], token.values[1:], strict=True), (token.ids[0], token.values[0])):
            top.setdefault(tokenizer.token_text(id_), _bounded(value))
        reply.tokens.append(text)
        reply.token_logprobs.append(_bounded(token.values[0]))
        reply.top_logprobs.append(top)
        reply.text_offset.append(offset)
        offset += len(text)
    return reply


def prompt_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs] | None) -> PromptLogprobs:
    """One entry per prompt position, by token id; the first position has none."""
    return [None, *(_by_id(tokenizer, token) for token in tokens or ())]


def _by_id(tokenizer: Tokenizer, token: TokenLogprobs) -> dict[str, PromptLogprob]:
    entries: dict[str, PromptLogprob] = {
        str(token.ids[0]): PromptLogprob(_bounded(token.values[0]), token.rank, tokenizer.token_text(token.ids[0]))
    }
    for rank, (id_, value) in enumerate(zip(token.ids[1:], token.values[1:], strict=True), 1):
        entries.setdefault(str(id_), PromptLogprob(_bounded(value), rank, tokenizer.token_text(id_)))
    return entries


def _bounded(value: float) -> float:
    return max(value, FLOOR)
