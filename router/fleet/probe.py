"""Asks every replica twice a second whether it is ready, and what it serves when it has come up.

One task per replica. Evidence from requests wakes it early: after a broken connection the question is whether the
process is still there, and the answer takes a millisecond.
"""

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from penstock.router.config import RouterConfig
from penstock.router.fleet.fleet import Fleet
from penstock.router.fleet.replica import Replica
from penstock.router.http.heads import Headers
from penstock.router.http.upstream import ConnectFailed, fetch
from penstock.router.placement.placement import ReplicaInfo

log = logging.getLogger("penstock.router")


class ServedModel(msgspec.Struct):
    """An entry of a replica's /v1/models. What only Penstock says is optional."""

    id: str
    root: str | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    fingerprint: str | None = None
    num_blocks: int | None = None
    max_num_batched_tokens: int | None = None
    text_digest: str | None = None


class ServedModels(msgspec.Struct):
    data: list[ServedModel]


_MODELS = msgspec.json.Decoder(ServedModels)


class Prober:
    def __init__(self, fleet: Fleet, config: RouterConfig, on_info: Callable[[Replica, ServedModel], None]) -> None:
        self._fleet = fleet
        self._config = config
        self._on_info = on_info
        self._tasks: dict[Replica, asyncio.Task[None]] = {}
        self._wake: dict[Replica, asyncio.Event] = {}
        self._known: dict[Replica, tuple[str, ...]] = {}
        key = config.backend_api_key
        self._headers: Headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
        self._path: dict[Replica, str] = {}

    def watch(self, replica: Replica) -> None:
        """Probe it now, and from now on."""
        if replica in self._tasks:
            self._wake[replica].set()
            return
        self._wake[replica] = asyncio.Event()
        self._tasks[replica] = asyncio.get_running_loop().create_task(self._watch(replica))

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _watch(self, replica: Replica) -> None:
        wake = self._wake[replica]
        try:
            while replica.state != "removing":
                wake.clear()
                await self._probe(replica)
                await _sleep_or(wake, self._config.patience.probe_interval_s)
            while replica.num_in_flight:
                await asyncio.sleep(0.05)
            self._fleet.forget(replica)
        finally:
            for kept in (self._tasks, self._wake, self._known, self._path):
                kept.pop(replica, None)

    async def _probe(self, replica: Replica) -> None:
        try:
            status = await self._ask_ready(replica)
            if status == 200 and (replica.root is None or not replica.is_up):
                await self._introduce(replica)
        except (ConnectFailed, TimeoutError, msgspec.MsgspecError, ValueError) as error:
            with self._fleet.observing(replica):
                if isinstance(error, TimeoutError) or (isinstance(error, ConnectFailed) and not error.is_dead):
                    replica.probe_silent()
                else:
                    replica.probe_refused(str(error)[:200], is_draining=False)
        else:
            with self._fleet.observing(replica):
                if status == 200:
                    replica.probe_passed(time.monotonic())
                else:
                    replica.probe_refused(f"/ready answered {status}", is_draining=status == 503)

    async def _ask_ready(self, replica: Replica) -> int:
        """/ready, or /health of an engine that has no /ready."""
        path = self._path.get(replica, "/ready")
        timeout_s = self._config.patience.probe_timeout_s
        status, _ = await fetch(replica.pool, path, self._headers, timeout_s)
        if status == 404 and path == "/ready":
            self._path[replica] = "/health"
            status, _ = await fetch(replica.pool, "/health", self._headers, timeout_s)
        return status

    async def _introduce(self, replica: Replica) -> None:
        """Ask what it serves; a replica that has come back may serve something else."""
        timeout_s = self._config.patience.probe_timeout_s
        status, body = await fetch(replica.pool, "/v1/models", self._headers, timeout_s)
        if status != 200:
            raise ValueError(f"/v1/models answered {status}")
        served = _MODELS.decode(body).data
        if not served:
            raise ValueError("/v1/models lists no model")
        first = served[0]
        names = tuple(model.id for model in served)
        said = (*names, str(first))
        if replica.root is not None and self._known.get(replica) == said:
            return
        self._known[replica] = said
        replica.text_digest = first.text_digest
        self._fleet.introduce(replica, first.root or first.id, names, replica_info(first))
        self._on_info(replica, first)


def replica_info(model: ServedModel) -> ReplicaInfo:
    """What the placement works with. An engine that says nothing of its blocks is guessed at."""
    if model.fingerprint is None or model.block_size is None:
        return ReplicaInfo()
    return ReplicaInfo(
        fingerprint=bytes.fromhex(model.fingerprint),
        block_size=model.block_size,
        num_blocks=model.num_blocks or 0,
        max_num_batched_tokens=model.max_num_batched_tokens or 8192,
    )


async def _sleep_or(wake: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await wake.wait()
    except TimeoutError:
        pass
