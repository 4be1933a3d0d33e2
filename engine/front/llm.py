"""The offline API: a model in this process, a list of prompts in, a list of results out.

No server, no sockets: `generate` drives the engine core itself, in the calling thread.
"""

import contextlib
import random
import signal
import threading
import time
import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Self

import msgspec

from penstock.engine.config import EngineConfig, engine_config
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.front.answer import (
    Choice,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestMetrics,
    RequestOutput,
    Update,
    candidates,
    joined,
    unit_length,
)
from penstock.engine.front.grammar_check import GrammarCheck
from penstock.engine.front.hf_interface import FamiliarTokenizer
from penstock.engine.front.submit import Pooling, check_length, submissions, token_bytes
from penstock.engine.grammar.compiler import Compiler
from penstock.engine.grammar.vocabulary import GrammarVocabulary
from penstock.engine.messages import Output, Submit
from penstock.engine.model_files import recommended_sampling, resolve_model
from penstock.engine.sampling_params import InvalidRequest, SamplingParams
from penstock.engine.text.detokenize import TextStream
from penstock.engine.text.prompt import chat_prompt
from penstock.engine.text.template import ChatTemplate, load_template
from penstock.engine.text.tokenizer import Tokenizer, load_tokenizer
from penstock.executor.protocol import ModelInfo, open_executor

Prompt = str | list[int] | dict[str, Any]  # a dictionary has "prompt" or "prompt_token_ids", and maybe "cache_salt"
Messages = list[dict[str, Any]]
PROMPT_FIELDS = ("prompt", "prompt_token_ids", "cache_salt")


