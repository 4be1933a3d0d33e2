"""What the user said, split by who needs it. Frozen; unknown names are errors; nothing here looks at hardware."""

import argparse
import os
import warnings
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.cache.tiers.peer.address import SECRET_VARIABLE, read_address, read_secret
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
    meant,
    options_of,
    size_bytes,
)
from penstock.engine.removed import REMOVED
from penstock.engine.vllm_options import add_ignored_options, nearest, split_ignored
from penstock.executor.protocol import (
    Device,
    DType,
    EplbConfig,
    ExecutorConfig,
    ExecutorKind,
    KvDType,
    LoadFormat,
)

DTYPES = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
}  # by nicknames
EXECUTORS = {"mp": "multiproc", "uni": "uniproc"}  # as vLLM calls them
MAX_PEERS = 16  # each takes a handful of threads and connections


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Drafts: tokens that are computed before they are sampled, because they followed the same text earlier on."""

    method: str
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=64)] = 4  # drafts of one request in a step, at most
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=64)] = 2  # so many tokens have to repeat …
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=64)] = 4  # … and more than so many are not looked for
    max_draft_rows: Annotated[int, Meta(ge=1)] = 64  # drafts of all requests in a step

    def __post_init__(self) -> None:
        if self.method != "ngram":
            raise ValueError(f"method: {self.method!r} given; there is 'ngram' alone")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min: {self.prompt_lookup_min} given; at most prompt_lookup_max "
                f"({self.prompt_lookup_max}) can be meant"
            )


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The scheduler's knobs."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    max_queued_requests: int = 4096
    patience_s: float = 30.0  # who has waited longer goes before every priority
    verify_blocks: int = 0  # one in so many that are taken from a tier is computed again; 0: none
    speculative_config: SpeculativeConfig | None = None  # None: nothing is computed before it is sampled

    @property
    def max_sequences(self) -> int:
        """Running and waiting together; one more is refused. The front counts the same way, so it refuses first."""
        return self.max_num_seqs + self.max_queued_requests


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """All that may be said of an engine, as flags and as keywords of `LLM(...)`. None: nothing is said."""

    dtype: DType | None = flag(
        "number format of weights and activations (default: the model's own; a GGUF's codes stay codes on a CPU)",
        read=lambda text: DTYPES.get(text, text),
        opens="engine",
    )
    device: Device | None = flag("default: cuda when there is one, else cpu")
    load_format: LoadFormat | None = flag("dummy: seeded random weights, for benchmarks")
    max_model_len: Count | None = flag(
        "tokens of prompt and answer (default: what model and memory allow)", "N", read=count
    )
    max_num_seqs: Count | None = flag("sequences computed at a time (default: 256)", "N")
    max_num_batched_tokens: Count | None = flag("tokens computed per step (default: 2048)", "N")
    max_queued_requests: Length | None = flag(
        "beyond this many, requests get 429 (default: 4096)", "N", ("--max-queued-requests", "--max-num-queued-reqs")
    )
    patience_s: Annotated[float, Meta(ge=0)] | None = None
    block_size: Count | None = flag("tokens per KV block (default: 16)", "N")
    enable_prefix_caching: bool | None = flag(
        "keep finished blocks for later requests with the same beginning (default: on)", has_off=True
    )
    speculative_config: SpeculativeConfig | None = flag(
        'compute tokens that followed the same text before ahead of sampling them, like {"method": "ngram", '
        '"num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4} (default: off)',
        "JSON",
        ("--speculative-config", "-sc"),
    )
    enforce_eager: bool | None = flag("no CUDA graphs; kernels are warmed up all the same (default: off)", has_off=True)
    batch_invariant: bool | None = flag(
        "a request's numbers do not depend on what is computed beside it, on a GPU as they never do on a CPU "
        "(default: off; it takes longer)",
        has_off=True,
    )
    seed: Seed | None = flag(
        "for requests without a seed of their own, and for dummy weights (default: none, and 0)", "N"
    )
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
        "memory of the host for KV blocks that the cache has no room for (default: none)", "SIZE", read=size_bytes
    )
    kv_disk_path: str | None = flag("directory for KV blocks that outlive the host's memory and a restart", "DIR")
    kv_disk_bytes: Count | None = flag("what they may take there; with --kv-disk-path", "SIZE", read=size_bytes)
    kv_peers: tuple[str, ...] | None = flag(
        "read KV blocks also from the engine that listens there; repeat for more than one", "HOST:PORT"
    )
    kv_peer_listen: str | None = flag("give KV blocks to other engines here; rank r at PORT + r", "HOST:PORT")
    kv_peer_secret_file: str | None = flag(
        f"what engines that share blocks all know; else {SECRET_VARIABLE} in the environment. "
        "Without it, peers must be on this machine's loopback",
        "FILE",
    )
    verify_blocks: Count | None = flag(
        "compute one in so many blocks that are found in a tier again, and compare: docs/trust.md (default: off)", "N"
    )
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] | None = flag(
        "share of the GPU to use when no size is given (default: 0.9)",
        "F",
        ("--gpu-memory-utilization", "--device-memory-utilization"),
    )
    enable_lora: bool | None = flag("take adapters (LoRA) of the model (default: off)", has_off=True, opens="adapters")
    max_loras: Annotated[int, Meta(ge=1, le=256)] | None = flag(
        "adapters that the requests of one step may have between them: they lie on the device (default: 8)", "N"
    )
    max_lora_rank: Annotated[int, Meta(ge=1, le=256)] | None = flag("the largest rank taken (default: 16)", "N")
    max_cpu_loras: Count | None = flag("adapters held in the host's memory (default: 64)", "N")
    lora_experts: bool | None = flag(
        "let them change experts, for which a GPU sets places aside as well (default: on)", has_off=True
    )
    enable_expert_parallel: bool | None = flag(
        "share out whole experts between the ranks, not slices of each (default: off)",
        names=("--enable-expert-parallel", "-ep"),
        has_off=True,
        opens="ranks",
    )
    enable_eplb: bool | None = flag("move experts between ranks as their load changes (default: off)", has_off=True)
    eplb_config: EplbConfig | None = flag('like {"window": 1000, "interval": 3000, "redundant_experts": 32}', "JSON")
    tensor_parallel_size: Count | None = flag(
        "ranks (GPUs) to split the model over", "N", ("--tensor-parallel-size", "-tp")
    )
    executor: ExecutorKind | None = flag(
        "in the engine core's process, in one process per rank, or on a running Ray cluster "
        "(default: auto, by the number of ranks)",
        names=("--executor", "--distributed-executor-backend"),
        read=lambda text: EXECUTORS.get(text, text),
        choices=("auto", "uniproc", "multiproc", "ray"),
    )
    ray_allow_open_dashboard: bool | None = flag(
        "use a Ray cluster also where its dashboard takes jobs from the network"
    )


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model, ready to be started: paths are resolved."""

    executor: ExecutorConfig
    scheduler: SchedulerConfig


