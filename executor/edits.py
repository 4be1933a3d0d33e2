"""What a request changes in its logits before a token is chosen: allowed and banned tokens, biases, penalties.

Everything that does not depend on the position is turned into index tensors once, when the batch's rows
change; a step then is a handful of scatters, and the dense penalties for those rows that ask for them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.executor.protocol import Sampling

# Per slot and token of `seen`: how often it was sampled, and a bit for "is in the prompt".
IN_PROMPT = 1 << 30


def is_edited(sampling: Sampling) -> bool:
    lists = sampling.allowed_ids or sampling.banned_ids or sampling.logit_bias
    return bool(lists) or sampling.min_tokens > 0 or is_penalized(sampling)


def is_penalized(sampling: Sampling) -> bool:
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def record(seen: Tensor, tokens: np.ndarray, num_prompt: int) -> None:
    """Rebuild one slot's `seen` [V] int32 from its tokens: the prompt, then what was sampled."""
    ids = torch.from_numpy(tokens.astype(np.int64)).to(seen.device)
    seen.zero_()
    sampled = ids[num_prompt:]
    seen.index_add_(0, sampled, torch.ones_like(sampled, dtype=seen.dtype))
    seen[ids[:num_prompt]] |= IN_PROMPT


@dataclass(frozen=True)
class _Penalties:
    """Rows of the batch part that have one; options are [P, 1]."""

    rows: Tensor
    slots: Tensor
    repetition: Tensor | None
    frequency: Tensor | None
    presence: Tensor | None


class Edits:
    """The edits of some rows, for logits that lie in rows `stride` apart."""

    def __init__(self, rows: list[tuple[int, Sampling, int]], stride: int, device: torch.device) -> None:
        """rows: (slot, sampling, num_prompt) each."""
        self._rows, self._stride, self._device = rows, stride, device
        samplings = [sampling for _, sampling, _ in rows]
        allowed = [row for row, s in enumerate(samplings) if s.allowed_ids]
        self._allowed_rows = self._index(allowed) if allowed else None
        self._allowed = self._flat([s.allowed_ids for s in samplings])
        self._banned = self._flat([s.banned_ids for s in samplings])
        self._biased = self._flat([tuple(i for i, _ in s.logit_bias) for s in samplings])
        self._biases = self._floats([bias for s in samplings for _, bias in s.logit_bias])
        self._penalties = self._penalties_of(samplings)
        self._too_short: tuple[int, ...] = ()
        self._stops: Tensor | None = None

    def apply(self, logits: Tensor, positions: np.ndarray, seen: Tensor) -> None:
        """Change logits [R, stride], of which the first V columns count, in place. positions [R], seen [slots, V]."""
        flat, width = logits.view(-1), seen.shape[1]
        if self._allowed_rows is not None:
            kept = flat[self._allowed]
            logits[:, :width].index_fill_(0, self._allowed_rows, -torch.inf)
            flat[self._allowed] = kept
        for ids in (self._banned, self._stop_ids(positions)):
            if ids is not None:
                flat.index_fill_(0, ids, -torch.inf)
        if self._biased is not None:
            flat.index_add_(0, self._biased, self._biases)
        if self._penalties is not None:
            self._penalize(logits[:, :width], seen)

    def count(self, tokens: Tensor, seen: Tensor) -> None:
        """The rows' sampled tokens [R] join what was seen."""
        if self._penalties is not None:
            place = self._penalties.slots, tokens[self._penalties.rows]
            seen.index_put_(place, torch.ones_like(place[0], dtype=seen.dtype), accumulate=True)

    def _penalize(self, logits: Tensor, seen: Tensor) -> None:
        penalties = self._penalties
        assert penalties is not None
        rows, found = logits[penalties.rows], seen[penalties.slots]  # [P, V] each
        if penalties.repetition is not None:
            scaled = torch.where(rows > 0, rows / penalties.repetition, rows * penalties.repetition)
            rows = torch.where(found > 0, scaled, rows)
        if penalties.frequency is not None and penalties.presence is not None:
            counts = (found & (IN_PROMPT - 1)).float()
            rows -= counts * penalties.frequency
            rows -= counts.clamp_(max=1) * penalties.presence
        logits[penalties.rows] = rows

    def _stop_ids(self, positions: np.ndarray) -> Tensor | None:
        """Stop tokens of the rows that have not sampled their min_tokens yet; they change at most once per row."""
        too_short = tuple(
            row
            for row, (_, sampling, num_prompt) in enumerate(self._rows)
            if positions[row] - num_prompt < sampling.min_tokens
        )
        if too_short != self._too_short:
            stops = [s.stop_ids if row in too_short else () for row, (_, s, _) in enumerate(self._rows)]
            self._too_short, self._stops = too_short, self._flat(stops)
        return self._stops

    def _penalties_of(self, samplings: list[Sampling]) -> _Penalties | None:
        rows = [row for row, sampling in enumerate(samplings) if is_penalized(sampling)]
        if not rows:
            return None
        chosen = [samplings[row] for row in rows]
        counted = any(s.frequency_penalty or s.presence_penalty for s in chosen)
        repeated = any(s.repetition_penalty != 1 for s in chosen)
        return _Penalties(
            self._index(rows),
            self._index([self._rows[row][0] for row in rows]),
            self._floats([s.repetition_penalty for s in chosen])[:, None] if repeated else None,
            self._floats([s.frequency_penalty for s in chosen])[:, None] if counted else None,
            self._floats([s.presence_penalty for s in chosen])[:, None] if counted else None,
        )

    def _flat(self, ids: list[tuple[int, ...]]) -> Tensor | None:
        """Token ids of each row as indices into the flattened logits; None if there are none."""
        flat = [row * self._stride + token for row, tokens in enumerate(ids) for token in tokens]
        return self._index(flat) if flat else None

    def _index(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device, non_blocking=True)

    def _floats(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).to(self._device, non_blocking=True)