class LLM:
    """A model for batches of prompts. `with LLM() as llm:` frees its memory at the end."""

    def __init__(self, model: str | None = None, *, skip_tokenizer: bool = False, **options: Any) -> None:
        """Load `model`: a hub name, a folder, a .gguf file, or the default model when left out.

        The options are those of `penstock serve`, with underscores: dtype, device, load_format, max_model_len,
        max_num_seqs, max_num_batched_tokens, block_size, kv_cache_bytes, enable_prefix_caching,
        tensor_parallel_size, executor, enforce_eager, seed, … Unknown ones are errors.
        """
        files = resolve_model(model, need_weights=options.get("load_format") != "dummy")
        config = engine_config(str(files.path), options)
        self._files = files
        seed = options.get("seed")
        self._seeds = None if seed is None else random.Random(seed)  # for requests without a seed of their own
        self.tokenizer: Tokenizer | None = None if skip_tokenizer else load_tokenizer(files)
        self.template: ChatTemplate | None = load_template(files) if self.tokenizer else None
        self._core: EngineCore | None = None
        self._grammars: GrammarCheck | None = None
        self._start(config)
        if self.info.device == "cpu" and options.get("gpu_memory_utilization") is not None:
            remark = "gpu_memory_utilization: without effect: the model runs on the CPU; use kv_cache_bytes"
            warnings.warn(remark, stacklevel=2)
        self._num_requests = 0

    @property
    def info(self) -> ModelInfo:
        return self._running().info

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete the prompts, in their order. `sampling_params` is one for all, or one for each; without any, as the
        model's authors recommend."""
        return self._generate(_as_list(prompts), sampling_params, use_tqdm, is_continuation=True)

    def chat(
        self,
        messages: Messages | list[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, with the model's own chat template or another one, given as its text or
        its file. `chat_template_kwargs` are variables of the template, like `enable_thinking`."""
        template = self.template if chat_template is None else load_template(self._files, chat_template)
        if template is None or self.tokenizer is None:
            raise InvalidRequest("messages", "this model has no chat template; use generate() with a prompt")
        if documents and not template.has_documents:
            raise InvalidRequest("documents", "the model's chat template knows none; put their text into a message")
        many: list[Messages] = messages if messages and isinstance(messages[0], list) else [messages]  # type: ignore
        texts = [
            chat_prompt(
                template,
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
                tools=tools,
                tools_as_text=not template.has_tools,  # it would drop them
                documents=documents,
            )
            for conversation in many
        ]
        # The template has written the special tokens itself.
        ids: list[Prompt] = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return self._generate(ids, sampling_params, use_tqdm, is_continuation=False)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: Pooling = "last",
        use_tqdm: bool = True,
        *,
        normalize: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """One vector for each prompt: the hidden state of its last token, or the mean over all; of unit length, unless
        `normalize` is false."""
        if pooling not in ("last", "mean"):
            raise InvalidRequest("pooling", f"{pooling!r} given; 'last' or 'mean' is expected")
        params = SamplingParams(max_tokens=1, detokenize=False)
        jobs = self._run([self._prepare(prompt, params, pooling) for prompt in _as_list(prompts)], use_tqdm)
        return [job.embedded(normalize) for job in jobs]

    def get_tokenizer(self) -> FamiliarTokenizer:
        """The model's tokenizer, with the names that transformers gives to what it does."""
        if self.tokenizer is None:
            raise ValueError("skip_tokenizer: there is no tokenizer, as it was left out")
        return FamiliarTokenizer(self.tokenizer, self.template)

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's authors recommend."""
        return SamplingParams(**recommended_sampling(self._files))

    def get_metrics(self) -> dict[str, float]:
        """Gauges and counters of the engine core by name."""
        stats = msgspec.structs.asdict(self._running().stats())
        tiers = stats.pop("tiers")
        experts = stats.pop("experts")
        if experts is not None:
            told = msgspec.structs.asdict(experts)
            del told["rank_load"], told["expert_load"]  # not single figures
            stats |= {f"experts_{name}": value for name, value in told.items()}
        return stats | {f"kv_{tier}_{name}": value for tier in tiers for name, value in tiers[tier].items()}

    def reset_prefix_cache(self) -> bool:
        return self._running().reset_prefix_cache()

    def shutdown(self) -> None:
        """Free the model and its memory; the object cannot be used afterwards."""
        if self._core is not None:
            self._core.close()
            self._core = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()

    # -- one batch -----------------------------------------------------------------------------------------

    def _start(self, config: EngineConfig) -> None:
        executor, tokenizer, compiler = open_executor(config.executor), self.tokenizer, None
        if tokenizer is not None:
            vocab_size = executor.info.vocab_size
            compiler = Compiler(lambda: GrammarVocabulary.of(tokenizer, vocab_size))
            self._grammars = GrammarCheck(compiler, tokenizer.special_texts)
        self._core = EngineCore(config, executor, compiler)

    def _running(self) -> EngineCore:
        if self._core is None:
            raise RuntimeError("this LLM was shut down")
        return self._core

    def _generate(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        is_continuation: bool,
    ) -> list[RequestOutput]:
        jobs = []
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        for prompt, params in zip(prompts, _spread(sampling_params, len(prompts)), strict=True):
            stream = None
            if self.tokenizer is not None and params.detokenize:
                # A completion goes on where its prompt ended, an answer begins: some vocabularies mark the first
                # word of a text with a space that only the former wants.
                stream = partial(self.tokenizer.stream, params.skip_special_tokens, is_continuation)
            jobs.append(self._prepare(prompt, params, stream=stream))
        text = None if self.tokenizer is None else self.tokenizer.token_text
        return [job.result(text) for job in self._run(jobs, use_tqdm)]

    def _prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        pooling: Pooling | None = None,
        stream: Callable[[], TextStream] | None = None,
    ) -> "_Job":
        info = self._running().info
        prompt, cache_salt = _plain(prompt)
        text = prompt if isinstance(prompt, str) else None
        if params.seed is None and self._seeds is not None:
            params = msgspec.structs.replace(params, seed=self._seeds.getrandbits(63))
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequest("prompt", "a text was given, but skip_tokenizer=True; give token ids")
            prompt = self.tokenizer.encode(prompt)
        elif self.tokenizer is None and params.detokenize:
            params = msgspec.structs.replace(params, detokenize=False)
        params.check(info.vocab_size)
        tokens = token_bytes(prompt, info.vocab_size)
        check_length(len(prompt), info)
        eos_ids = self.tokenizer.eos_ids if self.tokenizer else ()
        self._num_requests += 1
        request_id = str(self._num_requests)
        grammar = self._grammar(params)
        messages = submissions(
            request_id, tokens, params, info, eos_ids, cache_salt=cache_salt, pooling=pooling, grammar=grammar
        )
        choices = [Choice(index, params, stream() if stream else None) for index in range(params.n)]
        return _Job(request_id, text, array("i", prompt), messages, choices)

    def _grammar(self, params: SamplingParams) -> str | None:
        if params.structured_outputs is None:
            return None
        if self._grammars is None:
            raise InvalidRequest("structured_outputs", "needs a tokenizer, but skip_tokenizer=True")
        return self._grammars.now(params.structured_outputs)

    def _run(self, jobs: list["_Job"], use_tqdm: bool) -> list["_Job"]:
        core = self._running()
        open_jobs = {message.request_id: (job, i) for job in jobs for i, message in enumerate(job.messages)}
        backlog: Iterator[Submit] = iter([message for job in jobs for message in job.messages])
        progress = _Progress(len(jobs)) if use_tqdm else None
        try:
            with _interrupts_between_steps() as check_interrupt:
                while open_jobs:
                    # The queue is bounded: hand over as much as it takes, and the rest later. (zip takes from its
                    # first argument before it notices that the second has ended.)
                    room = range(core.scheduler.room)
                    news = [core.submit(message) for _, message in zip(room, backlog, strict=False)]
                    for output in [*filter(None, news), *core.step()]:
                        self._take(core, open_jobs, output, progress)
                    check_interrupt()
        except KeyboardInterrupt:
            for request_id in open_jobs:
                core.abort(request_id)
            while core.has_work():
                core.step()
            raise
        except BaseException:
            self.shutdown()  # a step failed halfway: nothing of this engine can be trusted any more
            raise
        finally:
            if progress is not None:
                progress.close()
        for job in jobs:
            job.check()
        return jobs

    def _take(self, core: EngineCore, open_jobs: dict, output: Output, progress: "_Progress | None") -> None:
        job, index = open_jobs.get(output.request_id, (None, 0))
        if job is None:
            return
        if job.take(index, output):
            core.abort(output.request_id)
        if job.choices[index].finished:
            del open_jobs[output.request_id]
        if progress is not None:
            progress.note(job, output)


class _Job:
    """One prompt of a batch and what has come of it."""

    def __init__(self, request_id: str, prompt: str | None, tokens: array, messages: list, choices: list) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.tokens = tokens
        self.messages = messages
        self.choices: list[Choice] = choices
        self.updates: list[list[Update]] = [[] for _ in choices]
        self.num_cached_tokens = 0
        self.prompt_logprobs: list | None = None
        self.embedding: bytes | None = None
        self.metrics = RequestMetrics()
        self._started_s = time.monotonic()

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self.choices)

    def take(self, index: int, output: Output) -> bool:
        """Take in news of one choice; True when the core must be told to stop it."""
        now_s = time.monotonic() - self._started_s
        self.metrics.note(output, now_s)
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens or 0)
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.embedding = output.embedding or self.embedding
        self.updates[index].append(self.choices[index].push(output))
        if self.finished:
            self.metrics.finished_s = now_s
        return self.choices[index].must_abort

    def check(self) -> None:
        """Raise what ended a choice, if anything went wrong."""
        errors = [update.error for updates in self.updates for update in updates if update.error]
        if errors:
            raise RuntimeError(f"request {self.request_id} failed: {errors[0]}")

    def result(self, text: Callable[[int], str] | None) -> RequestOutput:
        """`text` says how a token reads."""
        prompt_logprobs = None
        if self.prompt_logprobs is not None:
            prompt_logprobs = [None, *(candidates(entry, text) for entry in self.prompt_logprobs)]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.tokens.tolist(),
            outputs=[_completion(joined(updates), text) for updates in self.updates],
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
            metrics=self.metrics,
        )

    def embedded(self, normalize: bool) -> EmbeddingRequestOutput:
        assert self.embedding is not None
        vector = array("f", self.embedding)
        return EmbeddingRequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.tokens.tolist(),
            outputs=EmbeddingOutput((unit_length(vector) if normalize else vector).tolist()),
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
        )