class ConfigError(ValueError):
    """An option cannot be used as given; the message names it."""


def chosen(args: argparse.Namespace, kind: type[D]) -> D:
    """What the command line says of a command's own options, checked."""
    config = built(args, kind)
    try:
        check(config)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return config


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    add_options(parser, EngineOptions)
    add_ignored_options(parser)


def option_names() -> set[str]:
    """What `engine_config` takes."""
    return {*EngineOptions.__dataclass_fields__, *(name for o in options_of(EngineOptions) for name in o.keywords)}


def engine_config(model_path: str, options: dict[str, Any]) -> EngineConfig:
    """Sort flat options (of `LLM(...)` or the command line) into the rooms' configs; None means the default."""
    given, remarks = split_ignored({name: value for name, value in options.items() if value is not None})
    for remark in remarks:
        warnings.warn(remark, stacklevel=3)
    for name in given.keys() - option_names():
        why = REMOVED.get(name) or f"there is no such option{nearest(name, option_names())}"
        raise ConfigError(f"{name}: {why}")
    try:
        given = meant(given, EngineOptions)
        said = converted(given, EngineOptions)
        values = {name: getattr(said, name) for name in given} | {"model": model_path, "kind": said.executor or "auto"}
        config = EngineConfig(
            executor=ExecutorConfig(**_those_of(ExecutorConfig, values)),
            scheduler=SchedulerConfig(**_those_of(SchedulerConfig, values)),
        )
        _check_together(said, config)
        _check_peers(config.executor)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return config


def _those_of(kind: type[msgspec.Struct], values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in kind.__struct_fields__}


def _check_together(said: EngineOptions, config: EngineConfig) -> None:
    """What options must keep to beside each other; nothing is taken that only another one would have read."""
    executor, scheduler = config.executor, config.scheduler
    if executor.kv_disk_path and not executor.kv_disk_bytes:
        raise ValueError(f"kv_disk_bytes: how much of {executor.kv_disk_path!r} (kv_disk_path) may be used?")
    if executor.kv_disk_bytes and not executor.kv_disk_path:
        raise ValueError(f"kv_disk_path: kv_disk_bytes is {executor.kv_disk_bytes}, and no directory is given")
    if scheduler.max_num_seqs > scheduler.max_num_batched_tokens:
        raise ValueError(
            f"max_num_batched_tokens: {scheduler.max_num_batched_tokens} is less than max_num_seqs "
            f"({scheduler.max_num_seqs}); every running request needs at least one token of each step"
        )
    if scheduler.max_num_seqs == 1 and scheduler.speculative_config is not None:
        raise ValueError(
            "max_num_seqs: 1 given; with speculative_config at least 2: drafts take rows that no request needs"
        )
    if said.eplb_config is not None and not executor.enable_eplb:
        raise ValueError("eplb_config: given; it needs enable_eplb, without which no expert moves")
    if executor.batch_invariant and executor.enable_eplb:
        raise ValueError(
            "batch_invariant: given; with enable_eplb the ranks that a sum is over change with the load: one of the two"
        )
    for name in ("max_loras", "max_lora_rank", "max_cpu_loras", "lora_experts"):
        if getattr(said, name) is not None and not executor.enable_lora:
            raise ValueError(f"{name}: given; it needs enable_lora, without which no adapter is taken")
    if executor.verify_blocks and executor.enable_eplb:
        raise ValueError("verify_blocks: given; with enable_eplb experts move, and numbers are summed in other orders")
    if executor.max_cpu_loras < executor.max_loras and executor.enable_lora:
        raise ValueError(
            f"max_cpu_loras: {executor.max_cpu_loras} given; the {executor.max_loras} on the device (max_loras) are "
            "held there as well"
        )
    if executor.ray_allow_open_dashboard and executor.kind != "ray":
        raise ValueError("ray_allow_open_dashboard: given; only executor 'ray' has a dashboard")
    if executor.kv_peer_secret_file and not (executor.kv_peers or executor.kv_peer_listen):
        raise ValueError("kv_peer_secret_file: given; it needs kv_peers or kv_peer_listen")
    for name in ("kv_host_bytes", "kv_disk_bytes", "kv_peers", "kv_peer_listen", "verify_blocks"):
        if getattr(executor, name) and not scheduler.enable_prefix_caching:
            raise ValueError(f"{name}: given; without enable_prefix_caching no block is found again")


def _check_peers(config: ExecutorConfig) -> None:
    """Addresses that can be meant, and a secret where they lie beyond this machine: before anything is loaded."""
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
