"""What servers and routers say of their requests to operators: how much is logged, and where spans go."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote, urlsplit

from penstock.engine.options import Share, flag
from penstock.executor.process_life import LOG_VARIABLE, log_levels

HEADERS_VARIABLE = "OTEL_EXPORTER_OTLP_HEADERS"
NAME_VARIABLE = "OTEL_SERVICE_NAME"
TRACES_PATH = "/v1/traces"

AccessForm = Literal["json", "text", "off"]


def levels(text: str) -> str:
    log_levels(text)
    return text


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    otlp_traces_endpoint: str | None = flag(
        f"send OpenTelemetry spans of requests there, over OTLP/HTTP, like http://127.0.0.1:4318{TRACES_PATH} "
        "(default: none)",
        "URL",
    )
    trace_share: Share | None = flag(
        "of the requests that bring no traceparent, so many are traced (default: 1, all)", "X"
    )
    log_level: str | None = flag(
        f"one for all, others for single rooms, like info,router=debug,cache=error (default: {LOG_VARIABLE} in the "
        "environment, else info)",
        "LEVELS",
        ("--log-level", "--uvicorn-log-level"),
        read=levels,
    )


class Collector:
    """Where spans go, and as whose."""

    def __init__(self, endpoint: str, service: str, environment: Mapping[str, str]) -> None:
        """ValueError names the option, or the variable of the environment, that is wrong."""
        try:
            parts = urlsplit(endpoint)
            self.host, self.port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            raise ValueError(f"otlp_traces_endpoint: {endpoint[:120]!r} is not a URL") from None
        if parts.scheme not in ("http", "https") or not self.host or parts.username or parts.fragment:
            raise ValueError(
                f"otlp_traces_endpoint: {endpoint[:120]!r} given; OTLP is spoken over HTTP here, so "
                f"http://HOST:4318{TRACES_PATH} or the same with https is expected"
            )
        self.is_tls = parts.scheme == "https"
        self.path = (parts.path.rstrip("/") or TRACES_PATH) + (f"?{parts.query}" if parts.query else "")
        self.service = environment.get(NAME_VARIABLE) or service
        self.headers = {"content-type": "application/json"}
        for pair in filter(None, environment.get(HEADERS_VARIABLE, "").split(",")):
            name, mark, value = pair.partition("=")
            if not mark or not name.strip().isascii():
                raise ValueError(f"{HEADERS_VARIABLE}: NAME=VALUE, NAME=VALUE is expected")
            self.headers[name.strip().lower()] = unquote(value.strip())

    def __str__(self) -> str:
        return f"http{'s' * self.is_tls}://{self.host}:{self.port}"


def check(telemetry: Telemetry, environment: Mapping[str, str]) -> None:
    """ValueError names the option that cannot run."""
    log_levels(telemetry.log_level or environment.get(LOG_VARIABLE, "info"))
    if telemetry.otlp_traces_endpoint is not None:
        Collector(telemetry.otlp_traces_endpoint, "", environment)
    elif telemetry.trace_share is not None:
        raise ValueError("trace_share: given; it needs otlp_traces_endpoint, without which nothing is traced")