def _completion(update: Update, text: Callable[[int], str] | None) -> CompletionOutput:
    entries = update.logprobs
    return CompletionOutput(
        index=update.index,
        text=update.text,
        token_ids=update.token_ids,
        finish_reason=update.finish_reason,
        stop_reason=update.stop_reason,
        logprobs=None if entries is None else [candidates(entry, text) for entry in entries],
        cumulative_logprob=None if entries is None else sum(entry.values[0] for entry in entries),
    )


class _Progress:
    """A bar over the requests, with the tokens read and written per second."""

    def __init__(self, num_requests: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=num_requests, desc="Requests", dynamic_ncols=True)
        self._started_s = time.monotonic()
        self._num_input = self._num_output = 0

    def note(self, job: _Job, output: Output) -> None:
        self._num_output += len(output.tokens)
        if output.num_cached_tokens is not None and output.request_id == job.messages[0].request_id:
            self._num_input += len(job.tokens)
        if job.finished:
            seconds = max(time.monotonic() - self._started_s, 1e-9)
            self._bar.set_postfix_str(
                f"in {self._num_input / seconds:.0f} tok/s, out {self._num_output / seconds:.0f} tok/s", refresh=False
            )
            self._bar.update()

    def close(self) -> None:
        self._bar.close()


@contextlib.contextmanager
def _interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back until the yielded function is called: a step that is cut in two leaves half of its writes.

    A second Ctrl-C does not wait. Outside the main thread no signal arrives, and nothing is changed.
    """
    pending: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if pending:
            raise KeyboardInterrupt
        pending.append(number)

    def check() -> None:
        if pending:
            raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield check
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | dict) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _plain(prompt: Prompt) -> tuple[str | list[int], str | None]:
    """The prompt and its cache salt."""
    if not isinstance(prompt, dict):
        return prompt, None
    unknown = [name for name in prompt if name not in PROMPT_FIELDS and prompt[name] is not None]
    if unknown:
        raise InvalidRequest(f"prompt.{unknown[0]}", f"there is no such field; known are {', '.join(PROMPT_FIELDS)}")
    given = [prompt[name] for name in PROMPT_FIELDS[:2] if prompt.get(name) is not None]
    if len(given) != 1:
        raise InvalidRequest("prompt", f"{len(given)} of prompt and prompt_token_ids given; exactly one is expected")
    return given[0], prompt.get("cache_salt")


def _spread(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequest("sampling_params", f"{len(params)} given for {count} prompts; give one, or one for each")
    return list(params)
