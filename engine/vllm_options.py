"""vLLM's flags that change nothing in Penstock: accepted without effect, each with one line that explains why.

Flags with the same meaning under another name are additional names of an option (engine/config.py and
engine/server/server_config.py). All other flags of vLLM are refused like any unknown flag, with the most similar name.
"""

import argparse
import difflib
import sys
from collections.abc import Iterable
from typing import Any

# Only flags that change nothing with any value. In Python, the same names are keywords of `LLM(...)`.
IGNORED = {
    "async_scheduling": "it is always on",
    "disable_cascade_attn": "there is none here",
    "disable_custom_all_reduce": "there is none here",
    "disable_uvicorn_access_log": "uvicorn writes no access log here; --access-log off turns ours off",
    "disable_log_requests": "prompts and answers are never logged here",
    "disable_log_stats": "figures are at /metrics, not in the log",
    "enable_auto_tool_choice": "it is always on; --tool-call-parser none turns it off",
    "enable_chunked_prefill": "it is always on",
    "enable_log_requests": "each request is one line of the log, without prompt and answer; see --access-log",
    "enable_prompt_tokens_details": "usage always has them",
    "enable_request_id_headers": "x-request-id always comes back",
    "trust_remote_code": "no code of a model's repository is run here, and none is needed",
    "use_tqdm_on_load": "stages of the start are always printed",
    "max_log_len": "prompts and answers are never logged here",
    "max_parallel_loading_workers": "the number of reading threads is chosen here",
    "max_seq_len_to_capture": "graphs serve every length",
}
WITH_VALUE = ("max_log_len", "max_parallel_loading_workers", "max_seq_len_to_capture")


def add_ignored_options(parser: argparse.ArgumentParser) -> None:
    """Add the ignored flags, hidden from `--help`."""
    for name in IGNORED:
        num_values = None if name in WITH_VALUE else 0
        flag = "--" + name.replace("_", "-")
        parser.add_argument(
            flag, action=_Ignore, nargs=num_values, dest=name, help=argparse.SUPPRESS, default=argparse.SUPPRESS
        )


def split_ignored(options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the options that have an effect, and a remark about each ignored option."""
    kept = {name: value for name, value in options.items() if name not in IGNORED}
    return kept, [remark(name) for name in options if name in IGNORED]


def remark(name: str) -> str:
    return f"{name}: without effect: {IGNORED[name]}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message that suggests the most similar known name; empty if there is none."""
    found = difflib.get_close_matches(name, list(known), 1, 0.75)
    return f"; did you mean {found[0]}?" if found else ""


class _Ignore(argparse.Action):
    """Prints that the flag has no effect. argparse calls it with the parser, the namespace, the values and the flag."""

    def __call__(self, *given: Any, **_: Any) -> None:
        print(f"penstock: {given[-1]}: without effect: {IGNORED[self.dest]}", file=sys.stderr)
