"""Options that people bring along from vLLM: taken where nothing else happens here anyway, or refused with what to use.

The command line and `LLM(...)` know the same ones; what is in neither table is refused with the nearest name there is.
"""

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

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
}
FLAGS = frozenset(TAKEN) - {"uvicorn_log_level", "tokenizer_mode", "max_seq_len_to_capture"}

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
}


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


def add_vllm_options(parser: argparse.ArgumentParser) -> None:
    """Hidden from `--help`. Names that the parser has already are its own."""
    own = {option for action in parser._actions for option in action.option_strings}
    for name in (*TAKEN, *REFUSED):
        flags = [flag for flag in ("--" + name.replace("_", "-"),) if flag not in own]
        if name == "pipeline_parallel_size":
            flags.append("-pp")
        if flags:
            takes_value = name not in FLAGS
            parser.add_argument(
                *flags,
                action=_Without,
                nargs="?" if takes_value else 0,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )


class _Without(argparse.Action):
    """Says that it has no effect, or ends with what to use."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if self.dest in REFUSED:
            advice = REFUSED[self.dest]
            for name in _names(advice, parser):
                advice = advice.replace(name, "--" + name.replace("_", "-"))
            parser.error(f"{option_string}: {advice}")
        print(f"penstock: {option_string}: without effect: {TAKEN[self.dest]}", file=sys.stderr)


def _names(advice: str, parser: argparse.ArgumentParser) -> list[str]:
    """Options that the advice speaks of, by the names of their keywords."""
    words = {word.strip(",.;") for word in advice.split()}
    return [action.dest for action in parser._actions if action.dest in words and "_" in action.dest]
