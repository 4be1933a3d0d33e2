"""The options of an engine, as flags and keywords; `engine_config` makes the frozen configuration of them.

Unknown names are errors. Nothing here looks at the hardware.
"""

import argparse
import os
import warnings
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.cache.tiers.peer.address import SECRET_VARIABLE, read_address, read_secret
from penstock.engine.config import ConfigError, EngineConfig, SchedulerConfig, SpeculativeConfig
from penstock.engine.options import (
    Count,
    D,
    Length,
    Seed,
    add_options,
    built,
    check,
    converted,
    count,
    flag,
    options_of,
    size_bytes,
    without_aliases,
)
from penstock.engine.sampling_params import plain_number
from penstock.engine.vllm_options import add_ignored_options, split_ignored, unknown_option
from penstock.executor.protocol import Device, DType, EplbConfig, ExecutorConfig, ExecutorKind, KvDType, LoadFormat

DTYPES = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
}  # short names → names
EXECUTORS = {"mp": "multiproc", "uni": "uniproc"}  # vLLM's names → ours
MAX_PEERS = 16  # each needs several threads and connections


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Every option of an engine, as flags and as keywords of `LLM(...)`. None: not given, so the default holds."""

    dtype: DType | None = flag(
        "number format of weights and activations (default: the model's own; GGUF weights stay quantized on a CPU)",
        read=lambda text: DTYPES.get(text, text),
        opens="engine",
    )
    device: Device | None = flag("default: cuda if available, else cpu")
    load_format: LoadFormat | None = flag("dummy: seeded random weights, for benchmarks")
    max_model_len: Count | None = flag(
        "maximum tokens of prompt and answer, or auto: as many as the model allows and the cache holds (default: auto)",
        "N",
        read=lambda text: None if text == "auto" else count(text),
    )
    max_num_seqs: Count | None = flag("sequences computed at a time (default: 256)", "N")
    max_num_batched_tokens: Count | None = flag("tokens computed per step (default: 2048 on a CPU, 8192 on a GPU)", "N")
    max_queued_requests: Length | None = flag(
        "maximum number of queued requests; further ones get 429 (default: 4096)",
        "N",
        ("--max-queued-requests", "--max-num-queued-reqs"),
    )
    patience_s: Annotated[float, Meta(ge=0)] | None = None
    block_size: Count | None = flag("tokens per KV block (default: 16)", "N")
    enable_prefix_caching: bool | None = flag(
        "reuse cached KV blocks for prompts with the same prefix (default: on)", has_off=True
    )
    speculative_config: SpeculativeConfig | None = flag(
        'speculative decoding with n-grams, like {"method": "ngram", '
        '"num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4} (default: off)',
        "JSON",
        ("--speculative-config", "-sc"),
    )
    enforce_eager: bool | None = flag(
        "do not use CUDA graphs; kernels are still warmed up (default: off)", has_off=True
    )
    batch_invariant: bool | None = flag(
        "make results on a GPU independent of the rest of the batch, as they always are on a CPU "
        "(default: off; slower)",
        has_off=True,
    )
    seed: Seed | None = flag("seed of requests without their own, and of dummy weights (default: none, and 0)", "N")
    hf_overrides: dict[str, Any] | None = flag("entries of the model's config.json to replace", "JSON")
    kv_cache_dtype: KvDType | None = flag(
        "fp8 (or fp8_e4m3): keys and values in eight bits, on GPUs of compute capability 8.9 and later "
        "(default: auto, the model's own)",
        opens="memory",
    )
    kv_cache_bytes: Count | None = flag(
        "memory for the KV cache, like 8GiB", "SIZE", ("--kv-cache-bytes", "--kv-cache-memory-bytes"), read=size_bytes
    )
    kv_host_bytes: Count | None = flag(
        "host memory for KV blocks that were evicted from the cache (default: none)", "SIZE", read=size_bytes
    )
    kv_disk_path: str | None = flag(
        "directory for KV blocks that are evicted from host memory or kept over a restart", "DIR"
    )
    kv_disk_bytes: Count | None = flag(
        "size limit of that directory; required with --kv-disk-path", "SIZE", read=size_bytes
    )
    kv_peers: tuple[str, ...] | None = flag(
        "also load KV blocks from the engine that listens there; repeat for more than one", "HOST:PORT"
    )
    kv_peer_listen: str | None = flag(
        "serve KV blocks to other engines at this address; rank r uses PORT + r", "HOST:PORT"
    )
    kv_peer_secret_file: str | None = flag(
        f"file with the secret that engines share; else {SECRET_VARIABLE} in the environment. "
        "Without it, peers must be on this machine's loopback",
        "FILE",
    )
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] | None = flag(
        "share of the GPU to use when no size is given (default: 0.9)",
        "F",
        ("--gpu-memory-utilization", "--device-memory-utilization"),
    )
    enable_lora: bool | None = flag("enable LoRA adapters (default: off)", has_off=True, opens="adapters")
    max_loras: Annotated[int, Meta(ge=1, le=256)] | None = flag(
        "adapters on the device, which is also the most that one step may use (default: 8)", "N"
    )
    max_lora_rank: Annotated[int, Meta(ge=1, le=256)] | None = flag("largest rank of an adapter (default: 16)", "N")
    max_cpu_loras: Count | None = flag("adapters held in host memory (default: 64)", "N")
    enable_expert_parallel: bool | None = flag(
        "expert parallelism: each rank holds whole experts, not a slice of each (default: off)",
        names=("--enable-expert-parallel", "-ep"),
        has_off=True,
        opens="ranks",
    )
    enable_eplb: bool | None = flag(
        "rebalance experts over the ranks as their load changes (default: off)", has_off=True
    )
    eplb_config: EplbConfig | None = flag('like {"window": 1000, "interval": 3000, "redundant_experts": 32}', "JSON")
    tensor_parallel_size: Count | None = flag(
        "ranks (GPUs) to split the model over (default: 1)", "N", ("--tensor-parallel-size", "-tp")
    )
    executor: ExecutorKind | None = flag(
        "in the engine core's process, in one process per rank, or on a running Ray cluster "
        "(default: auto, by the number of ranks)",
        names=("--executor", "--distributed-executor-backend"),
        read=lambda text: EXECUTORS.get(text, text),
    )
    ray_allow_open_dashboard: bool | None = flag(
        "use a Ray cluster even if its dashboard accepts jobs from the network"
    )


def chosen(args: argparse.Namespace, kind: type[D]) -> D:
    """Build a command's own options from its command line and check them; raise ConfigError if one is invalid."""
    try:
        config = built(args, kind)
        check(config)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return config


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    add_options(parser, EngineOptions)
    add_ignored_options(parser)


