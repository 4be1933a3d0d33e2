"""What the operator says about the HTTP server. `resolve` turns it into what runs."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from penstock.engine.front.submit import Pooling
from penstock.engine.http.auth import Keys
from penstock.engine.http.limits import Limits
from penstock.engine.options import Flag, Port, SecondsOrNone, check
from penstock.engine.sampling_params import DEFAULTABLE, MAX_LOGPROBS, SamplingParams
from penstock.engine.text.tools import formats, thinking

TOOL_CALL_PARSERS = ("auto", "none", *formats.NAMES)
REASONING_PARSERS = ("auto", "none", *thinking.NAMES)
API_KEY_VARIABLE = "PENSTOCK_API_KEY"


def _origins(text: str) -> list[str]:
    """One origin, or a JSON list of them."""
    if not text.startswith("["):
        return [text]
    try:
        return msgspec.json.decode(text, type=list[str])
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a JSON list of texts: {error}") from None


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Annotated[str, Flag("address to listen on (default: %(default)s, this machine only)", opens="server")] = (
        "127.0.0.1"
    )
    port: Annotated[Port, Flag("0 takes any free port (default: %(default)s)")] = 8000
    api_keys: Annotated[tuple[str, ...], Flag("ask for this key; repeat for more than one", "KEY", ("--api-key",))] = ()
    # The first one stands in answers and metrics.
    served_model_names: Annotated[
        tuple[str, ...],
        Flag(
            "what the API calls the model (default: its own name)", "NAME", ("--served-model-name",), takes_several=True
        ),
    ] = ("default",)
    default_sampling: dict[str, Any] = {}  # from generation_config.json: used where a request says nothing
    seed: int | None = None  # for requests without one of their own
    allowed_origins: Annotated[
        tuple[str, ...],
        Flag(
            "web pages from there may ask (CORS), like https://app.example, or * for all; repeat, or give a JSON list "
            "(default: none)",
            "ORIGIN",
            read=_origins,
        ),
    ] = ()
    pooling: Annotated[Pooling, Flag("of embeddings (default: %(default)s)")] = "last"
    tool_call_parser: Annotated[
        str,
        Flag(
            "the format in which the model writes tool calls (default: %(default)s, as its chat template does)",
            choices=TOOL_CALL_PARSERS,
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Flag(
            "the marks around the model's reasoning (default: %(default)s, as in its chat template)",
            choices=REASONING_PARSERS,
        ),
    ] = "auto"
    constrain_auto_tools: Annotated[
        bool, Flag("hold optional tool calls to their schema by a grammar (default: on)", has_off=True)
    ] = True
    coerce_one_of: Annotated[  # in every request, as StructuredOutputs.coerce_one_of in one
        bool,
        Flag(
            "take a oneOf whose schemas may hold for the same value for anyOf, in place of refusing it (default: off)",
            has_off=True,
        ),
    ] = False
    max_logprobs: Annotated[int, Flag("limit (default: %(default)s)", "N")] = MAX_LOGPROBS
    limits: Limits = Limits()
    drain_timeout_s: Annotated[
        SecondsOrNone,
        Flag("how long a stop waits for running requests (default: %(default)g)", "S", ("--drain-timeout",)),
    ] = 30.0


def resolve(config: ServerConfig, environment: Mapping[str, str]) -> ServerConfig:
    """Add the key from the environment and refuse what cannot run; ValueError names the option."""
    check(config)
    keys = config.api_keys
    if API_KEY_VARIABLE in environment:
        # Set but empty is a mistake in a deployment, and must not open the server.
        if not environment[API_KEY_VARIABLE]:
            raise ValueError(f"{API_KEY_VARIABLE} is set but empty; unset it to serve without a key")
        keys = (*keys, environment[API_KEY_VARIABLE])
    Keys(keys)  # refuses what cannot be one
    if not config.served_model_names or not all(config.served_model_names):
        raise ValueError("served_model_names: at least one name is needed, and none may be empty")
    for origin in config.allowed_origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise ValueError(f"allowed_origins: {origin!r} is no origin; it is written like https://app.example, or *")
    unknown = config.default_sampling.keys() - DEFAULTABLE
    if unknown:
        raise ValueError(f"default_sampling: {sorted(unknown)[0]!r} cannot have a default")
    SamplingParams(**config.default_sampling).check(vocab_size=1)
    return msgspec.structs.replace(config, api_keys=keys)
