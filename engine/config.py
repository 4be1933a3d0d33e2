"""The configuration of an engine as it runs: one frozen object for the executor and one for the scheduler.

engine/engine_options.py makes it from flags and keywords.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.executor.protocol import ExecutorConfig

MAX_LAYER_DRAFTS = 4  # each costs a pass of the layer and of the head, and is right less often than the one before
COMPILE_LIMIT_S = 10.0  # of a grammar, since a thread began: much more than any useful one needs on a busy machine


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculative decoding: draft tokens are those that followed the same text earlier, and with `mtp` also those of the
    model's own layer for multi-token prediction, where no text was repeated."""

    method: Literal["ngram", "mtp"]
    # Maximum draft tokens per request and step. None: 4 with n-grams, 2 with `mtp`.
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=64)] | None = None
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=64)] = 2  # length of the shortest n-gram to search for
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=64)] = 4  # length of the longest n-gram to search for
    max_draft_rows: Annotated[int, Meta(ge=1)] = 64  # maximum draft tokens of all requests per step

    def __post_init__(self) -> None:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min: {self.prompt_lookup_min} given; it must be at most prompt_lookup_max "
                f"({self.prompt_lookup_max})"
            )
        if self.layer_drafts > MAX_LAYER_DRAFTS:
            raise ValueError(
                f"num_speculative_tokens: {self.layer_drafts} given; with the method 'mtp' at most {MAX_LAYER_DRAFTS}"
            )

    @property
    def most_drafts(self) -> int:
        """The maximum number of draft tokens per request and step."""
        return self.num_speculative_tokens or (2 if self.method == "mtp" else 4)

    @property
    def layer_drafts(self) -> int:
        """The most that may come from the model's own layer."""
        return self.most_drafts if self.method == "mtp" else 0


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the scheduler."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 0  # 0: what the executor reports
    enable_prefix_caching: bool = True
    max_queued_requests: int = 4096
    # A request that has waited longer counts as one of the most urgent.
    patience_s: Annotated[float, Meta(ge=0)] = 30.0
    speculative_config: SpeculativeConfig | None = None  # None: no speculative decoding

    @property
    def max_sequences(self) -> int:
        """The maximum number of running and waiting sequences. The front has the same limit, so it refuses first."""
        return self.max_num_seqs + self.max_queued_requests


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of one engine, with paths resolved."""

    executor: ExecutorConfig
    scheduler: SchedulerConfig


class ConfigError(ValueError):
    """An option cannot be used as given; the message names the option."""
