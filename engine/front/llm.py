"""The offline API: a model in this process, a list of prompts in, a list of results out.

No server, no sockets: `generate` drives the engine core itself, in the calling thread.
"""

import atexit
import os
import random
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from os import PathLike
from types import TracebackType
from typing import Any, Self, Unpack, cast

import msgspec

from penstock.engine.core.engine_core import EngineCore
from penstock.engine.engine_options import engine_config
from penstock.engine.front import offline_call, results
from penstock.engine.front.answer import Answer
from penstock.engine.front.hf_interface import FamiliarTokenizer
from penstock.engine.front.submit import AnswerOptions, Pooling, begin_answer
from penstock.engine.grammar.compiler import Compiler
from penstock.engine.grammar.rules import grammar_source
from penstock.engine.grammar.vocabulary import GrammarVocabulary
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.model_files import recommended_sampling, resolve_model
from penstock.engine.sampling_params import MAX_LOGPROBS, SamplingParams, plain_number
from penstock.engine.text.model_text import load_tokenizer
from penstock.engine.text.template import ChatTemplate, load_template
from penstock.engine.text.tokenizer import Tokenizer
from penstock.engine.vllm_options import nearest
from penstock.executor.protocol import ModelInfo, Part, SleepLevel
from penstock.executor.shared_tensors import SharedTensors
from penstock.executors import open_executor


