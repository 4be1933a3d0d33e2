"""Log-probabilities as clients know them: three formats over the engine's one."""

from collections.abc import Sequence

from penstock.engine.front.results import candidates
from penstock.engine.server.responses import ChatLogprobs, CompletionLogprobs, PromptLogprobs, TokenLogprob, TopLogprob
from penstock.engine.text.tokenizer import Tokenizer
from penstock.executor.protocol import TokenLogprobs

FLOOR = -9999.0  # stands for minus infinity, which JSON cannot say


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs]) -> ChatLogprobs:
    def shown(id_: int, value: float) -> TopLogprob:
        return TopLogprob(tokenizer.token_text(id_), value, list(tokenizer.token_bytes(id_)))

    content = []
    for token in map(_bounded, tokens):
        chosen, *top = [shown(id_, value) for id_, value in zip(token.ids, token.values, strict=True)]
        content.append(TokenLogprob(chosen.token, chosen.logprob, chosen.bytes, top))
    return ChatLogprobs(content)


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs], offset: int, first_id: int | None = None
) -> CompletionLogprobs:
    """The old format: parallel lists. `first_id` is a token before the others that has no probability."""
    reply = CompletionLogprobs([], [], [], [])

    def add(text: str, value: float | None, top: dict[str, float] | None) -> None:
        nonlocal offset
        reply.tokens.append(text)
        reply.token_logprobs.append(value)
        reply.top_logprobs.append(top)
        reply.text_offset.append(offset)
        offset += len(text)

    if first_id is not None:
        add(tokenizer.token_text(first_id), None, None)
    for token in map(_bounded, tokens):
        # Two ids may read the same; the likelier one comes first and keeps the place.
        top: dict[str, float] = {}
        for id_, value in (*zip(token.ids[1:], token.values[1:], strict=True), (token.ids[0], token.values[0])):
            top.setdefault(tokenizer.token_text(id_), value)
        add(tokenizer.token_text(token.ids[0]), token.values[0], top)
    return reply


def prompt_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs] | None) -> PromptLogprobs:
    """One entry per prompt position, by token id; the first position has none."""
    return [None, *(candidates(_bounded(token), tokenizer.token_text) for token in tokens or ())]


def _bounded(token: TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(token.ids, tuple(max(value, FLOOR) for value in token.values), token.rank)
