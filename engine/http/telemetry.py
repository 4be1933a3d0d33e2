"""Options for logs and spans, of servers and routers."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal
from urllib.parse import urlsplit

from penstock.engine.options import flag
from penstock.executor.logs import LOG_VARIABLE, log_levels

TRACES_PATH = "/v1/traces"
SDK_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")  # the extra `otel`

AccessForm = Literal["json", "text", "off"]


def levels(text: str) -> str:
    log_levels(text)
    return text


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    otlp_traces_endpoint: str | None = None
    log_level: str | None = flag(read=levels)


def traces_url(endpoint: str) -> str:
    """Return the URL that spans are posted to; raise ValueError if `endpoint` is not the address of a collector."""
    try:
        parts = urlsplit(endpoint)
        is_usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        raise ValueError(f"otlp_traces_endpoint: {endpoint[:120]!r} is not a URL") from None
    if not is_usable or parts.username or parts.fragment:
        raise ValueError(
            f"otlp_traces_endpoint: {endpoint[:120]!r} given; spans are sent over HTTP, so "
            f"http://HOST:4318{TRACES_PATH} or the same with https is expected"
        )
    return parts._replace(path=parts.path.rstrip("/") or TRACES_PATH).geturl()


def check(telemetry: Telemetry, environment: Mapping[str, str]) -> None:
    """Raise a ValueError that names an invalid option."""
    log_levels(telemetry.log_level or environment.get(LOG_VARIABLE, "info"))
    if telemetry.otlp_traces_endpoint is None:
        return
    traces_url(telemetry.otlp_traces_endpoint)
    with suppress(ModuleNotFoundError):  # not even the parent package is there
        if all(find_spec(name) is not None for name in SDK_PACKAGES):
            return
    raise ValueError(
        "otlp_traces_endpoint: needs the OpenTelemetry SDK, which is not installed; run `pip install penstock[otel]`"
    )