class LLM:
    """A model for batches of prompts. `with LLM() as llm:` frees its memory at the end. Calls of several threads run one
    after another."""

    _core: EngineCore | None = None  # a class attribute: `__del__` runs even if `__init__` refused its arguments
    _open_executor = staticmethod(open_executor)

    def __init__(
        self,
        model: str | None = None,
        *,
        skip_tokenizer: bool = False,
        max_logprobs: int = MAX_LOGPROBS,
        revision: str | None = None,
        chat_template: str | None = None,
        **options: Any,
    ) -> None:
        """Load `model`: a hub name, a folder, a .gguf file, or the default model when left out.

        The options are those of `penstock serve`, with underscores: dtype, device, load_format, max_model_len,
        max_num_seqs, max_num_batched_tokens, block_size, kv_cache_bytes, enable_prefix_caching,
        tensor_parallel_size, executor, enforce_eager, seed, … Unknown ones are errors. `chat_template` is the text of a
        template in place of the model's own, or its file.
        """
        self._max_logprobs = plain_number(max_logprobs)
        if type(self._max_logprobs) is not int or self._max_logprobs < 0:
            raise ValueError(f"max_logprobs: {max_logprobs!r} given; a whole number from 0 is expected")
        self._turn = threading.RLock()
        config = engine_config("", options)  # an invalid option is reported before a model is downloaded
        files = resolve_model(model, revision=revision, need_weights=options.get("load_format") != "dummy")
        config = msgspec.structs.replace(
            config, executor=msgspec.structs.replace(config.executor, model=str(files.path))
        )
        self._files = files
        seed = options.get("seed")
        self._seeds = None if seed is None else random.Random(seed)  # for requests without a seed of their own
        self.tokenizer: Tokenizer | None = None if skip_tokenizer else load_tokenizer(files)
        self.template: ChatTemplate | None = None
        if self.tokenizer is not None:
            self.template = load_template(self.tokenizer, chat_template)
        executor, compiler = self._open_executor(config.executor), None
        if self.tokenizer is not None:
            vocabulary = partial(GrammarVocabulary, self.tokenizer, executor.info.vocab_size)
            compiler = Compiler(vocabulary)
        self._core = EngineCore(config, executor, compiler)
        if config.executor.kv_disk_path:
            atexit.register(_close_at_exit, weakref.ref(self), os.getpid())
        if self.info.device == "cpu" and options.get("gpu_memory_utilization") is not None:
            remark = "gpu_memory_utilization: without effect: the model runs on the CPU; use kv_cache_bytes"
            warnings.warn(remark, stacklevel=2)
        self._num_requests = 0
        self._adapters = offline_call.LoadedAdapters(config.executor.max_cpu_loras)

    @property
    def info(self) -> ModelInfo:
        return self._running().info

    def generate(
        self,
        prompts: offline_call.Prompt | Sequence[offline_call.Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        use_tqdm: offline_call.Bar = True,
        *,
        lora_request: offline_call.LoraRequests = None,
    ) -> list[results.RequestOutput]:
        """Complete the prompts; return the results in their order. `sampling_params` is one for all prompts, or one for each;
        the default are the model's recommended ones. `lora_request`: an adapter for all, or one or None for each."""
        return self._generate(offline_call.as_list(prompts), sampling_params, use_tqdm, True, lora_request)

    def chat(
        self,
        messages: offline_call.Messages | list[offline_call.Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        use_tqdm: offline_call.Bar = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        lora_request: offline_call.LoraRequests = None,
    ) -> list[results.RequestOutput]:
        """Answer one conversation, or several, with the model's own chat template or another one, given as its text or
        its file. `chat_template_kwargs` are variables of the template, like `enable_thinking`."""
        if self.tokenizer is None:
            raise InvalidRequest("messages", "this model has no chat template; use generate() with a prompt")
        template = self.template if chat_template is None else load_template(self.tokenizer, chat_template)
        tokenizer = FamiliarTokenizer(self.tokenizer, template)
        many: list[offline_call.Messages] = messages if messages and isinstance(messages[0], list) else [messages]  # type: ignore
        texts = [
            tokenizer.prompt(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in many
        ]
        # The template has written the special tokens itself.
        ids: list[offline_call.Prompt] = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return self._generate(ids, sampling_params, use_tqdm, continue_final_message, lora_request)

    def embed(
        self,
        prompts: offline_call.Prompt | Sequence[offline_call.Prompt],
        pooling: Pooling = "last",
        use_tqdm: offline_call.Bar = True,
        *,
        normalize: bool = True,
    ) -> list[results.PooledRequestOutput[results.EmbeddingOutput]]:
        """Return one vector for each prompt: the hidden state of its last token, or the mean over all tokens; of unit length,
        unless `normalize` is false."""
        if pooling not in ("last", "mean"):
            raise InvalidRequest("pooling", f"{pooling!r} given; 'last' or 'mean' is expected")
        params = SamplingParams(max_tokens=1, detokenize=False)
        with self._turn:
            batch = offline_call.Batch(self._running())
            for prompt in offline_call.as_list(prompts):
                self._begin(batch, prompt, params, is_continuation=True, pooling=pooling)
            return self._run(batch, use_tqdm, lambda answer, prompt: results.embedded(answer, prompt, normalize))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"LLM has no attribute {name!r}{nearest(name, dir(type(self)))}")

    def __del__(self) -> None:
        if not sys.is_finalizing():  # else the operating system does it
            self.shutdown()

    def get_tokenizer(self) -> FamiliarTokenizer:
        """Return the model's tokenizer with the interface of transformers' tokenizers."""
        if self.tokenizer is None:
            raise ValueError("skip_tokenizer: given; there is no tokenizer")
        return FamiliarTokenizer(self.tokenizer, self.template)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that the model's authors recommend."""
        return SamplingParams(**self._recommended)

    @cached_property
    def _recommended(self) -> dict[str, Any]:
        return recommended_sampling(self._files)  # reads the whole header of a .gguf file

    def get_metrics(self) -> dict[str, float]:
        """Return gauges and counters of the engine core by name."""
        stats = msgspec.structs.asdict(self._running().stats())
        tiers = stats.pop("tiers")
        experts = stats.pop("experts")
        del stats["adapters"]
        stats |= {f"accepted_tokens_{place}": num for place, num in enumerate(stats.pop("accepted_at"))}
        if experts is not None:
            single = msgspec.structs.asdict(experts)
            del single["rank_load"], single["expert_load"]  # not single figures
            stats |= {f"experts_{name}": value for name, value in single.items()}
        return stats | {f"kv_{tier}_{name}": value for tier in tiers for name, value in tiers[tier].items()}

    def reset_prefix_cache(self) -> bool:
        with self._turn:
            return self._running().reset_prefix_cache()

    def update_weights(self, weights: "str | PathLike[str] | Mapping[str, Any]") -> int:
        """Compute with other weights of the same model from now on; return how many updates there were.

        The weights are a folder, a .gguf or a .safetensors file, or tensors by their names. WeightsError says why they
        cannot be used; nothing has changed then.
        """
        if isinstance(weights, Mapping):
            with SharedTensors(weights) as shared:
                return self.update_weights(shared.path)
        with self._turn:
            pauses = self._running().pauses
            pauses.drain()
            pauses.update_weights(os.fspath(weights))
            return pauses.version

    def sleep(self, level: SleepLevel = 1) -> None:
        """Release the memory of the cache, and with level 2 that of the weights, which `update_weights` loads again."""
        if level not in (1, 2):
            raise InvalidRequest("level", f"{level!r} given; 1 or 2 is expected")
        with self._turn:
            pauses = self._running().pauses
            pauses.drain()
            pauses.sleep(level, "abort")

    def wake_up(self, tags: Sequence[Part] = ("weights", "kv_cache")) -> None:
        """Allocate the memory of these parts again; the engine runs again when it has both."""
        if wrong := [tag for tag in tags if tag not in ("weights", "kv_cache")]:
            raise InvalidRequest("tags", f"{wrong[0]!r} given; 'weights' and 'kv_cache' are expected")
        with self._turn:
            self._running().pauses.wake(tags)

    def shutdown(self) -> None:
        """Free the model and its memory; the object cannot be used afterwards."""
        if self._core is not None:
            with self._turn:
                core, self._core = self._core, None
                if core is not None:  # else another thread was faster
                    core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.shutdown()

    def _running(self) -> EngineCore:
        if self._core is None:
            raise RuntimeError("this LLM was shut down")
        return self._core

    def _generate(
        self,
        prompts: list[offline_call.Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None,
        use_tqdm: offline_call.Bar,
        is_continuation: bool,
        lora_request: offline_call.LoraRequests,
    ) -> list[results.RequestOutput]:
        asked = offline_call.for_each("sampling_params", sampling_params, SamplingParams, len(prompts))
        adapters = offline_call.for_each("lora_request", lora_request, offline_call.LoRARequest, len(prompts))
        text, eos_ids = (None, ()) if self.tokenizer is None else (self.tokenizer.token_text, self.tokenizer.eos_ids)
        with self._turn:
            batch = offline_call.Batch(self._running())
            copies = {place: self._checked(each) for place, each in {id(each): each for each in asked}.items()}
            samplings = {place: params.sampling(eos_ids) for place, params in copies.items()}
            keys = self._adapters.keys(adapters, batch.core)
            for prompt, place, key in zip(prompts, map(id, asked), keys, strict=True):
                sampling = samplings[place]
                self._begin(
                    batch, prompt, copies[place], is_continuation=is_continuation, adapter=key, sampling=sampling
                )
            return self._run(batch, use_tqdm, lambda answer, prompt: results.completed(answer, prompt, text))

    def _checked(self, params: SamplingParams | None) -> SamplingParams:
        """Return a checked copy, since the caller may change its object."""
        copy = msgspec.structs.replace(params or self.get_default_sampling_params())
        copy.detokenize = copy.detokenize and self.tokenizer is not None
        copy.check(self.info.vocab_size, self._max_logprobs)
        if copy.structured_outputs is not None and self.tokenizer is None:
            raise InvalidRequest("structured_outputs", "needs a tokenizer, but skip_tokenizer=True")
        return copy

    def _begin(
        self,
        batch: offline_call.Batch,
        prompt: offline_call.Prompt,
        params: SamplingParams,
        **options: Unpack[AnswerOptions],
    ) -> None:
        """Add a request to the batch. `begin_answer` explains the options."""
        given, cache_salt = offline_call.split_salt(prompt)
        text, wanted = None, params.structured_outputs
        if params.seed is None and self._seeds is not None:
            params = msgspec.structs.replace(params, seed=self._seeds.getrandbits(63))
        if isinstance(given, str):
            if self.tokenizer is None:
                raise InvalidRequest("prompt", "a text was given, but skip_tokenizer=True; give token ids")
            text, given = given, self.tokenizer.encode(given)
        self._num_requests += 1
        options |= {"cache_salt": cache_salt, "grammar": None if wanted is None else grammar_source(wanted)}
        answer = begin_answer(
            str(self._num_requests), given, params, batch.core.info, self.tokenizer, batch.abort, **options
        )
        batch.add(answer, text)

    def _run(
        self,
        batch: offline_call.Batch,
        use_tqdm: offline_call.Bar,
        show: Callable[[Answer, str | None], results.Result],
    ) -> list[results.Result]:
        """Run the requests; return what `show` makes of each answer and its prompt's text when all are finished."""
        try:
            batch.run(use_tqdm)
        except BaseException:
            if batch.is_broken:
                self.shutdown()
            raise
        errors = [answer.error for answer in batch.prompts]
        shown = [None if answer.error is not None else show(answer, text) for answer, text in batch.prompts.items()]
        if any(error is not None for error in errors):
            raise results.RequestsFailed(errors, shown)
        return cast("list[results.Result]", shown)


def _close_at_exit(ref: weakref.ref[LLM], pid: int) -> None:
    """Close an LLM whose script ends without `shutdown`, or its last blocks would not reach the disk. A forked process
    does not own it, and a thread that still runs a call is not waited for."""
    llm = ref()
    if llm is not None and os.getpid() == pid and llm._turn.acquire(blocking=False):
        llm.shutdown()
