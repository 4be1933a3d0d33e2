"""Converts a user's request to the core's messages; shared by the server and the offline LLM."""

from array import array
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, TypedDict, Unpack

import msgspec
from msgspec import Meta

from penstock.cache.tiers.names import peer_name
from penstock.engine.front.answer import Answer, Choice
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.messages import Submit
from penstock.engine.sampling_params import SamplingParams, plain_number, short
from penstock.engine.text.stop_strings import StopCondition
from penstock.engine.text.tokenizer import Tokenizer
from penstock.executor.protocol import ModelInfo, Pooled, Sampling

DEFAULT_WAIT_S = 2.0  # for blocks of a peer
Pooling = Literal["last", "mean"]


class SubmitFields(TypedDict, total=False):
    """Optional fields of a request besides prompt and sampling, with the names of `Submit`."""

    priority: int
    cache_salt: str | None
    pooling: Pooled | None
    grammar: str | None
    adapter: str | None
    client: bytes


class KvTransfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The peer that has the prompt's blocks or will have them, one of the engine's `--kv-peer`, and how long to wait for
    them. An empty object requests no transfer: clients of vLLM's prefill/decode proxies send it with every request."""

    peer: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    wait_s: Annotated[float, Meta(ge=0, le=600)] | None = None

    def __post_init__(self) -> None:
        if self.peer is None and self.wait_s is not None:
            raise ValueError("wait_s is given without a peer")


class AnswerOptions(SubmitFields, total=False):
    """All options of `begin_answer`, which explains them."""

    is_continuation: bool
    shown_ids: frozenset[int]
    stop_condition: Callable[[], StopCondition] | None
    kv_transfer: KvTransfer | None
    sampling: Sampling | None


def token_bytes(tokens: Sequence[int], vocab_size: int, field: str = "prompt") -> bytes:
    """Encode token ids, a sequence or an array of them, for the core; raise InvalidRequest for ids outside the vocabulary."""
    ids = tokens.tolist() if hasattr(tokens, "tolist") else tokens  # numpy's, torch's and Python's arrays
    if not isinstance(ids, Sequence) or isinstance(ids, str):
        raise InvalidRequest(field, f"{short(tokens)} given; a text or a list of token ids is expected")
    if not ids:
        raise InvalidRequest(field, "the prompt is empty; at least one token is needed")
    try:
        packed = array("I", ids)  # unsigned, so negative ids overflow as well
        # 3.1 ms for 131k ids. numpy's maximum takes 1.6, but its import would delay the start or first request by 70.
        if max(packed) < vocab_size and ids[0] is not True and ids[0] is not False:  # the elements of a boolean array
            return packed.tobytes()
    except (TypeError, OverflowError):
        pass
    bad = next(each for each in map(plain_number, ids) if type(each) is not int or not 0 <= each < vocab_size)
    if type(bad) is not int:
        raise InvalidRequest(field, f"{short(bad)} given; a list of token ids may hold integers only")
    raise InvalidRequest(field, f"token id {str(bad)[:24]} is outside the vocabulary, 0 to {vocab_size - 1}")


def check_length(num_tokens: int, info: ModelInfo, field: str = "prompt", num_answered: int = 1) -> None:
    """Raise InvalidRequest unless the prompt leaves room for `num_answered` tokens."""
    most = info.max_model_len - num_answered
    if num_tokens > most:
        holds = f"{info.max_model_len} with the answer" if num_answered else f"{most}"
        raise InvalidRequest(field, f"{num_tokens} tokens; the context holds {holds}, so at most {most} can be given")


def _source(transfer: KvTransfer | None, info: ModelInfo) -> tuple[str | None, float]:
    """Return the name of the store that has the prompt's blocks or will have them, and how long to wait for them."""
    if transfer is None or transfer.peer is None:
        return None, 0.0
    peer = peer_name(transfer.peer)
    if peer not in info.stores:  # only the operator chooses peers
        raise InvalidRequest("kv_transfer_params.peer", f"{transfer.peer[:64]!r} is not a --kv-peer of this engine")
    return peer, DEFAULT_WAIT_S if transfer.wait_s is None else transfer.wait_s


def begin_answer(
    request_id: str,
    prompt: Sequence[int] | bytes,
    params: SamplingParams,
    info: ModelInfo,
    tokenizer: Tokenizer | None,
    abort: Callable[[list[str]], None],
    *,
    is_continuation: bool = False,
    shown_ids: frozenset[int] = frozenset(),
    stop_condition: Callable[[], StopCondition] | None = None,
    kv_transfer: KvTransfer | None = None,
    sampling: Sampling | None = None,
    **fields: Unpack[SubmitFields],
) -> Answer:
    """Check the prompt of a request, whose `params` have been checked; return its answer, with the messages that start it
    in the core.

    `prompt`: token ids, or the result of `token_bytes`: 131k ids take 4 ms to check.
    `is_continuation`: the text continues the prompt's text (a completion, a begun message). Some vocabularies mark the
    first word of a text with a space, which only a continuation keeps.
    `shown_ids`: special tokens that are part of the text in any case.
    `stop_condition`: creates for each choice the condition under which stop strings apply.
    `grammar`: the grammar's text; it implements `params.structured_outputs`, and may be stricter.
    `kv_transfer`: the other engine that has the prompt's blocks, or will have them soon.
    `sampling`: derived from the same `params` except for seed and length. Lists of thousands of ids take milliseconds to
    sort, and a call may have a thousand prompts.
    """
    if not isinstance(prompt, bytes):
        prompt = token_bytes(prompt, info.vocab_size)
    check_length(len(prompt) // 4, info, num_answered=int(fields.get("pooling") is None and params.max_tokens != 0))
    if sampling is None:
        sampling = params.sampling(() if tokenizer is None else tokenizer.eos_ids)
    assert params.structured_outputs is None or fields.get("grammar") is not None, "the output format has a grammar"
    peer, peer_wait_s = _source(kv_transfer, info)
    room = info.max_model_len - len(prompt) // 4
    messages, choices = [], []
    for index in range(params.n):  # later choices hit the first one's prompt in the prefix cache
        messages.append(
            Submit(
                f"{request_id}.{index}",
                prompt,
                msgspec.structs.replace(sampling, seed=params.seed_of(index)),
                room if params.max_tokens is None else min(params.max_tokens, room),
                peer=peer,
                peer_wait_s=peer_wait_s,
                **fields,
            )
        )
        stream = None
        if tokenizer is not None and params.detokenize:
            stream = tokenizer.stream(params.skip_special_tokens, is_continuation, shown_ids)
        may_stop = stop_condition() if stop_condition is not None and params.stop_strings else None
        choices.append(Choice(index, params, stream, may_stop))
    return Answer(messages, choices, abort)
