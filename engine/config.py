"""What the user said, split by who needs it. Frozen; unknown names are errors; nothing here looks at hardware."""

import os
import re
import warnings
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.cache.tiers.peer.address import SECRET_VARIABLE, read_address, read_secret
from penstock.engine.vllm_options import sort_out
from penstock.executor.protocol import ExecutorConfig

DTYPES = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
}  # by nicknames
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
    speculative_config: SpeculativeConfig | None = None  # None: nothing is computed before it is sampled

    @property
    def max_sequences(self) -> int:
        """Running and waiting together; one more is refused. The front counts the same way, so it refuses first."""
        return self.max_num_seqs + self.max_queued_requests


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model, ready to be started: paths are resolved."""

    executor: ExecutorConfig
    scheduler: SchedulerConfig


class ConfigError(ValueError):
    """An option cannot be used as given; the message names it."""


def engine_config(model_path: str, options: dict[str, Any]) -> EngineConfig:
    """Sort flat options (of `LLM(...)` or the command line) into the rooms' configs; None means the default."""
    given, remarks, wrong = sort_out({n: value for n, value in options.items() if value is not None}, option_names())
    if wrong is not None:
        raise ConfigError(wrong)
    for remark in remarks:
        warnings.warn(remark, stacklevel=3)
    if "kv_cache_memory_bytes" in given:
        given["kv_cache_bytes"] = given.pop("kv_cache_memory_bytes")
    given["dtype"] = DTYPES.get(given.get("dtype", "auto"), given.get("dtype", "auto"))
    if "executor" in given:
        given["kind"] = given.pop("executor")
    shared = ("max_num_seqs", "max_num_batched_tokens")
    for name, low in (
        *((name, 1) for name in shared),
        ("block_size", 1),
        ("max_model_len", 1),
        ("kv_cache_bytes", 1),
        ("tensor_parallel_size", 1),
    ):
        value = given.get(name, low)
        if not isinstance(value, int) or value < low:
            raise ConfigError(f"{name}: {value!r} given; an integer of at least {low} is expected")
    share = given.get("gpu_memory_utilization", 0.9)
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise ConfigError(f"gpu_memory_utilization: {share!r} given; a number above 0 and at most 1 is expected")
    for name in ("kv_host_bytes", "kv_disk_bytes"):
        if name in given:
            given[name] = _size(name, given[name])
    if given.get("kv_disk_path") and not given.get("kv_disk_bytes"):
        raise ConfigError(f"kv_disk_bytes: how much of {given['kv_disk_path']!r} (kv_disk_path) may be used?")
    if given.get("kv_disk_bytes") and not given.get("kv_disk_path"):
        raise ConfigError(f"kv_disk_path: kv_disk_bytes is {given['kv_disk_bytes']}, and no directory is given")
    _check_peers(given)
    if given.get("max_num_seqs", 256) > given.get("max_num_batched_tokens", 2048):
        raise ConfigError(
            f"max_num_batched_tokens: {given.get('max_num_batched_tokens', 2048)} is less than max_num_seqs "
            f"({given.get('max_num_seqs', 256)}); every running request needs at least one token of each step"
        )
    if given.get("max_num_seqs") == 1 and "speculative_config" in given:
        raise ConfigError(
            "max_num_seqs: 1 given; with speculative_config at least 2: drafts take rows that no request needs"
        )
    executor = {k: v for k, v in given.items() if k in ExecutorConfig.__struct_fields__}
    scheduler = {k: v for k, v in given.items() if k in SchedulerConfig.__struct_fields__}
    try:
        config = EngineConfig(
            executor=msgspec.convert({**executor, "model": model_path}, ExecutorConfig),
            scheduler=msgspec.convert(scheduler, SchedulerConfig),
        )
    except msgspec.ValidationError as error:
        raise ConfigError(_in_our_words(str(error), given)) from None
    _check_company(given, config)
    return config


