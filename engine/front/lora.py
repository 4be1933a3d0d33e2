"""Adapters of the offline API, asked for with the names and the sense that vLLM gives them."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.engine.core.engine_core import EngineCore
from penstock.engine.sampling_params import InvalidRequest


class LoRARequest(msgspec.Struct, frozen=True):
    """A PEFT adapter in a folder. It is read when it is first asked for; another number reads the folder anew."""

    lora_name: str
    lora_int_id: Annotated[int, Meta(ge=1)]
    lora_path: str


class Loaded:
    """The adapters that calls have asked for; beyond what the engine holds, the one that was longest unused goes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: dict[LoRARequest, str] = {}  # the last used one last

    def keys(self, asked: Sequence[LoRARequest | None], core: EngineCore) -> list[str | None]:
        """Of the requests of one call, in its order. None of those that are let go is in use: there is one call at a time."""
        if (num := len({*asked} - {None})) > self._most:
            raise InvalidRequest("lora_request", f"{num} adapters in one call; max_cpu_loras is {self._most}")
        return [None if each is None else self._key(each, core) for each in asked]

    def _key(self, request: LoRARequest, core: EngineCore) -> str:
        key = self._keys.pop(request, None)
        if key is None:
            while len(self._keys) >= self._most:
                core.unload_adapter(self._keys.pop(next(iter(self._keys))))
            key = core.load_adapter(request.lora_path).key
        self._keys[request] = key
        return key
