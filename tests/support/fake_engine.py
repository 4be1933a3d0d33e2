"""A stand-in for the engine behind the server: repeats the prompt, and can stall, fill up, fail and die on demand.

The tokenizer and the template are real ones, the tokenizer over a vocabulary of single bytes, so token i of "abc" is the i-th byte.
"""

import asyncio
import contextlib
from array import array
from collections.abc import Collection, Sequence
from typing import Any

from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from penstock.engine.core.grammars import GrammarRefused
from penstock.engine.engine_options import engine_config
from penstock.engine.front.answer import Answer
from penstock.engine.front.engine import EngineDead, EngineHealth, QueueFull
from penstock.engine.front.submit import begin_answer
from penstock.engine.grammar.compiler import Compiler
from penstock.engine.grammar.vocabulary import GrammarVocabulary
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.messages import CacheUpdate, FinishReason, MissReason, Output, Reuse, Stats, Submit
from penstock.engine.sampling_params import SamplingParams
from penstock.engine.text.detokenize import byte_alphabet
from penstock.engine.text.template import ChatTemplate
from penstock.engine.text.tokenizer import Tokenizer
from penstock.executor.protocol import ModelInfo, TokenLogprobs, WeightsError
from tests.support.chat_samples import LINES

EOS = 256
INFO = ModelInfo(
    architecture="Fake",
    dtype="float32",
    device="cpu",
    vocab_size=300,
    hidden_size=4,
    max_model_len=1000,
    block_size=16,
    num_blocks=64,
    block_bytes=2**20,
    fingerprint=b"\x01" * 32,
    max_in_flight=2,
)


