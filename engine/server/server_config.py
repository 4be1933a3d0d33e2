"""Options of the HTTP server. `resolve` validates them and adds the API key from the environment."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.engine.front.submit import Pooling
from penstock.engine.http.auth import Keys
from penstock.engine.http.hosts import check_allowed_hosts
from penstock.engine.http.limits import Limits
from penstock.engine.http.telemetry import AccessForm, Telemetry
from penstock.engine.http.telemetry import check as check_telemetry
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.options import Count, Delay, Length, Port, check, converted, flag, json_object
from penstock.engine.sampling_params import DEFAULTABLE, MAX_LOGPROBS, SamplingParams
from penstock.engine.text.tools import formats, thinking

TOOL_CALL_PARSERS = ("auto", "none", *formats.NAMES, *formats.ALIASES)
REASONING_PARSERS = ("auto", "none", *thinking.NAMES)
LOOPBACK = ("127.0.0.1", "::1", "localhost")
API_KEY_VARIABLE = "PENSTOCK_API_KEY"


def _origins(text: str) -> list[str]:
    """Read one origin, or a JSON list of them."""
    if not text.startswith("["):
        return [text]
    try:
        return msgspec.json.decode(text, type=list[str])
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a JSON list of texts: {error}") from None


class LoraModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    path: Annotated[str, Meta(min_length=1)]
    base_model_name: str | None = None  # accepted for vLLM's clients; a server has only one model


def _lora_module(text: str) -> LoraModule:
    """Read `name=path`, or a JSON object."""
    if text.startswith("{"):
        return converted(json_object(text), LoraModule)
    name, _, path = text.partition("=")
    if not name or not path:
        raise ValueError(f"{text!r} given; it is written like NAME=FOLDER")
    return LoraModule(name, path)


class KvEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's configuration of KV cache events, with its field names."""

    enable_kv_cache_events: bool  # without a default, because the other fields have no effect without it
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: Annotated[str, Meta(pattern="^(tcp|ipc)://.+")] = "tcp://*:5557"
    replay_endpoint: Annotated[str, Meta(pattern="^(tcp|ipc)://.+")] | None = None
    buffer_steps: Count = 10_000
    hwm: Count = 100_000
    max_queue_size: Count = 100_000  # without effect: there is no queue
    topic: str = ""

    def __post_init__(self) -> None:
        for name, value in (("endpoint", self.endpoint), ("replay_endpoint", self.replay_endpoint or "ipc://")):
            port = value.rpartition(":")[2]
            if value.startswith("tcp:") and port != "*" and not (port.isdecimal() and int(port) <= 65535):
                raise ValueError(f"{name}: {value!r} given; a port of 0 to 65535 is expected behind the last colon")

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: Port = 8000
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ("default",)  # answers and metrics use the first name
    # Defaults of requests, from generation_config.json.
    default_sampling: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None  # seeds requests that have no seed
    allowed_origins: tuple[str, ...] = flag((), read=_origins)
    allowed_hosts: tuple[str, ...] = ()
    pooling: Pooling = "last"
    tool_call_parser: str = flag("auto", choices=TOOL_CALL_PARSERS)
    reasoning_parser: str = flag("auto", choices=REASONING_PARSERS)
    constrain_auto_tools: bool = True
    coerce_one_of: bool = False
    max_logprobs: Length = MAX_LOGPROBS
    kv_events_config: KvEventsConfig | None = flag(read=lambda text: converted(json_object(text), KvEventsConfig))
    access_log: AccessForm = "text"
    telemetry: Telemetry = Telemetry()
    limits: Limits = Limits()
    lora_modules: tuple[LoraModule, ...] = flag((), read=_lora_module)
    allow_lora_updates: bool = False
    allow_weight_updates: bool = False
    drain_timeout_s: Delay = 30.0


def resolve(config: ServerConfig, environment: Mapping[str, str]) -> ServerConfig:
    """Add the API key from the environment and validate; raise ValueError naming an invalid option."""
    check(config)
    check_telemetry(config.telemetry, environment)
    keys = config.api_keys
    if API_KEY_VARIABLE in environment:
        # An empty variable is a deployment mistake, and must not disable authentication.
        if not environment[API_KEY_VARIABLE]:
            raise ValueError(f"{API_KEY_VARIABLE} is set but empty; unset it to serve without a key")
        keys = (*keys, environment[API_KEY_VARIABLE])
    Keys(keys)  # raises ValueError for an invalid key
    if config.allow_weight_updates and not keys and config.host not in LOOPBACK:
        raise ValueError(
            f"allow_weight_updates: given, and any client that reaches {config.host} could use it; give api_keys as well"
        )
    if not config.served_model_names or not all(config.served_model_names):
        raise ValueError("served_model_names: at least one name is needed, and none may be empty")
    for origin in config.allowed_origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise ValueError(f"allowed_origins: {origin!r} is not an origin; write it like https://app.example, or *")
    check_allowed_hosts(config.allowed_hosts)
    names = [*config.served_model_names, *(module.name for module in config.lora_modules)]
    if unprintable := [name for name in names if not name.isprintable()]:
        raise ValueError(f"served_model_names, lora_modules: {unprintable[0]!r} has control characters")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"lora_modules: {twice[0]!r} is given twice, or is also a name of the model")
    sampling = config.default_sampling
    try:
        if unknown := sampling.keys() - DEFAULTABLE:
            raise InvalidRequest(sorted(unknown)[0], f"it cannot have a default; {', '.join(sorted(DEFAULTABLE))} can")
        SamplingParams(**sampling).check(vocab_size=1)
    except InvalidRequest as error:
        raise ValueError(f"override_generation_config: {error}; with the model's own: {sampling}") from None
    return replace(config, api_keys=keys)
