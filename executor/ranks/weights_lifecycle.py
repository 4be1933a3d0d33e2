"""Replaces the weights of a running rank, and frees its memory while it sleeps.

All ranks get the same calls, between steps. An update has two phases, so that all ranks replace their weights or none
does: each rank prepares new weights beside the current ones, and then takes or drops them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import torch

from penstock.executor.models.load import LoadedModel, load_update
from penstock.executor.protocol import NO_WEIGHTS, ExecutorError, SleepLevel, WeightsError
from penstock.executor.ranks.rank import Rank
from penstock.executor.step.memory import naming_options


class WeightsLifecycle:
    """The updates of one rank's weights, its sleep and its waking up."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        config = rank.settings.config
        self._source = config.model if config.load_format != "dummy" else ""  # where the weights can be read again
        self._prepared: tuple[LoadedModel, str] | None = None  # the next weights, and their source

    def prepare(self, source: str) -> bytes:
        """Load new weights beside the current ones; return their fingerprint. Raises WeightsError."""
        self._prepared = None
        self._check_experts_stay()
        settings = self._rank.settings
        try:
            with naming_options("the weights, beside those that compute,", "put the engine to sleep before the update"):
                loaded = load_update(source, settings.config, self._rank.loaded, settings.device, settings.group)
        except OSError as error:
            raise WeightsError(f"{source}: {error.strerror or error}") from None
        except ExecutorError as error:
            raise WeightsError(str(error)) from None
        self._prepared = loaded, source
        return loaded.fingerprint

    def take(self) -> None:
        """Replace the current weights with the prepared ones."""
        assert self._prepared is not None
        rank = self._rank
        (rank.loaded, self._source), self._prepared = self._prepared, None
        rank.info = msgspec.structs.replace(rank.info, fingerprint=rank.loaded.fingerprint)
        if rank.open_runner is not None:
            rank.replace_runner()
            rank.runner_factory.capture(rank.runner)

    def drop(self) -> None:
        """Discard the prepared weights."""
        self._prepared = None

    def sleep(self, level: SleepLevel) -> None:
        """Free the KV blocks and, on a GPU or at level 2, the weights. At level 1 they are read again on `wake`."""
        rank, is_on_gpu = self._rank, self._rank.settings.is_on_gpu
        drops_weights = level == 2 or is_on_gpu
        if drops_weights:
            self._check_experts_stay()
        rank.close_runner()
        rank.free_blocks()
        if level == 2:
            self._source = ""
        if drops_weights:
            rank.loaded = rank.loaded.without_model()
        if is_on_gpu:
            torch.cuda.empty_cache()

    def wake(self, parts: Sequence[str]) -> None:
        """Read the weights again if they were dropped and, if `parts` has "kv_cache", open a runner over new blocks.
        Raises WeightsError on all ranks if one fails."""
        self._reload_weights()
        rank = self._rank
        if "kv_cache" not in parts or rank.open_runner is not None:
            return
        if not rank.loaded.has_model:
            raise WeightsError(NO_WEIGHTS)
        try:
            with self._agreement("the KV cache"):
                rank.allocate_blocks()
                rank.replace_runner()
            with self._agreement("CUDA graphs"):
                rank.runner_factory.capture(rank.runner)
        except WeightsError as error:
            rank.close_runner()
            rank.free_blocks()
            raise WeightsError(f"wake_up: {error}") from None

    def _reload_weights(self) -> None:
        loaded, source = self._rank.loaded, self._source
        if loaded.has_model or not source:
            return
        with self._agreement("the weights"):
            if self.prepare(source) != loaded.fingerprint:
                raise WeightsError(f"wake_up: {source} has other weights than those that slept; use update_weights")
        self.take()

    def _check_experts_stay(self) -> None:
        if self._rank.settings.config.enable_eplb:
            raise WeightsError("weights cannot be replaced with enable_eplb, which moves experts between ranks")

    @contextmanager
    def _agreement(self, purpose: str) -> Iterator[None]:
        """Raise WeightsError on all ranks if one fails within, because it would be missing in what they do next."""
        message = ""
        try:
            with naming_options(purpose, "free memory on the device, then wake it up again"):
                yield
        except ExecutorError as error:
            message = str(error)
        messages = self._rank.settings.group.gather_bytes(message.encode())
        if message := next(filter(None, messages), b"").decode():
            self.drop()
            raise WeightsError(message)
