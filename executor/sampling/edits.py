"""Edits of logits before sampling: grammar masks, allowed and banned tokens, logit bias, and penalties.

Edits that do not depend on the position become index tensors once, when the rows of the batch change; a step then is a
few scatters. Penalties change only the logits of tokens that a request has seen.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.executor.kernels import IN_PROMPT, SamplingOps
from penstock.executor.protocol import Admission, Sampling, is_penalized
from penstock.executor.staging import send, send_list


def is_edited(sampling: Sampling) -> bool:
    lists = sampling.allowed_ids or sampling.banned_ids or sampling.logit_bias
    return bool(lists) or sampling.min_tokens > 0 or is_penalized(sampling)


def is_plain(sampling: Sampling) -> bool:
    """Tell whether `SamplingOps.choose` suffices: no edits and no log-probabilities."""
    return sampling.logprobs is None and not is_edited(sampling)


class RowMasks(NamedTuple):
    """Grammar masks of some rows. rows: indices into the logits; masks: [n, words] int32 on the host, a bit a token."""

    rows: list[int]
    masks: np.ndarray

    def apply(self, logits: Tensor, ops: SamplingOps) -> None:
        """Set the logits [S, V] of tokens that a row may not sample to minus infinity, in place."""
        if self.rows:
            ops.mask(logits, send_list(self.rows, torch.int64, logits.device), send(self.masks, logits.device))


class TokenCounts:
    """How often the tokens of requests with penalties occurred, by slot. Takes no memory until there is such a request;
    the plan of a GPU's memory leaves room for the counts (`RankBuilder._warm_up`)."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._num_slots = num_slots
        self.counts = torch.empty((0, vocab_size), dtype=torch.int32, device=device)  # [slots, vocabulary] later

    def allocate(self) -> None:
        """Allocate the counts of all slots, unless they exist. A slot's counts are written when a request takes it, so on
        a CPU only slots with penalties take memory."""
        if not len(self.counts):
            self.counts = self.counts.new_empty((self._num_slots, self.counts.shape[1]))

    def admit(self, slot: int, tokens: np.ndarray, num_prompt: int) -> None:
        """Replace the slot's request. tokens [n]: the prompt, then the tokens sampled before a preemption."""
        self.allocate()
        ids = send(tokens.astype(np.int32), self.counts.device)
        counts, sampled = self.counts[slot], ids[num_prompt:]
        counts.zero_()
        counts.index_add_(0, sampled, torch.ones_like(sampled))
        counts[ids[:num_prompt].long()] |= IN_PROMPT

    def extend(self, slot: int, tokens: tuple[int, ...]) -> None:
        """Add tokens that count like sampled ones."""
        ids = send_list(tokens, torch.int32, self.counts.device)
        self.counts[slot].index_add_(0, ids, torch.ones_like(ids))

    def add(self, slots: Tensor, tokens: Tensor) -> None:
        """Add token i to the request in slots[i]; both are [n]."""
        self.counts.index_put_((slots, tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True)


class Edits:
    """The edits of some rows, for logits whose rows are `stride` apart."""

    def __init__(self, requests: list[Admission], stride: int, device: torch.device) -> None:
        self._requests, self._stride, self._device = requests, stride, device
        samplings = [request.sampling for request in requests]
        self._allowed_rows = self._index([row for row, s in enumerate(samplings) if s.allowed_ids])
        self._allowed = self._flat([s.allowed_ids for s in samplings])
        self._banned = self._flat([s.banned_ids for s in samplings])
        self._biased = self._flat([tuple(i for i, _ in s.logit_bias) for s in samplings])
        self._biases = send_list([bias for s in samplings for _, bias in s.logit_bias], torch.float32, device)
        self._too_short: tuple[int, ...] = ()
        self._stops: Tensor | None = None
        self._penalized = [row for row, sampling in enumerate(samplings) if is_penalized(sampling)]
        if self._penalized:
            chosen = [samplings[row] for row in self._penalized]
            penalties = [(s.repetition_penalty, s.frequency_penalty, s.presence_penalty) for s in chosen]
            self._penalized_rows = send_list(self._penalized, torch.int64, device)  # [P]
            self._slots = send_list([requests[row].slot for row in self._penalized], torch.int64, device)  # [P]
            self._coefficients = send_list(penalties, torch.float32, device)  # [P, 3]

    def apply(self, logits: Tensor, positions: np.ndarray, seen: TokenCounts, ops: SamplingOps) -> None:
        """Edit logits [R, stride] in place; only the vocabulary's columns matter. positions [R]: the number of tokens
        that each request has."""
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
        if self._penalized:
            ops.penalize(logits, self._penalized_rows, self._slots, seen.counts, self._coefficients)

    def count(self, tokens: Tensor, seen: TokenCounts) -> None:
        """Add the rows' sampled tokens [R] to `seen`."""
        if self._penalized:
            seen.add(self._slots, tokens[self._penalized_rows])

    def _stop_ids(self, positions: np.ndarray) -> Tensor | None:
        """Return stop tokens of rows that have not sampled min_tokens yet; they change at most once per row."""
        ends = enumerate(zip(positions.tolist(), self._requests, strict=True))
        too_short = tuple(row for row, (end, r) in ends if end - r.num_prompt < r.sampling.min_tokens)
        if too_short != self._too_short:
            stops = [r.sampling.stop_ids if row in too_short else () for row, r in enumerate(self._requests)]
            self._too_short, self._stops = too_short, self._flat(stops)
        return self._stops

    def _flat(self, ids: list[tuple[int, ...]]) -> Tensor | None:
        """Return the token ids of each row as indices into the flattened logits; None if there are none."""
        return self._index([row * self._stride + token for row, tokens in enumerate(ids) for token in tokens])

    def _index(self, values: list[int]) -> Tensor | None:
        return send_list(values, torch.int64, self._device) if values else None
