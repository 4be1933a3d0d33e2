"""Repetition, frequency and presence penalties, at a cost that grows with the request and not with the vocabulary.

Only tokens that a request has seen are touched: its history lists them, with repeats. A repeated token is
computed and stored twice, with the same result, so nothing has to be made unique and no device is waited for.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.executor.kernels import SamplingOps
from penstock.executor.protocol import Sampling, is_penalized
from penstock.executor.staging import send, send_list

_IN_PROMPT = 1 << 30  # beside the number of times a token was sampled
_MIN_HISTORY = 1024


class Seen:
    """The tokens of the requests with penalties, by slot."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        # calloc'ed: on a CPU only slots with penalties ever take memory.
        self.counts = torch.from_numpy(np.zeros((num_slots, vocab_size), dtype=np.int32)).to(device)
        self.history = self.counts.new_zeros(num_slots, 0)  # [slots, longest request so far]

    def admit(self, slot: int, tokens: np.ndarray, num_prompt: int) -> None:
        """Forget the slot's last request. tokens [n]: the prompt, then what was sampled before a preemption."""
        ids = send(tokens.astype(np.int32), self.counts.device)
        self.reserve(len(tokens))
        self.history[slot, : len(ids)] = ids
        counts, sampled = self.counts[slot], ids[num_prompt:]
        counts.zero_()
        counts.index_add_(0, sampled, torch.ones_like(sampled))
        counts[ids[:num_prompt].long()] |= _IN_PROMPT

    def reserve(self, length: int) -> None:
        """Make room for requests of `length` tokens."""
        num_slots, width = self.history.shape
        if length > width:
            wider = self.history.new_zeros(num_slots, max(length, 2 * width, _MIN_HISTORY))
            wider[:, :width] = self.history
            self.history = wider

    def extend(self, slot: int, position: int, tokens: tuple[int, ...]) -> None:
        """Tokens at `position` and behind it that count like sampled ones."""
        self.reserve(position + len(tokens))
        ids = send_list(tokens, torch.int32, self.counts.device)
        self.history[slot, position : position + len(ids)] = ids
        self.counts[slot].index_add_(0, ids, torch.ones_like(ids))

    def add(self, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Token i is now at positions[i] of the request in slots[i]; [n] each."""
        self.history[slots, positions] = tokens.to(torch.int32)
        self.counts.index_put_((slots, tokens), torch.ones_like(tokens, dtype=torch.int32), accumulate=True)


@dataclass(frozen=True)
class Penalties:
    """Those rows of some logits that have a penalty."""

    on_host: list[int]  # the rows
    rows: Tensor  # [P]
    slots: Tensor  # [P]
    coefficients: Tensor  # [P, 3]: repetition, frequency, presence

    @classmethod
    def of(cls, slots: list[int], samplings: list[Sampling], device: torch.device) -> "Penalties | None":
        rows = [row for row, sampling in enumerate(samplings) if is_penalized(sampling)]
        if not rows:
            return None
        chosen = [samplings[row] for row in rows]
        coefficients = [(s.repetition_penalty, s.frequency_penalty, s.presence_penalty) for s in chosen]
        return cls(
            rows,
            send_list(rows, torch.int64, device),
            send_list([slots[row] for row in rows], torch.int64, device),
            send_list(coefficients, torch.float32, device),
        )

    def apply(self, logits: Tensor, positions: np.ndarray, seen: Seen, ops: SamplingOps | None) -> None:
        """Penalize rows of logits [R, stride] in place; row i has positions[i] tokens so far."""
        if ops is not None:
            ops.penalize(logits, self.rows, self.slots, seen.counts, _IN_PROMPT, self.coefficients)
            return
        lengths = self._lengths(positions, logits.device)
        longest = int(positions[self.on_host].max())  # rows without a penalty may be longer than any history
        ids = seen.history[self.slots, :longest].long()  # [P, longest]
        # Beyond a request's end its first token stands in: repeated once more.
        inside = torch.arange(longest, device=ids.device) < lengths[:, None]
        ids = torch.where(inside, ids, ids[:, :1])
        counts = seen.counts[self.slots[:, None], ids]
        sampled = (counts & (_IN_PROMPT - 1)).float()
        values = logits[self.rows[:, None], ids]
        repetition, frequency, presence = self.coefficients[..., None].unbind(1)  # [P, 1] each
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= frequency * sampled
        values -= presence * sampled.clamp(max=1)
        logits[self.rows[:, None], ids] = values

    def count(self, tokens: Tensor, positions: np.ndarray, seen: Seen) -> None:
        """The rows' sampled tokens [R] join what was seen."""
        seen.reserve(int(positions[self.on_host].max()) + 1)
        seen.add(self.slots, self._lengths(positions, tokens.device), tokens[self.rows])

    def _lengths(self, positions: np.ndarray, device: torch.device) -> Tensor:
        return send(positions, device)[self.rows]
