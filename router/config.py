"""The configuration of the router. `resolve` checks it and adds the environment; RouteError names the option."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from penstock.engine.http.auth import Keys
from penstock.engine.http.limits import Limits
from penstock.engine.http.telemetry import AccessForm, Telemetry
from penstock.engine.http.telemetry import check as check_telemetry
from penstock.engine.options import Count, Delay, Port, Seconds, Share, check, flag
from penstock.router.backend import SECRET, Backend, RouteError, canonical_url
from penstock.router.discovery import discovered_like

API_KEY_VARIABLE = "PENSTOCK_API_KEY"
ADMIN_KEY_VARIABLE = "PENSTOCK_ADMIN_API_KEY"
BACKEND_KEY_VARIABLE = "PENSTOCK_BACKEND_API_KEY"
KEY_PREFIX = "PENSTOCK_BACKEND_KEY_"  # prefix of variables that replicas which are added later may name

PolicyName = Literal["predicted-ttft", "least-loaded", "round-robin"]


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Limits of the time that the router waits for replicas, and of its retries."""

    connect_s: Seconds = 2.0
    # A queue may be long; the probes find a dead replica.
    response_s: Seconds = flag("seconds without a byte of a response", "S", ("--response-timeout",), default=600.0)
    probe_interval_s: Seconds = flag("seconds between probes (default: %(default)g)", "S", default=0.5)
    probe_timeout_s: Seconds = 1.0
    retry_share: Share = flag("maximum retries as a share of requests", "X", default=0.15)  # see RetryBudget
    max_ejected_share: Share = flag("maximum share of replicas to eject, besides dead ones", "X", default=0.5)
    drain_s: Delay = flag("seconds to finish requests (default: %(default)g)", "S", ("--drain-timeout",), default=30.0)


class Prefill(msgspec.Struct, frozen=True):
    """A prefill replica, and the address where decode replicas read its blocks: its --kv-peer-listen, written as in
    their --kv-peer."""

    url: str
    peer: str

    @classmethod
    def of(cls, text: str) -> "Prefill":
        """Parse `URL=HOST:PORT`, as on the command line."""
        url, _, peer = text.partition("=")
        return cls(url, peer).check()

    def check(self) -> "Prefill":
        if not re.fullmatch(r"[A-Za-z0-9._:\[\]-]{1,250}:[0-9]{1,5}", self.peer):
            raise RouteError(
                f"prefill: {self.url[:120]!r} with the peer {self.peer[:120]!r}; URL=HOST:PORT is expected, where "
                "HOST:PORT is its --kv-peer-listen as the decode replicas name it (--kv-peer)"
            )
        return Prefill(canonical_url(self.url, "prefill"), self.peer)


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    # The replicas that answer; with `prefills`, `resolve` adds the decode replicas.
    backends: tuple[str, ...] = flag("a replica, http://HOST:PORT[,events=PORT…]; repeat for each", "URL", default=())
    decodes: tuple[str, ...] = flag(
        "a decode replica; with --prefill, in place of --backend", "URL", ("--decode",), default=()
    )
    prefills: tuple[Prefill, ...] = flag(
        "a prefill replica, and its address in --kv-peer of the decode replicas",
        "URL=HOST:PORT",
        ("--prefill",),
        read=lambda text: [Prefill.of(text)],
        default=(),
    )
    prefill_threshold: Count = flag(
        "uncached tokens from which a prompt is computed at --prefill (default: 512)", "N", default=512
    )
    host: str = flag("address to listen on (default: %(default)s, this machine only)", default="127.0.0.1")
    port: Port = flag("0 takes any free port (default: %(default)s)", default=8080)
    policy: PolicyName = flag("how to choose a replica (default: %(default)s)", default="predicted-ttft")
    # None: no tokens, byte prefixes.
    tokenizer: str | None = flag("the replicas' model, for its tokenizer: hub name, folder or .gguf file", "MODEL")
    chat_template: str | None = flag("the chat template that the replicas were started with, if any", "FILE")
    api_keys: tuple[str, ...] = flag("require this key from clients; repeat for several", "KEY", default=())
    admin_api_keys: tuple[str, ...] = flag("a client with this key may change the fleet", "KEY", default=())
    backend_api_key: str | None = flag("API key of the replicas", "KEY")
    max_requests: Count = flag("maximum requests in flight per replica", "N", default=512)
    discover: tuple[str, ...] = flag(
        "find replicas: file:PATH or dns:HOST:PORT; repeat for each",
        "SOURCE",
        default=(),
    )
    access_log: AccessForm = flag("log a line for each request (default: %(default)s)", default="off")
    telemetry: Telemetry = Telemetry()
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()

    @property
    def key_variables(self) -> frozenset[str]:
        """Return the environment variables that the command line names as keys of replicas."""
        written = [*map(Backend.of, self.backends), *map(discovered_like, self.discover)]
        return frozenset(each.key for each in written if each.key is not None)

    @property
    def backend_lines(self) -> bytes:
        """Return the header with the key for all replicas, written."""
        return b"" if self.backend_api_key is None else f"authorization: Bearer {self.backend_api_key}\r\n".encode()


