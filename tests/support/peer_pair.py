"""Engines that share blocks over loopback, each with a core process of its own, over the oracle executor."""

from typing import Any

from penstock.engine.front.client import AsyncEngine
from tests.support.oracle_engine import oracle_engine
from tests.support.running_server import Running

SECRET = "a secret that is long enough"


def engine(**options: Any) -> AsyncEngine:
    return oracle_engine(max_model_len=2000, kv_host_bytes=2**22, **options)


def is_connected(server: Running) -> bool:
    server.complete(max_tokens=1)  # an idle core hears of nothing
    return 'kv_tier_is_open{model_name="tiny",tier="peer"} 1.0' in server.http.get("/metrics").text