def option_names() -> set[str]:
    """Return the names that `engine_config` accepts."""
    return {*EngineOptions.__dataclass_fields__, *(name for o in options_of(EngineOptions) for name in o.keywords)}


def engine_config(model_path: str, options: dict[str, Any]) -> EngineConfig:
    """Build the configurations of executor and scheduler from flat options; an option that is None gets its default."""
    plain = {name: plain_number(value) for name, value in options.items() if value is not None}
    kept, remarks = split_ignored(plain)
    for remark in remarks:
        warnings.warn(remark, stacklevel=3)
    names = option_names()
    if unknown := [name for name in kept if name not in names]:
        raise ConfigError(f"{unknown[0]}: {unknown_option(unknown[0], names)}")
    try:
        kept = without_aliases(kept, EngineOptions)
        engine_options = converted(kept, EngineOptions)
        values = {name: getattr(engine_options, name) for name in kept} | {
            "model": model_path,
            "kind": engine_options.executor or "auto",
        }
        config = EngineConfig(
            executor=ExecutorConfig(**_fields_of(ExecutorConfig, values)),
            scheduler=SchedulerConfig(**_fields_of(SchedulerConfig, values)),
        )
        _check_together(engine_options, config)
        _check_peers(config.executor)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return config


def _fields_of(kind: type[msgspec.Struct], values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in kind.__struct_fields__}


def _check_together(options: EngineOptions, config: EngineConfig) -> None:
    """Check options against each other. An option is refused if it has no effect without another that is missing."""
    executor, scheduler = config.executor, config.scheduler
    cached = ("kv_host_bytes", "kv_disk_bytes", "kv_peers", "kv_peer_listen")
    for names, is_met, required in (
        (("eplb_config",), executor.enable_eplb, "enable_eplb"),
        (("max_loras", "max_lora_rank", "max_cpu_loras"), executor.enable_lora, "enable_lora"),
        (("ray_allow_open_dashboard",), executor.kind == "ray", "executor 'ray'"),
        (("kv_peer_secret_file",), executor.kv_peers or executor.kv_peer_listen, "kv_peers or kv_peer_listen"),
        (cached, scheduler.enable_prefix_caching, "enable_prefix_caching"),
        (("kv_disk_path",), executor.kv_disk_bytes, "kv_disk_bytes, the size limit of that directory"),
        (("kv_disk_bytes",), executor.kv_disk_path, "kv_disk_path"),
    ):
        for name in names if not is_met else ():
            if getattr(options, name):
                raise ValueError(f"{name}: given; it requires {required}")
    if 0 < scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens: {scheduler.max_num_batched_tokens} is less than max_num_seqs "
            f"({scheduler.max_num_seqs}); every running request needs at least one token of each step"
        )
    if scheduler.max_num_seqs == 1 and scheduler.speculative_config is not None:
        raise ValueError(
            "max_num_seqs: 1 given; speculative_config needs at least 2, because drafts use rows that are free"
        )
    if executor.batch_invariant and executor.enable_eplb:
        raise ValueError(
            "batch_invariant: given; it cannot be combined with enable_eplb, which changes the order of sums with the load"
        )
    if executor.max_cpu_loras < executor.max_loras and executor.enable_lora:
        raise ValueError(
            f"max_cpu_loras: {executor.max_cpu_loras} given; at least max_loras ({executor.max_loras}) is expected: "
            "adapters on the device are held in host memory as well"
        )


def _check_peers(config: ExecutorConfig) -> None:
    """Check peer addresses before anything is loaded, and require a secret for addresses beyond this machine."""
    peers, listen, num_ranks = config.kv_peers, config.kv_peer_listen, config.tensor_parallel_size
    if not peers and not listen:
        return
    if len(set(peers)) < len(peers) or len(peers) > MAX_PEERS:
        raise ValueError(f"kv_peers: {[*peers]} given; a list of up to {MAX_PEERS} different HOST:PORT is expected")
    if config.kind == "ray":
        raise ValueError(
            "executor: 'ray' given; peers find rank r at PORT + r of one host, so its ranks must share one"
        )
    addresses = [read_address("kv_peers", peer, num_ranks) for peer in peers]
    if listen:
        addresses.append(read_address("kv_peer_listen", listen, num_ranks))
    secret = read_secret(config.kv_peer_secret_file, os.environ)
    far = [address for address in addresses if not address.is_loopback]
    if far and not secret:
        raise ValueError(
            f"kv_peer_secret_file: needed for {far[0].host}:{far[0].port}, which is not this machine's loopback; the "
            f"secret may also be in {SECRET_VARIABLE}"
        )
