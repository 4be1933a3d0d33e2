"""The entries of /v1/models, which has the fields of OpenAI's and of Anthropic's API, for server and router."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any


def model_entry(name: str, created_s: int) -> dict[str, Any]:
    """Return the fields that clients of both APIs expect of a model. `created_s`: when it was first served."""
    created_at = datetime.fromtimestamp(created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    names = {"id": name, "object": "model", "owned_by": "penstock", "created": created_s}
    return names | {"type": "model", "display_name": name, "created_at": created_at, "lifecycle": "active"}


def model_list(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the list of all models, which is one page."""
    ids = [entry["id"] for entry in entries] or [None]
    return {"object": "list", "data": entries, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}
