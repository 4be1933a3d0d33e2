"""Options that people bring along from vLLM: taken where nothing else happens here anyway, or refused with what to use.

The command line and `LLM(...)` know the same ones; what is in neither table is refused with the nearest name there is.
"""

import argparse
import contextlib
import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from penstock.engine.options import Flag, Option

# Without effect, and why. On the command line those of FLAGS take no value.
TAKEN = {
    "enable_auto_tool_choice": "always on here; --tool-call-parser none turns it off",
    "enable_chunked_prefill": "always on here",
    "trust_remote_code": "no code of a model's repository is ever run here, and none is needed",
    "disable_log_requests": "prompts and answers are never logged here",
    "enable_log_requests": "each request is one line of the log here, without prompt and answer",
    "disable_log_stats": "figures are at /metrics here, not in the log",
    "disable_custom_all_reduce": "there is none here",
    "uvicorn_log_level": "uvicorn logs nothing here",
    "disable_uvicorn_access_log": "uvicorn logs nothing here",
    "async_scheduling": "always on here",
    "tokenizer_mode": "there is one kind here",
    "max_seq_len_to_capture": "graphs serve every length here",
    "task": "each call does here what its name says",
    "runner": "each call does here what its name says",
    "convert": "each call does here what its name says",
    "compilation_config": "kernels are compiled at the start, without settings",
}
FLAGS = frozenset(TAKEN) - {
    *("uvicorn_log_level", "tokenizer_mode", "max_seq_len_to_capture"),
    *("task", "runner", "convert", "compilation_config"),
}

REFUSED = {
    "quantization": "leave it out: the checkpoint says how its weights are stored",
    "enable_lora": "adapters are not served yet",
    "tokenizer": "the model's own is used; put it beside the weights in one folder",
    "swap_space": "use kv_host_bytes, memory of the host for blocks that the cache has no room for",
    "cpu_offload_gb": "weights stay on the device; use kv_host_bytes for KV blocks",
    "pipeline_parallel_size": "use tensor_parallel_size",
    "data_parallel_size": "run several servers behind `penstock route`",
    "distributed_executor_backend": "use executor, with uniproc, multiproc or ray",
    "enable_sleep_mode": "there is none; stop the server to free its memory",
    "limit_mm_per_prompt": "images and audio are not served",
    "skip_tokenizer_init": "use skip_tokenizer",
    "ssl_keyfile": "put a proxy that speaks TLS in front",
    "ssl_certfile": "put a proxy that speaks TLS in front",
    "root_path": "put a proxy that strips the path in front",
    "response_role": "the role is always assistant",
    "kv_transfer_config": "use kv_host_bytes, kv_disk_path and kv_peers",
    "max_num_partial_prefills": "prompts share a step by its budget, max_num_batched_tokens",
    "pooler_config": "embed() takes pooling and normalize",
    "override_pooler_config": "embed() takes pooling and normalize",
    "logits_processors": "requests have logit_bias, allowed_token_ids, banned_token_ids and structured_outputs",
}

# Methods of vLLM's LLM, and keywords of them, and what to use here.
METHODS = {
    "beam_search": "beam search is not served; sample n choices and compare their cumulative_logprob",
    "encode": "use embed() for vectors, classify() for labels, score() for pairs",
    "reward": "use classify(), with a model that has a classification head",
    "llm_engine": "the model is described by info, its figures are in get_metrics()",
    "sleep": "there is none; shutdown() frees the memory",
    "collective_rpc": "no code is run within the ranks",
    "start_profile": "there is none; get_metrics() and a result's metrics have times",
}
KEYWORDS = {
    "lora_request": "adapters are not served yet",
    "prompt_token_ids": "give token ids as prompts",
    "priority": "the prompts of a call run in their order; over HTTP there is a priority",
    "pooling_params": "embed() takes pooling and normalize",
    "tokenization_kwargs": "tokenize with get_tokenizer() and give token ids as prompts",
    "truncate_prompt_tokens": "tokenize with get_tokenizer() and give the ids to keep as prompts",
    "mm_processor_kwargs": "images and audio are not served",
    "guided_options_request": "use structured_outputs of SamplingParams",
    "chat_template_content_format": "templates get their content as text here",
}


def refuse_keywords(given: Mapping[str, Any]) -> None:
    """Those of vLLM's that do not say anything are let by."""
    for name, value in given.items():
        if name not in KEYWORDS or (value is not None and value != "auto"):
            raise TypeError(f"{name}: {KEYWORDS.get(name) or 'there is no such keyword'}")


def sort_out(options: dict[str, Any], known: Iterable[str]) -> tuple[dict[str, Any], list[str], str | None]:
    """Of keyword options: those to go on with, remarks about those without effect, and what is wrong if anything is."""
    kept, remarks = {}, []
    known = set(known)
    for name, value in options.items():
        if name in known:
            kept[name] = value
        elif name in TAKEN:
            remarks.append(f"{name}: without effect: {TAKEN[name]}")
        else:
            return kept, remarks, f"{name}: {REFUSED.get(name) or 'there is no such option' + nearest(name, known)}"
    return kept, remarks, None


def nearest(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(known), 1, 0.6)
    return f"; did you mean {found[0]}?" if found else ""


def vllm_options() -> Iterator[Option]:
    for name in (*TAKEN, *REFUSED):
        yield Option(name, bool if name in FLAGS else str, None, Flag(argparse.SUPPRESS))


def add_vllm_options(parser: argparse.ArgumentParser, known: Mapping[str, str]) -> None:
    """Hidden from `--help`. Advice names options as keywords of `LLM(...)`; `known` has their flags."""
    for option in vllm_options():
        words = option.words if option.name != "pipeline_parallel_size" else (*option.words, "-pp")
        settings: dict[str, Any] = {"nargs": 0 if option.is_switch else "?", "help": option.flag.help}
        with contextlib.suppress(argparse.ArgumentError):  # the parser has one of this name itself
            parser.add_argument(*words, action=_Without, known=known, default=argparse.SUPPRESS, **settings)


class _Without(argparse.Action):
    """Says that it has no effect, or ends with what to use."""

    def __init__(self, *args: Any, known: Mapping[str, str], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.known = known

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        _namespace: argparse.Namespace,
        _values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if self.dest in REFUSED:
            words = re.split(r"\b", REFUSED[self.dest])
            advice = "".join(self.known.get(word, word) if "_" in word else word for word in words)
            parser.error(f"{option_string}: {advice}")
        print(f"penstock: {option_string}: without effect: {TAKEN[self.dest]}", file=sys.stderr)
