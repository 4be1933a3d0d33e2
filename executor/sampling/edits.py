"""What a request changes in its logits before a token is chosen: allowed and banned tokens, biases, penalties.

Everything that does not depend on the position is turned into index tensors once, when the batch's rows
change; a step then is a handful of scatters.
"""

import numpy as np
import torch
from torch import Tensor

from penstock.executor.kernels import SamplingOps
from penstock.executor.protocol import Sampling, is_penalized
from penstock.executor.sampling.penalties import Penalties, Seen
from penstock.executor.staging import send_list


def is_edited(sampling: Sampling) -> bool:
    lists = sampling.allowed_ids or sampling.banned_ids or sampling.logit_bias
    return bool(lists) or sampling.min_tokens > 0 or is_penalized(sampling)


def is_plain(sampling: Sampling) -> bool:
    """Whether it asks for no more than `SamplingOps.choose` does: a draw, and nothing to be told of it."""
    return sampling.logprobs is None and not is_edited(sampling)


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
        self._penalties = Penalties.of([slot for slot, _, _ in rows], samplings, device)
        self._too_short: tuple[int, ...] = ()
        self._stops: Tensor | None = None

    def apply(self, logits: Tensor, positions: np.ndarray, seen: Seen, ops: SamplingOps | None = None) -> None:
        """Change logits [R, stride] in place, of which only the vocabulary's columns count. positions [R]."""
        flat, vocab_size = logits.view(-1), seen.counts.shape[1]
        if self._allowed_rows is not None:
            kept = flat[self._allowed]
            logits[:, :vocab_size].index_fill_(0, self._allowed_rows, -torch.inf)
            flat[self._allowed] = kept
        for ids in (self._banned, self._stop_ids(positions)):
            if ids is not None:
                flat.index_fill_(0, ids, -torch.inf)
        if self._biased is not None:
            flat.index_add_(0, self._biased, self._biases)
        if self._penalties is not None:
            self._penalties.apply(logits, positions, seen, ops)

    def count(self, tokens: Tensor, positions: np.ndarray, seen: Seen) -> None:
        """The rows' sampled tokens [R] join what was seen."""
        if self._penalties is not None:
            self._penalties.count(tokens, positions, seen)

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

    def _flat(self, ids: list[tuple[int, ...]]) -> Tensor | None:
        """Token ids of each row as indices into the flattened logits; None if there are none."""
        flat = [row * self._stride + token for row, tokens in enumerate(ids) for token in tokens]
        return self._index(flat) if flat else None

    def _index(self, values: list[int]) -> Tensor:
        return send_list(values, torch.int64, self._device)

    def _floats(self, values: list[float]) -> Tensor:
        return send_list(values, torch.float32, self._device)
