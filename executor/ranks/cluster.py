"""Joins a Ray cluster, for the executor over its nodes."""

import ipaddress
import os
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.exceptions import RayError

from penstock.executor.protocol import ExecutorError


def join(address: str | None, allow_open_dashboard: bool, **options: Any) -> str:
    """Join the cluster at this address, in RAY_ADDRESS or on this machine; refuse one that takes
    jobs from the network. Returns its address; `options` are for `ray.init`."""
    wanted = address or os.environ.get("RAY_ADDRESS", "auto")
    try:
        context = ray.init(address=wanted, ignore_reinit_error=True, **options)
    except (ConnectionError, ValueError, RayError) as error:
        raise ExecutorError(
            f"executor: no Ray cluster can be reached ({error}); start one with `ray start --head`, "
            "or name it in RAY_ADDRESS"
        ) from error
    url = context.dashboard_url
    if url and is_open(url) and not allow_open_dashboard:
        raise ExecutorError(
            f"executor: Ray's dashboard at {url} takes jobs from every client that can reach it. Start Ray with "
            "--dashboard-host 127.0.0.1 or with RAY_AUTH_MODE=token; or say ray_allow_open_dashboard"
        )
    return str(context.address_info["gcs_address"])


def is_open(dashboard: str) -> bool:
    """Whether a dashboard at this address can be used from other machines, without a token."""
    host = urlsplit(dashboard if "//" in dashboard else f"//{dashboard}").hostname or ""
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"
