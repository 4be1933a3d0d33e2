"""What the operator says about the router. `resolve` turns it into what runs; RouteError names the option."""

import re
from collections.abc import Mapping
from typing import Literal, get_args
from urllib.parse import urlsplit

import msgspec

from penstock.engine.http.auth import Keys
from penstock.engine.http.limits import Limits

API_KEY_VARIABLE = "PENSTOCK_API_KEY"
ADMIN_KEY_VARIABLE = "PENSTOCK_ADMIN_API_KEY"
BACKEND_KEY_VARIABLE = "PENSTOCK_BACKEND_API_KEY"

PolicyName = Literal["predicted-ttft", "prefix", "least-loaded", "round-robin"]
POLICIES: tuple[str, ...] = get_args(PolicyName)


class RouteError(ValueError):
    """An option of the router cannot be used as given; the message names it."""


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long the router waits for replicas, and how much failing it makes up for."""

    connect_s: float = 2.0
    response_s: float = 600.0  # without a byte from the replica: a queue may be long, a dead one shows by its probe
    probe_interval_s: float = 0.5
    probe_timeout_s: float = 1.0
    drain_s: float = 30.0
    retry_share: float = 0.15  # retries per request over time; see router/fleet/budget.py
    max_ejected_share: float = 0.5  # of a model's replicas that misbehaviour may take out; the dead are always out


class Prefill(msgspec.Struct, frozen=True):
    """A replica that computes prompts for others, and the address where those read its blocks: its --kv-peer-listen,
    written as they name it in their --kv-peer."""

    url: str
    peer: str

    @classmethod
    def of(cls, text: str) -> "Prefill":
        """`URL=HOST:PORT`, as on the command line."""
        url, _, peer = text.partition("=")
        return cls(url, peer).check()

    def check(self) -> "Prefill":
        if not re.fullmatch(r"[A-Za-z0-9._:\[\]-]{1,250}:[0-9]{1,5}", self.peer):
            raise RouteError(
                f"prefill: {self.url[:120]!r} with the peer {self.peer[:120]!r}; URL=HOST:PORT is expected, where "
                "HOST:PORT is its --kv-peer-listen as the decode replicas name it (--kv-peer)"
            )
        return Prefill(canonical_url(self.url, "prefill"), self.peer)


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    backends: tuple[str, ...] = ()  # who answers: with `prefills` these are the decode replicas
    prefills: tuple[Prefill, ...] = ()
    prefill_threshold: int = 512  # tokens of a prompt that are not cached where it will be answered
    host: str = "127.0.0.1"
    port: int = 8080  # 0: any free port
    workers: int = 1
    policy: PolicyName = "predicted-ttft"
    api_keys: tuple[str, ...] = ()
    admin_api_keys: tuple[str, ...] = ()
    backend_api_key: str | None = None
    tokenizer: str | None = None  # a model as `penstock serve` takes it; None: no tokens, byte prefixes
    chat_template: str | None = None
    max_requests: int = 512  # under way at one replica
    limits: Limits = Limits()
    patience: Patience = Patience()


def replicas_of(config: RouterConfig) -> str:
    """How many there are, in words."""
    if not config.prefills:
        return f"{len(config.backends)} replicas"
    return f"{len(config.backends)} decode and {len(config.prefills)} prefill replicas"


def resolve(config: RouterConfig, environment: Mapping[str, str]) -> RouterConfig:
    """Add the keys of the environment and refuse what cannot run."""
    for variable in (API_KEY_VARIABLE, ADMIN_KEY_VARIABLE, BACKEND_KEY_VARIABLE):
        if environment.get(variable) == "":  # a mistake in a deployment, and must not open the router
            raise RouteError(f"{variable} is set but empty; unset it to run without that key")
    try:
        Keys((*config.api_keys, *config.admin_api_keys))  # refuses what cannot be one
    except ValueError as error:
        raise RouteError(str(error)) from None
    if not 0 <= config.port <= 65535:
        raise RouteError(f"port: {config.port} is out of range; it must be from 0 to 65535")
    if not 1 <= config.workers <= 256:
        raise RouteError(f"workers: {config.workers} is out of range; it must be from 1 to 256")
    if config.workers > 1 and config.port == 0:
        raise RouteError("port: 0 is not possible with several workers; they share one given port")
    if config.max_requests < 1:
        raise RouteError(f"max_requests: {config.max_requests} is too small; it must be at least 1")
    if config.prefill_threshold < 1:
        raise RouteError(f"prefill_threshold: {config.prefill_threshold} is too small; it must be at least 1")
    _check_patience(config.patience)
    urls = tuple(canonical_url(url) for url in config.backends)
    prefills = tuple(each.check() for each in config.prefills)
    _check_once(urls, prefills)
    return msgspec.structs.replace(
        config,
        backends=urls,
        prefills=prefills,
        api_keys=(*config.api_keys, *_from(environment, API_KEY_VARIABLE)),
        admin_api_keys=(*config.admin_api_keys, *_from(environment, ADMIN_KEY_VARIABLE)),
        backend_api_key=config.backend_api_key or environment.get(BACKEND_KEY_VARIABLE),
    )


def canonical_url(url: str, field: str = "backend") -> str:
    """`http://host:port`, by which a replica is known; anything else is refused."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise RouteError(f"{field}: {url[:120]!r} is not a URL") from None
    if parts.scheme != "http" or not host or parts.path not in ("", "/") or parts.query or parts.username:
        raise RouteError(f"{field}: {url[:120]!r} is not of the form http://HOST:PORT")
    if not re.fullmatch(r"[A-Za-z0-9._:-]+", host):
        raise RouteError(f"{field}: {host[:80]!r} is not a host name or an address")
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port if port is not None else 80}"


def _check_once(urls: tuple[str, ...], prefills: tuple[Prefill, ...]) -> None:
    all_urls = [*urls, *(each.url for each in prefills)]
    for url in all_urls:
        if all_urls.count(url) > 1:
            raise RouteError(f"{'backend' if url in urls else 'prefill'}: {url} is given more than once")


def _from(environment: Mapping[str, str], variable: str) -> tuple[str, ...]:
    return (environment[variable],) if variable in environment else ()


def _check_patience(patience: Patience) -> None:
    for name in ("connect_s", "response_s", "probe_interval_s", "probe_timeout_s"):
        value = getattr(patience, name)
        if not 0 < value < float("inf"):
            raise RouteError(f"{name}: {value} is out of range; it must be above 0")
    if not 0 <= patience.drain_s < float("inf"):
        raise RouteError(f"drain_s: {patience.drain_s} is out of range; it must be at least 0")
    for name in ("retry_share", "max_ejected_share"):
        value = getattr(patience, name)
        if not 0 <= value <= 1:
            raise RouteError(f"{name}: {value} is out of range; it must be from 0 to 1")
