"""The configuration of the router. `resolve` checks it and adds the environment; RouteError names the option."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from penstock.engine.http.auth import Keys
from penstock.engine.http.hosts import check_allowed_hosts
from penstock.engine.http.limits import Limits
from penstock.engine.http.telemetry import AccessForm, Telemetry
from penstock.engine.http.telemetry import check as check_telemetry
from penstock.engine.options import Count, Delay, Port, Seconds, Share, check
from penstock.router.backend import Backend, RouteError
from penstock.router.discovery import check_source

API_KEY_VARIABLE = "PENSTOCK_API_KEY"
ADMIN_KEY_VARIABLE = "PENSTOCK_ADMIN_API_KEY"
BACKEND_KEY_VARIABLE = "PENSTOCK_BACKEND_API_KEY"
SECRET = re.compile(r"[\x21-\x7e]+")  # a key that is sent

PolicyName = Literal["predicted-ttft", "least-loaded", "round-robin"]


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Limits of the time that the router waits for replicas, and of its retries."""

    connect_s: Seconds = 2.0
    response_s: Seconds = 600.0  # a queue may be long; the probes find a dead replica
    probe_interval_s: Seconds = 0.5
    probe_timeout_s: Seconds = 1.0
    retry_share: Share = 0.15  # see RetryBudget
    max_ejected_share: Share = 0.5
    drain_s: Delay = 30.0


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    backends: tuple[str, ...] = ()
    prefill_threshold: Count = 512
    host: str = "127.0.0.1"
    port: Port = 8080
    policy: PolicyName = "predicted-ttft"
    tokenizer: str | None = None  # None: no tokens, byte prefixes
    chat_template: str | None = None
    default_chat_template_kwargs: dict[str, Any] | None = None
    api_keys: tuple[str, ...] = ()
    admin_api_keys: tuple[str, ...] = ()
    backend_api_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    max_requests: Count = 512
    discover: tuple[str, ...] = ()
    access_log: AccessForm = "off"
    telemetry: Telemetry = Telemetry()
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()


def resolve(config: RouterConfig, environment: Mapping[str, str]) -> RouterConfig:
    """Add the keys of the environment and refuse what cannot run."""
    for variable in (API_KEY_VARIABLE, ADMIN_KEY_VARIABLE, BACKEND_KEY_VARIABLE):
        if environment.get(variable) == "":  # a mistake in a deployment, and must not open the router
            raise RouteError(f"{variable} is set but empty; unset it to run without that key")
    try:
        check(config)
        check_telemetry(config.telemetry, environment)
        check_allowed_hosts(config.allowed_hosts)
        api_keys = (*config.api_keys, *filter(None, [environment.get(API_KEY_VARIABLE)]))
        admin_api_keys = (*config.admin_api_keys, *filter(None, [environment.get(ADMIN_KEY_VARIABLE)]))
        Keys((*api_keys, *admin_api_keys))  # refuses what cannot be one
        backend_api_key = config.backend_api_key or environment.get(BACKEND_KEY_VARIABLE)
        if backend_api_key is not None and not re.fullmatch(SECRET, backend_api_key):  # it becomes a header's line
            raise ValueError(
                f"backend_api_key: --backend-api-key or {BACKEND_KEY_VARIABLE} must be printable ASCII without spaces"
            )
    except ValueError as error:
        raise RouteError(str(error)) from None
    urls = [Backend.of(text).url for text in config.backends]
    for url in urls:
        if urls.count(url) > 1:
            raise RouteError(f"backend: {url} is given more than once")
    return replace(config, api_keys=api_keys, admin_api_keys=admin_api_keys, backend_api_key=backend_api_key)


def check_together(config: RouterConfig) -> None:
    """Raise RouteError for options of the command line that need another one."""
    for name in ("chat_template", "default_chat_template_kwargs"):
        if getattr(config, name) and not config.tokenizer:
            raise RouteError(f"{name}: needs --tokenizer; without it prompts are not rendered here")
    for each in map(Backend.of, config.backends):
        if each.events is not None and config.tokenizer is None:
            raise RouteError(
                f"backend: {each.url} has events=…, which name blocks by their tokens; --tokenizer MODEL is needed to know "
                "a prompt's"
            )
    for source in config.discover:
        check_source(source)