def option_names() -> set[str]:
    """What `engine_config` takes."""
    own = {*ExecutorConfig.__struct_fields__, *SchedulerConfig.__struct_fields__} - {"model", "kind"}
    return own | {"executor", "kv_cache_memory_bytes"}


def _check_company(given: dict[str, Any], config: EngineConfig) -> None:
    """Refuse options that nothing would read without another one."""
    executor = config.executor
    if "eplb_config" in given and not executor.enable_eplb:
        raise ConfigError("eplb_config: given; it needs enable_eplb, without which no expert moves")
    if executor.ray_allow_open_dashboard and executor.kind != "ray":
        raise ConfigError("ray_allow_open_dashboard: given; only executor 'ray' has a dashboard")
    if executor.kv_peer_secret_file and not (executor.kv_peers or executor.kv_peer_listen):
        raise ConfigError("kv_peer_secret_file: given; it needs kv_peers or kv_peer_listen")
    for name in ("kv_host_bytes", "kv_disk_bytes", "kv_peers", "kv_peer_listen"):
        if getattr(executor, name) and not config.scheduler.enable_prefix_caching:
            raise ConfigError(f"{name}: given; without enable_prefix_caching no block is found again")


def _in_our_words(error: str, given: dict[str, Any]) -> str:
    """A complaint about `$.field.inner` as field, value and what was expected."""
    what, _, path = error.partition(" - at `$.")
    if not path:
        return error
    name = path.rstrip("`")
    value: Any = given
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return f"{name}: {what}" if " given; " in what else f"{name}: {value!r} given; {what[0].lower()}{what[1:]}"


def _check_peers(given: dict[str, Any]) -> None:
    """Addresses that can be meant, and a secret where they lie beyond this machine: before anything is loaded."""
    peers, listen = given.get("kv_peers", ()), given.get("kv_peer_listen", "")
    if not peers and not listen:
        return
    for name in ("kv_peer_listen", "kv_peer_secret_file"):
        if not isinstance(given.get(name, ""), str):
            raise ConfigError(f"{name}: {given[name]!r} given; a text is expected")
    is_list = isinstance(peers, list | tuple) and all(isinstance(peer, str) for peer in peers)
    if not is_list or len(set(peers)) < len(peers) or len(peers) > MAX_PEERS:
        raise ConfigError(f"kv_peers: {peers!r} given; a list of up to {MAX_PEERS} different HOST:PORT is expected")
    if given.get("kind") == "ray":
        raise ConfigError(
            "executor: 'ray' given; peers find rank r at PORT + r of one host, so its ranks must share one"
        )
    num_ranks = given.get("tensor_parallel_size", 1)
    try:
        addresses = [read_address("kv_peers", peer, num_ranks) for peer in peers]
        if listen:
            addresses.append(read_address("kv_peer_listen", listen, num_ranks))
        secret = read_secret(given.get("kv_peer_secret_file", ""), os.environ)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    far = [address for address in addresses if not address.is_loopback]
    if far and not secret:
        raise ConfigError(
            f"kv_peer_secret_file: needed for {far[0].host}:{far[0].port}, which is not this machine's loopback; the "
            f"secret may also be in {SECRET_VARIABLE}"
        )


def count(text: str) -> int:
    """`4096`, `4k` (thousands) or `4K` (of 1,024), as vLLM reads a number of tokens; ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number of tokens; write it like 4096, 4k (4,000) or 4K (4,096)")
    return int(float(match[1]) * {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}[match[2]])


_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {f"{unit}i": 1024 ** (index + 1) for index, unit in enumerate("kmgt")}


def size_bytes(text: str) -> int:
    """`8GiB`, `500MB`, `1.5g` or a plain number of bytes; ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write it like 8GiB, 500MB or 1073741824")
    return int(float(match[1]) * _UNITS[match[2]])


def _size(name: str, value: int | str) -> int:
    """A number of bytes, or a text that says it."""
    try:
        size = size_bytes(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"{name}: {value!r} given; a size of at least one byte is expected, like '8GiB'")
    return size