def resolve(config: RouterConfig, environment: Mapping[str, str]) -> RouterConfig:
    """Add the keys of the environment and refuse what cannot run."""
    for variable in (API_KEY_VARIABLE, ADMIN_KEY_VARIABLE, BACKEND_KEY_VARIABLE):
        if environment.get(variable) == "":  # a mistake in a deployment, and must not open the router
            raise RouteError(f"{variable} is set but empty; unset it to run without that key")
    try:
        check(config)
        check_telemetry(config.telemetry, environment)
        api_keys = (*config.api_keys, *_from(environment, API_KEY_VARIABLE))
        admin_api_keys = (*config.admin_api_keys, *_from(environment, ADMIN_KEY_VARIABLE))
        Keys((*api_keys, *admin_api_keys))  # refuses what cannot be one
        backend_api_key = config.backend_api_key or environment.get(BACKEND_KEY_VARIABLE)
        if backend_api_key is not None and not re.fullmatch(SECRET, backend_api_key):  # it becomes a header's line
            raise ValueError(
                f"backend_api_key: --backend-api-key or {BACKEND_KEY_VARIABLE} must be printable ASCII without spaces"
            )
    except ValueError as error:
        raise RouteError(str(error)) from None
    backends = [Backend.of(text) for text in (*config.backends, *config.decodes)]
    prefills = tuple(each.check() for each in config.prefills)
    _check_once([each.url for each in backends], prefills)
    for each in backends:
        each.lines(environment)
    return replace(
        config,
        backends=tuple(each.text for each in backends),
        decodes=(),
        prefills=prefills,
        api_keys=api_keys,
        admin_api_keys=admin_api_keys,
        backend_api_key=backend_api_key,
    )


def check_together(config: RouterConfig) -> None:
    """Raise RouteError for options of the command line that exclude each other, or need another one."""
    if config.backends and (config.decodes or config.prefills):
        raise RouteError("backend: not with --prefill and --decode; a replica that does both is one of --decode")
    if bool(config.decodes) != bool(config.prefills):
        given, missing = ("decode", "prefill") if config.decodes else ("prefill", "decode")
        raise RouteError(f"{given}: needs --{missing} too; for replicas that do both there is --backend")
    if config.chat_template and not config.tokenizer:
        raise RouteError("chat_template: needs --tokenizer; without it prompts are not rendered here")
    for each in map(Backend.of, (*config.backends, *config.decodes)):
        if each.events is not None and config.tokenizer is None:
            raise RouteError(
                f"backend: {each.url} has events=…, which name blocks by their tokens; --tokenizer MODEL is needed to know "
                "a prompt's"
            )
    for source in config.discover:
        discovered_like(source)


def _check_once(urls: list[str], prefills: tuple[Prefill, ...]) -> None:
    all_urls = [*urls, *(each.url for each in prefills)]
    for url in all_urls:
        if all_urls.count(url) > 1:
            raise RouteError(f"{'backend' if url in urls else 'prefill'}: {url} is given more than once")


def _from(environment: Mapping[str, str], variable: str) -> tuple[str, ...]:
    return (environment[variable],) if variable in environment else ()
