"""Routes for trainers, under vLLM's names: pause, sleep and update the weights.

The operator must enable these routes. Parameters may be in the query string, in a JSON body, or in both.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.messages import PauseMode
from penstock.engine.server.call import Call
from penstock.engine.server.endpoint import HandledRoute
from penstock.engine.server.requests import FilePath, NoFields, parse_control
from penstock.engine.server.service import Service
from penstock.executor.protocol import Part, SleepLevel, WeightsError


class PauseRequest(msgspec.Struct, kw_only=True):
    """POST /pause"""

    mode: PauseMode = "abort"  # what happens to running requests
    # Clearing is not needed, because blocks of other weights are never hit. True is accepted, as vLLM's default.
    clear_cache: bool | None = None


class SleepRequest(msgspec.Struct, kw_only=True):
    """POST /sleep"""

    level: SleepLevel = 1
    mode: PauseMode = "abort"


class WakeRequest(msgspec.Struct, kw_only=True):
    """POST /wake_up"""

    tags: tuple[Part, ...] = ("weights", "kv_cache")


class UpdateRequest(msgspec.Struct, kw_only=True):
    """POST /update_weights"""

    # A folder, a .gguf or a .safetensors file that the server can read, or shared memory (executor/shared_tensors.py).
    path: FilePath


async def pause(service: Service, call: Call, body: bytes) -> dict[str, Any]:
    """Stop computing between two steps. New requests wait; running requests are ended ("abort"), waited for ("wait") or
    kept ("keep")."""
    request = parse_control(PauseRequest, call.query, body)
    if request.clear_cache is False:
        raise InvalidRequest("clear_cache", "false given; only true is possible")
    await service.engine.control("pause", mode=request.mode)
    return {"status": "paused"}


async def resume(service: Service, call: Call, body: bytes) -> dict[str, Any]:
    """Resume after a pause."""
    parse_control(NoFields, call.query, body)
    await service.engine.control("resume")
    return {"status": "resumed"}


async def sleep(service: Service, call: Call, body: bytes) -> dict[str, Any]:
    """Pause, and free the KV cache's memory; with level 2 also that of the weights."""
    request = parse_control(SleepRequest, call.query, body)
    await service.engine.control("sleep", is_withdrawable=True, level=request.level, mode=request.mode)
    return {"status": "asleep"}


async def wake_up(service: Service, call: Call, body: bytes) -> dict[str, Any]:
    """Allocate the given parts again, and resume when weights and cache are both there."""
    request = parse_control(WakeRequest, call.query, body)
    asleep = (await service.engine.control("wake_up", parts=request.tags)).asleep
    return {"status": f"asleep, without {' and '.join(asleep)}" if asleep else "awake"}


async def update_weights(service: Service, call: Call, body: bytes) -> dict[str, Any]:
    """Compute with other weights of the same model: all of them or, where they cannot be used, none. Running requests
    wait, and go on with the new weights."""
    request = parse_control(UpdateRequest, call.query, body)
    try:
        state = await service.engine.control("update_weights", path=request.path)
    except WeightsError as error:
        raise InvalidRequest("path", str(error)) from None
    return {"weights_version": state.weights_version, "fingerprint": state.fingerprint.hex()}


HANDLERS = (pause, resume, sleep, wake_up, update_weights)
POSTS = tuple(HandledRoute(f"/{handler.__name__}", handler, takes_none=True) for handler in HANDLERS)
GETS: dict[str, Callable[[Service], dict[str, Any]]] = {
    "/is_paused": lambda service: {"is_paused": service.engine.state.is_paused},
    "/is_sleeping": lambda service: {"is_sleeping": bool(service.engine.state.asleep)},
    "/weights_version": lambda service: {"weights_version": service.engine.state.weights_version},
    "/get_world_size": lambda service: {"world_size": service.engine.config.executor.tensor_parallel_size},
    # Contains only the fields that show trainers that there is no NCCL group to join.
    "/server_info": lambda service: {"vllm_config": {"model": service.model_name, "weight_transfer_config": None}},
}
