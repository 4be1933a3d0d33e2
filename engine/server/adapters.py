"""The LoRA adapters that are served, by the model names that clients use for them.

The digest of an adapter's weights is part of the keys of its KV blocks, so a name that gets other weights never hits
blocks of the old ones. A request resolves its name when it is submitted to the engine, and keeps that adapter.
"""

import asyncio
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.engine.front.engine import Engine
from penstock.engine.http.errors import HttpError, clip
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.server.requests import FilePath
from penstock.engine.server.server_config import LoraModule
from penstock.executor.protocol import AdapterError, AdapterInfo

Name = Annotated[str, Meta(min_length=1, max_length=256)]


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """POST /v1/load_lora_adapter"""

    lora_name: Name
    lora_path: FilePath  # a folder that the server can read
    load_inplace: bool | None = None  # if the name is in use, replace its adapter


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """POST /v1/unload_lora_adapter"""

    lora_name: Name
    lora_int_id: int | None = None


class Adapters:
    def __init__(self, engine: Engine, taken: Iterable[str]) -> None:
        """Create an empty set of adapters. `taken`: names that no adapter may have."""
        self._engine, self._taken = engine, frozenset(taken)
        self.served: dict[str, AdapterInfo] = {}
        self._lock = asyncio.Lock()  # loads one adapter at a time, so that no name is assigned twice

    async def load(self, name: str, path: str, in_place: bool = False) -> None:
        async with self._lock:
            if not name.isprintable():
                raise InvalidRequest("lora_name", f"{clip(name)!r} has control characters")
            if name in self._taken:
                raise InvalidRequest("lora_name", f"{name[:64]!r} is the name of the model itself")
            if name in self.served and not in_place:
                raise InvalidRequest("lora_name", f"{name[:64]!r} is in use; unload it first, or set load_inplace")
            try:
                info = await self._engine.load_adapter(path)
            except AdapterError as error:
                raise InvalidRequest("lora_path", str(error)) from None
            before, self.served[name] = self.served.get(name), info
            if before is not None:
                self._engine.unload_adapter(before.key)

    def unload(self, name: str) -> None:
        if name not in self.served:
            raise HttpError(404, f"lora_name: {clip(name)!r} is not a loaded adapter", param="lora_name")
        self._engine.unload_adapter(self.served.pop(name).key)

    async def load_all(self, modules: Iterable[LoraModule]) -> None:
        """Load the adapters given on the command line; raise AdapterError naming the first that cannot be used."""
        for module in modules:
            try:
                await self.load(module.name, module.path)
            except InvalidRequest as error:
                raise AdapterError(f"lora_modules: {module.name}: {error}") from None
