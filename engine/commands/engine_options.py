"""The engine's options as command-line flags, shared by `penstock serve`, `bench` and `export`.

The names are those that users of vLLM know. A flag left out is None and means the engine's default.
"""

import argparse
from typing import Any, get_args

from penstock.cache.tiers.peer.address import SECRET_VARIABLE
from penstock.engine import config
from penstock.engine.config import SchedulerConfig
from penstock.engine.vllm_options import add_vllm_options
from penstock.executor.protocol import Device, DType, ExecutorConfig, KvDType, LoadFormat


def size_bytes(text: str) -> int:
    """A size on the command line, as `config.size_bytes` reads it."""
    try:
        return config.size_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(text: str) -> int:
    """A number of tokens, as `config.count` reads it."""
    try:
        return config.count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    add = group.add_argument
    add(
        "--dtype",
        type=_dtype,
        choices=get_args(DType),
        help="number format of weights and activations (default: the model's own)",
    )
    add("--device", choices=get_args(Device), help="default: cuda when there is one, else cpu")
    add("--load-format", choices=get_args(LoadFormat), help="dummy: seeded random weights, for benchmarks")
    add(
        "--max-model-len",
        type=count,
        metavar="N",
        help="tokens of prompt and answer (default: what model and memory allow)",
    )
    add("--max-num-seqs", type=int, metavar="N", help="sequences computed at a time (default: 256)")
    add("--max-num-batched-tokens", type=int, metavar="N", help="tokens computed per step (default: 2048)")
    add("--max-queued-requests", type=int, metavar="N", help="beyond this many, requests get 429 (default: 4096)")
    add("--block-size", type=int, metavar="N", help="tokens per KV block (default: 16)")
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="keep finished blocks for later requests with the same beginning (default: on)",
    )
    add(
        "--speculative-config",
        type=json_object,
        metavar="JSON",
        help='compute tokens that followed the same text before ahead of sampling them, like {"method": "ngram", '
        '"num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4} (default: off)',
    )
    add("--enforce-eager", action="store_true", default=None, help="no CUDA graphs; kernels are warmed up all the same")
    add(
        "--seed",
        type=int,
        metavar="N",
        help="for requests without a seed of their own, and for dummy weights (default: none, and 0)",
    )
    add("--hf-overrides", type=json_object, metavar="JSON", help="entries of the model's config.json to replace")
    _add_memory_options(parser)
    _add_rank_options(parser)
    add_vllm_options(parser)


def _add_memory_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("memory").add_argument
    add(
        "--kv-cache-dtype",
        choices=get_args(KvDType),
        help="fp8 (or fp8_e4m3): keys and values in eight bits, on GPUs of compute capability 8.9 and later "
        "(default: auto, the model's own)",
    )
    add(
        "--kv-cache-bytes",
        "--kv-cache-memory-bytes",
        type=size_bytes,
        metavar="SIZE",
        help="memory for the KV cache, like 8GiB",
    )
    add(
        "--kv-host-bytes",
        type=size_bytes,
        metavar="SIZE",
        help="memory of the host for KV blocks that the cache has no room for (default: none)",
    )
    add("--kv-disk-path", metavar="DIR", help="directory for KV blocks that outlive the host's memory and a restart")
    add("--kv-disk-bytes", type=size_bytes, metavar="SIZE", help="what they may take there; with --kv-disk-path")
    add(
        "--kv-peer",
        dest="kv_peers",
        action="append",
        metavar="HOST:PORT",
        help="read KV blocks also from the engine that listens there; repeat for more than one",
    )
    add("--kv-peer-listen", metavar="HOST:PORT", help="give KV blocks to other engines here; rank r at PORT + r")
    add(
        "--kv-peer-secret-file",
        metavar="FILE",
        help=f"what engines that share blocks all know; else {SECRET_VARIABLE} in the environment. "
        "Without it, peers must be on this machine's loopback",
    )
    add(
        "--gpu-memory-utilization",
        type=float,
        metavar="F",
        help="share of the GPU to use when no size is given (default: 0.9)",
    )


def _add_rank_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("ranks").add_argument
    add(
        "--enable-expert-parallel",
        action="store_true",
        default=None,
        help="share out whole experts between the ranks, not slices of each",
    )
    add("--enable-eplb", action="store_true", default=None, help="move experts between ranks as their load changes")
    add(
        "--eplb-config",
        type=json_object,
        metavar="JSON",
        help='like {"window": 1000, "interval": 3000, "redundant_experts": 32}',
    )
    add("--tensor-parallel-size", "-tp", type=int, metavar="N", help="ranks (GPUs) to split the model over")
    add(
        "--executor",
        choices=("auto", "uniproc", "multiproc", "ray"),
        help="in the engine core's process, in one process per rank, or on a running Ray cluster "
        "(default: auto, by the number of ranks)",
    )
    add(
        "--ray-allow-open-dashboard",
        action="store_true",
        default=None,
        help="use a Ray cluster also where its dashboard takes jobs from the network",
    )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The given engine options by keyword, as `LLM(**options)` takes them."""
    names = [*ExecutorConfig.__struct_fields__, *SchedulerConfig.__struct_fields__, "executor"]
    given = {name: getattr(args, name, None) for name in names if name not in ("model", "kind")}
    return {name: value for name, value in given.items() if value is not None}


def _dtype(text: str) -> str:
    return config.DTYPES.get(text, text)


def json_object(text: str) -> dict[str, Any]:
    import json

    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("a JSON object is expected, like '{\"rope_theta\": 1000000}'")
    return value