def byte_tokenizer(*special: str) -> Tokenizer:
    """Ids are bytes, then `EOS`, then these special tokens."""
    backend = Backend(BPE(byte_alphabet(), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<eos>", *special)])
    return Tokenizer(backend, eos_ids=frozenset({EOS}))


def line_template() -> ChatTemplate:
    """`role: content` lines, and the variables that a request may set, so that a test can see what arrived."""
    return ChatTemplate(LINES)


class FakeEngine:
    """Answers with the prompt, over and over. `delay_s` is the time of a step; `hold` stops all steps."""

    def __init__(
        self, *, delay_s: float = 0.0, max_open: int = 4096, info: ModelInfo = INFO, tokenizer: Tokenizer | None = None
    ) -> None:
        self.info = info
        self.reply: str | None = None  # what it says in place of the prompt
        self.miss: MissReason = "partial_block"
        self.config = engine_config("fake", {})
        self.stats = Stats(num_blocks=info.num_blocks)
        self.on_step: Any = None
        self.on_cache_update: Any = None
        self.is_watched = False
        self.delay_s = delay_s
        self.step_tokens = 1  # brought by one step
        self.max_open, self.most = max_open, 4096  # sequences at a time, and in one request
        self.hold = False
        self.fail_next: str | None = None  # ends every running sequence with this error
        self.is_refusal = False  # with an error: the request itself is invalid
        self.submitted: list[tuple[list[int], SamplingParams, dict[str, Any]]] = []
        self.aborted: list[str] = []
        self.num_admissions = 0
        self._death: str | None = None
        self._is_healthy = True
        self._open: dict[str, asyncio.Task[None]] = {}
        self._count = 0
        self.tokenizer = tokenizer or byte_tokenizer()
        self.compiler = Compiler(lambda: GrammarVocabulary(self.tokenizer, info.vocab_size))

    @property
    def answers(self) -> Collection[Any]:
        return self._open

    def health(self) -> EngineHealth:
        if self._death is not None:
            return EngineHealth(False, False, self._death)
        return EngineHealth(self._is_healthy, self._is_healthy, "ok" if self._is_healthy else "a step hangs")

    def admit(self, num_sequences: int = 1, num_preparing: int = 0, field: str = "prompt") -> None:
        self.num_admissions += 1
        if self._death is not None:
            raise EngineDead(self._death)
        if num_sequences > self.most:
            raise InvalidRequest(field, f"{num_sequences} sequences requested")
        if len(self._open) + num_preparing + num_sequences > self.max_open:
            raise QueueFull(f"{len(self._open)} sequences are in flight", retry_after_s=7)

    def generate(self, prompt: Sequence[int] | bytes, params: SamplingParams, **options: Any) -> Answer:
        names = (*Submit.__struct_fields__, "shown_ids", "stop_condition", "kv_transfer")
        fields = {name: value for name, value in options.items() if name in names}
        self._count += 1
        answer = begin_answer(str(self._count), prompt, params, self.info, self.tokenizer, self.abort, **fields)
        prompt_ids = answer.prompt_token_ids
        self.admit(params.n)
        self.submitted.append((prompt_ids, params, options))
        said = prompt_ids if self.reply is None else [*self.tokenizer.encode(self.reply, False), EOS]
        for index, message in enumerate(answer.messages):
            running = self._run(message.request_id, answer, index, said, params, options)
            self._open[message.request_id] = asyncio.ensure_future(running)
        return answer

    def watch_cache(self, is_on: bool, *, with_blocks: bool = False) -> None:
        self.is_watched = is_on
        if is_on:
            self.on_cache_update(CacheUpdate("device", b"", b"", True))

    async def control(self, operation: str, **_fields: Any) -> None:
        assert operation == "reset_prefix_cache", "it has no other operation"
        if self._open:
            raise WeightsError("requests are in flight; try again")

    def abort(self, request_ids: Any) -> None:
        for name in list(request_ids):
            task = self._open.get(name)
            if task is not None and not task.done():
                self.aborted.append(name)
                task.cancel()

    def die(self, reason: str) -> None:
        self._death = reason
        for task in list(self._open.values()):
            task.cancel()

    def hang(self) -> None:
        """Unhealthy, but no request learns of it."""
        self.hold, self._is_healthy = True, False

    async def close(self, reason: str = "the engine is closed") -> None:
        if self._death is None:
            self.die(reason)
        while self._open:
            await asyncio.sleep(0)

    async def _run(
        self, name: str, answer: Answer, index: int, prompt: list[int], params: SamplingParams, options: Any
    ) -> None:
        is_default = params.max_tokens is None and self.reply is not None
        max_tokens = len(prompt) if is_default else answer.messages[index].max_tokens
        try:
            if options.get("pooling"):
                await self._step()
                vector = array("f", [float(len(prompt)), float(prompt[0]), 2.0, 4.0])
                answer.take(index, Output(name, [], finish_reason="length", embedding=vector.tobytes()))
                return
            if max_tokens == 0:
                answer.take(index, Output(name, [], finish_reason="length", prompt_logprobs=_scored(prompt, params)))
                return
            if (refusal := await self._refusal(options.get("grammar"))) is not None:
                self.submitted = [each for each in self.submitted if each[2] is not options]
                answer.take(index, Output(name, [], finish_reason="error", error=refusal, is_refusal=True))
                return
            for position in range(max_tokens):
                if position % self.step_tokens == 0:
                    await self._step()
                if self.fail_next is not None:
                    failed = Output(name, [], finish_reason="error", error=self.fail_next, is_refusal=self.is_refusal)
                    answer.take(index, failed)
                    return
                is_last = position == max_tokens - 1
                answer.take(index, self._output(name, prompt, params, position, is_last))
                if prompt[position % len(prompt)] == EOS and not params.ignore_eos:
                    return
        except asyncio.CancelledError:
            reason: FinishReason = "abort" if self._death is None else "error"
            answer.take(index, Output(name, [], finish_reason=reason, error=self._death))
        finally:
            del self._open[name]

    async def _refusal(self, grammar: str | None) -> str | None:
        """Compile the grammar as the core does; return why it is refused."""
        if grammar is not None and self.compiler.cached(grammar) is None:
            try:
                await asyncio.to_thread(compile_within_limits, self.compiler, grammar)
            except GrammarRefused as error:
                return f"the grammar cannot be compiled: {error}"
        return None

    async def _step(self) -> None:
        await asyncio.sleep(self.delay_s)
        while self.hold:
            await asyncio.sleep(0.005)

    def _output(self, name: str, prompt: list[int], params: SamplingParams, position: int, is_last: bool) -> Output:
        token = prompt[position % len(prompt)]
        is_stop = token in (params.stop_token_ids or ()) or (token == EOS and not params.ignore_eos)
        first = position == 0
        return Output(
            name,
            [token],
            finish_reason="stop" if is_stop else "length" if is_last else None,
            stop_token=token if is_stop else None,
            reuse=Reuse({"device": len(prompt) // 16 * 16}, self.miss) if first else None,
            logprobs=None if params.logprobs is None else [_logprobs(token, params.logprobs)],
            prompt_logprobs=_scored(prompt, params) if first else None,
            queued_s=0.001 if first else None,
        )


def _scored(prompt: list[int], params: SamplingParams) -> list[TokenLogprobs] | None:
    count = params.prompt_logprobs
    return None if count is None else [_logprobs(token, count) for token in prompt[1:]]


def _logprobs(token: int, count: int) -> TokenLogprobs:
    """Return log probabilities in which the token is the likeliest, its neighbours follow, and the last one is impossible."""
    ids = tuple((token + step) % 256 for step in range(count))
    values = [-0.5 * (step + 1) for step in range(count)]
    if count > 1:
        values[-1] = float("-inf")
    return TokenLogprobs((token, *ids), (-0.5, *values), 1)


def compile_within_limits(compiler: Compiler, source: str) -> None:
    """Compile a grammar as the core does; raise GrammarRefused if it is invalid or exceeds the time limits."""
    if compiler.cached(source) is not None:
        return
    job = compiler.start(source)
    while not job.result.done():
        with contextlib.suppress(TimeoutError):
            job.result.exception(0.05)
        if limit := job.limit_passed():
            compiler.give_up(job)
            raise GrammarRefused(limit)
    job.result.result()
