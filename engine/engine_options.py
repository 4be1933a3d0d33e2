"""The options of an engine, as flags and keywords; `engine_config` makes the frozen configuration of them.

Every field of `ExecutorConfig` and `SchedulerConfig` is an option; flags.json has the help text of each. Unknown names are
errors. Nothing here looks at the hardware.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import make_dataclass
from typing import Any

import msgspec

from penstock.cache.tiers.peer.address import SECRET_VARIABLE, read_address, read_secret
from penstock.engine import options
from penstock.engine.config import ConfigError, EngineConfig, SchedulerConfig
from penstock.engine.sampling_params import plain_number
from penstock.engine.vllm_options import OTHER_VALUES, split_ignored, unknown_option
from penstock.executor.protocol import ExecutorConfig, ExecutorKind

MAX_PEERS = 16  # each needs several threads and connections


# Types of options that differ from those of their fields. Every other integer is at least 1 as an option: a field's default
# of 0 means none, or that the device decides.
TYPES = {"executor": ExecutorKind, "max_queued_requests": options.Length, "seed": options.Seed}
READERS: dict[str, Callable[[str], Any]] = {
    "dtype": lambda text: OTHER_VALUES["dtype"].get(text, text),
    "executor": lambda text: OTHER_VALUES["executor"].get(text, text),
    "max_model_len": lambda text: None if text == "auto" else options.count(text),
    **dict.fromkeys(("kv_cache_bytes", "kv_host_bytes", "kv_disk_bytes"), options.size_bytes),
}


def _option_fields() -> Iterator[tuple[str, Any, Any]]:
    """Yield name, type and declaration of each option, in the order of flags.json; those without a flag are last."""
    kinds = (ExecutorConfig, SchedulerConfig)
    fields = {field.name: field for kind in kinds for field in msgspec.structs.fields(kind)}
    fields["executor"] = fields.pop("kind")
    del fields["model"], fields["draft_tokens"]  # an argument of its own, and part of speculative_config
    for name in dict.fromkeys([*options.flags_of(__name__)["EngineOptions"], *fields]):
        declared, default = fields[name].type, fields[name].default
        kind: Any = TYPES.get(name, options.Count if declared in (int, int | None) else declared)
        number = default if isinstance(default, int | float) else None
        yield name, kind | None, options.flag(read=READERS.get(name), stands_for=number)


# None: not given, so that the field's default holds.
EngineOptions: type[options.Declared] = make_dataclass(
    "EngineOptions", _option_fields(), frozen=True, kw_only=True, namespace={"__module__": __name__}
)


def option_names() -> set[str]:
    """Return the names that `engine_config` accepts."""
    aliases = {name for option in options.options_of(EngineOptions) for name in option.keywords}
    return aliases | {*EngineOptions.__dataclass_fields__}


def engine_config(model_path: str, settings: dict[str, Any]) -> EngineConfig:
    """Build the configurations of executor and scheduler from flat options; an option that is None gets its default."""
    plain = {name: plain_number(value) for name, value in settings.items() if value is not None}
    kept, remarks = split_ignored(plain)
    for remark in remarks:
        warnings.warn(remark, stacklevel=3)
    names = option_names()
    if unknown := [name for name in kept if name not in names]:
        raise ConfigError(f"{unknown[0]}: {unknown_option(unknown[0], names)}")
    try:
        kept = options.without_aliases(kept, EngineOptions)
        checked = options.converted(kept, EngineOptions)
        values = {name: getattr(checked, name) for name in kept} | {"model": model_path}
        if "executor" in values:
            values["kind"] = values["executor"]
        if speculative := values.get("speculative_config"):
            values["draft_tokens"] = speculative.layer_drafts
        config = EngineConfig(
            executor=ExecutorConfig(**_fields_of(ExecutorConfig, values)),
            scheduler=SchedulerConfig(**_fields_of(SchedulerConfig, values)),
        )
        _check_together(values, config)
        _check_peers(config.executor)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return config


def _fields_of(kind: type[msgspec.Struct], values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in kind.__struct_fields__}


def _check_together(settings: dict[str, Any], config: EngineConfig) -> None:
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
            if settings.get(name):
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
