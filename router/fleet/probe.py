"""The health checks: probes each replica's readiness twice a second, and requests its models when it has come up.

Each replica has a task. A failed request wakes it early, by the replica's event `probe_due`: after a broken connection, a
probe shows within a millisecond whether the process is still alive.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Callable

import msgspec

from penstock.router.fleet.fleet import Fleet
from penstock.router.fleet.replica import Replica
from penstock.router.http.upstream import ConnectFailed, fetch
from penstock.router.placement.placement import ReplicaInfo

PROBES_PER_LIST = 10  # adapters change while a replica is up: its model list is requested with every tenth probe
# In the metrics of vLLM and SGLang: the labels with the size and the number of the cache's blocks.
_CACHE_CONFIG = re.compile(r"^(?:vllm|sglang):cache_config_info\{(.*)\}", re.MULTILINE)
_NUMBER_LABEL = re.compile(r'(\w+)="(\d+)"')

log = logging.getLogger("penstock.router")


class ServedModel(msgspec.Struct):
    """An entry of a replica's /v1/models; fields that only Penstock reports are optional."""

    id: str
    root: str | None = None
    parent: str | None = None  # for an adapter: its base model
    max_model_len: int | None = None
    block_size: int | None = None
    fingerprint: str | None = None
    num_blocks: int | None = None
    text_digest: str | None = None
    adapter: str | None = None  # the adapter identifier in the keys of its blocks


class ServedModels(msgspec.Struct):
    data: list[ServedModel]


class Probe:
    """The probes of one replica; calls `on_info` when the replica's models become known or change."""

    def __init__(self, fleet: Fleet, on_info: Callable[[Replica, ServedModel], None], replica: Replica) -> None:
        self._fleet, self._timeouts = fleet, fleet.config.timeouts
        self._on_info, self._replica = on_info, replica
        self._path = "/ready"  # or /health of an engine that has no /ready
        self._described = ""  # the replica's first model and its block counts, to detect changes
        self._num_probes = 0
        self._cache_config: dict[str, int] = {}  # of a vLLM or SGLang engine, as its metrics state it

    def start(self) -> None:
        """Start the task that probes the replica: now, then regularly, and at once whenever its `probe_due` is set."""
        self._fleet.tasks.keep_running(f"the probe of {self._replica.url}", self._watch)

    async def _watch(self) -> None:
        replica = self._replica
        while replica.state != "removing" or replica.num_in_flight:
            replica.probe_due.clear()
            await self._probe()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeouts.probe_interval_s):
                    await replica.probe_due.wait()
        self._fleet.forget(replica)

    async def _probe(self) -> None:
        replica = self._replica
        try:
            status = await self._ask_ready()
            self._num_probes += 1
            is_due = self._num_probes % PROBES_PER_LIST == 0
            if status == 200 and replica.state != "removing" and (replica.root is None or not replica.is_up or is_due):
                await self._update_models()
        except (ConnectFailed, TimeoutError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            if isinstance(error, ConnectFailed) and error.is_local:
                log.warning("%s could not be probed, because the router lacks resources: %s", replica.url, error)
                return
            with self._fleet.observing(replica):
                if isinstance(error, TimeoutError) or (isinstance(error, ConnectFailed) and not error.is_dead):
                    replica.probe_timed_out()
                else:
                    replica.probe_refused(str(error)[:200], is_draining=False)
        else:
            with self._fleet.observing(replica):
                if status == 200:
                    replica.probe_passed(time.monotonic())
                else:
                    replica.probe_refused(f"/ready answered {status}", is_draining=status == 503)

    async def _ask(self, path: str) -> tuple[int, bytes]:
        return await fetch(self._replica.pool, path, self._replica.key_line, self._timeouts.probe_timeout_s)

    async def _ask_ready(self) -> int:
        status, _ = await self._ask(self._path)
        if status == 404 and self._path == "/ready":
            self._path = "/health"
            status, _ = await self._ask(self._path)
        return status

    async def _update_models(self) -> None:
        """Request the replica's models, which may have changed after a restart, and update its group."""
        replica = self._replica
        status, body = await self._ask("/v1/models")
        if status != 200:
            raise ValueError(f"/v1/models answered {status}")
        served = msgspec.json.decode(body, type=ServedModels).data
        if not served:
            raise ValueError("/v1/models lists no model")
        first = served[0]
        names = tuple(model.id for model in served)
        adapters = {model.id: model.adapter or model.id for model in served if model.adapter or model.parent}
        if first.fingerprint is None and not (replica.root is not None and replica.is_up):
            await self._read_cache_config()
        described = f"{first} {self._cache_config}"
        if replica.root is None or self._described != described:
            self._described = described
            replica.text_digest = first.text_digest
            self._fleet.assign_group(replica, first.root or first.id, names, replica_info(first, self._cache_config))
            if replica.root is not None:  # it was not removed meanwhile; another may have its address by now
                self._on_info(replica, first)
        if (replica.models, replica.adapters) != (names, adapters):
            self._fleet.rename(replica, names, adapters)

    async def _read_cache_config(self) -> None:
        """Read the cache's size from the metrics of a vLLM or SGLang engine; without an answer, keep what is known."""
        with contextlib.suppress(ConnectFailed, TimeoutError):
            status, body = await self._ask("/metrics")
            found = _CACHE_CONFIG.search(body.decode("utf-8", "replace")) if status == 200 else None
            if found is not None:
                self._cache_config = {name: int(number) for name, number in _NUMBER_LABEL.findall(found[1])}


def replica_info(model: ServedModel, cache_config: dict[str, int]) -> ReplicaInfo:
    """Return the placement's data about a replica; if the block size is unknown, a default is used."""
    if model.fingerprint is None or model.block_size is None:
        block_size = cache_config.get("block_size", cache_config.get("page_size", 0))
        num_blocks = cache_config.get("num_gpu_blocks", cache_config.get("num_pages", 0))
        if not 1 <= block_size <= 2**20:
            return ReplicaInfo()
        return ReplicaInfo(block_size=block_size, num_blocks=min(num_blocks, 2**31))
    return ReplicaInfo(
        fingerprint=bytes.fromhex(model.fingerprint),
        block_size=model.block_size,
        num_blocks=model.num_blocks or 0,
    )
