"""POST /reset_prefix_cache: for measurements, or where there is reason to distrust what is cached."""

import msgspec

from penstock.engine.http.errors import HttpError
from penstock.engine.server.call import Call
from penstock.engine.server.requests import ResetRequest, parse
from penstock.engine.server.responses import Status
from penstock.engine.server.service import Service

_RESET = msgspec.json.Decoder(ResetRequest)


async def reset_prefix_cache(service: Service, _call: Call, body: bytes) -> Status:
    """Forget all cached content, in all tiers; 409 while requests run or transfers are in flight."""
    parse(body or b"{}", _RESET)
    if not await service.engine.reset_prefix_cache():
        raise HttpError(409, "requests or transfers between the tiers are in flight; try again when they are done")
    return Status("reset")
