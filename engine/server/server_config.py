"""What the operator says about the HTTP server. `resolve` turns it into what runs."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.engine.front.submit import Pooling
from penstock.engine.http.auth import Keys
from penstock.engine.http.limits import Limits
from penstock.engine.sampling_params import DEFAULTABLE, MAX_LOGPROBS, SamplingParams
from penstock.engine.text.tools import formats, thinking

TOOL_CALL_PARSERS = ("auto", "none", *formats.NAMES)
REASONING_PARSERS = ("auto", "none", *thinking.NAMES)
API_KEY_VARIABLE = "PENSTOCK_API_KEY"


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ("default",)  # the first one stands in answers and metrics
    default_sampling: dict[str, Any] = {}  # from generation_config.json: used where a request says nothing
    seed: int | None = None  # for requests without one of their own
    allowed_origins: tuple[str, ...] = ()  # of web pages that may ask
    pooling: Pooling = "last"  # of /v1/embeddings, unless the request says otherwise
    tool_call_parser: str = "auto"  # which format of calls the model writes; auto: as its chat template does
    reasoning_parser: str = "auto"
    constrain_auto_tools: bool = True  # a grammar holds calls to their schema even where a call is optional
    coerce_one_of: bool = False  # in every request, as StructuredOutputs.coerce_one_of in one
    max_logprobs: int = MAX_LOGPROBS
    max_header_bytes: int = Limits().max_header_bytes
    max_body_bytes: int = Limits().max_body_bytes
    header_timeout_s: float = Limits().header_timeout_s
    body_timeout_s: float = Limits().body_timeout_s
    write_timeout_s: float = Limits().write_timeout_s
    max_connections: int = Limits().max_connections
    drain_timeout_s: float = 30.0

    @property
    def limits(self) -> Limits:
        return Limits(**{name: getattr(self, name) for name in Limits.__struct_fields__})


def resolve(config: ServerConfig, environment: Mapping[str, str]) -> ServerConfig:
    """Add the key from the environment and refuse what cannot run; ValueError names the option."""
    keys = config.api_keys
    if API_KEY_VARIABLE in environment:
        # Set but empty is a mistake in a deployment, and must not open the server.
        if not environment[API_KEY_VARIABLE]:
            raise ValueError(f"{API_KEY_VARIABLE} is set but empty; unset it to serve without a key")
        keys = (*keys, environment[API_KEY_VARIABLE])
    Keys(keys)  # refuses what cannot be one
    if not config.served_model_names or not all(config.served_model_names):
        raise ValueError("served_model_names: at least one name is needed, and none may be empty")
    if not 0 <= config.port <= 65535:
        raise ValueError(f"port: {config.port} is out of range; it must be from 0 to 65535")
    for name in ("header_timeout_s", "body_timeout_s", "write_timeout_s"):
        if not 0 < getattr(config, name) < float("inf"):
            raise ValueError(f"{name}: {getattr(config, name)} is out of range; it must be above 0")
    if not 0 <= config.drain_timeout_s < float("inf"):
        raise ValueError(f"drain_timeout_s: {config.drain_timeout_s} is out of range; it must be at least 0")
    for name, low in (("max_header_bytes", 1024), ("max_body_bytes", 1024), ("max_connections", 1)):
        if getattr(config, name) < low:
            raise ValueError(f"{name}: {getattr(config, name)} is too small; it must be at least {low}")
    for name, known in (("tool_call_parser", TOOL_CALL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
        if getattr(config, name) not in known:
            raise ValueError(f"{name}: {getattr(config, name)!r} is not known; {', '.join(known)} are")
    for origin in config.allowed_origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise ValueError(f"allowed_origins: {origin!r} is no origin; it is written like https://app.example, or *")
    unknown = config.default_sampling.keys() - DEFAULTABLE
    if unknown:
        raise ValueError(f"default_sampling: {sorted(unknown)[0]!r} cannot have a default")
    SamplingParams(**config.default_sampling).check(vocab_size=1)
    return msgspec.structs.replace(config, api_keys=keys)
