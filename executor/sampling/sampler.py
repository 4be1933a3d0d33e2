"""Samples one token per row of logits, with each request's sampling parameters.

`start` only launches work and never synchronizes with the device; `SampledTokens.post` and `wait` fetch the results. A
draw depends on the request's seed and the token's position, never on the batch.

The order is that of vLLM: raw log-probabilities; grammar mask; allowed, banned and (before min_tokens) stop tokens;
logit bias; repetition, frequency and presence penalties; then the largest logit, or temperature, min-p, top-k, top-p
and a draw. Greedy rows without edits cost one pass over the logits and no copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.executor.kernels import SamplingOps
from penstock.executor.outbox import HostCopy, Outbox
from penstock.executor.protocol import NOTHING_LEFT, Admission, TokenLogprobs, is_penalized
from penstock.executor.sampling.draw import BLOCK, CpuSampling
from penstock.executor.sampling.edits import Edits, RowMasks, TokenCounts, is_edited
from penstock.executor.staging import send_list

# Rows are edited in parts of this size, which stay in the CPU's cache.
WORK_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
NOT_FINITE = "the model's logits are not finite (NaN or infinity)"

LogprobTensors = tuple[Tensor, Tensor, Tensor]  # ids and values [n, 1 + num], the chosen token first; ranks [n]


@dataclass
class SampledTokens:
    """The sampling results of one step. Rows that failed hold token 0."""

    tokens: Tensor  # [S] int64, on the device
    _largest: Tensor  # [2, S] float32: each row's largest logit before and after edits; failed if not finite
    _logprobs: list[tuple[list[int], LogprobTensors]]
    _host_copy: HostCopy | None = None

    def post(self, outbox: Outbox) -> None:
        """Start copying all results to the host."""
        pending = [tensor for _, logprobs in self._logprobs for tensor in logprobs]
        self._host_copy = outbox.send([self.tokens, self._largest, *pending])

    def wait(self) -> tuple[list[int], dict[int, TokenLogprobs], dict[int, str]]:
        """Wait for the copies; return the tokens, and log-probabilities and failures by row."""
        assert self._host_copy is not None, "waited for before it was posted"
        tokens, largest, *pending = self._host_copy.wait()
        errors: dict[int, str] = {}
        finite = np.isfinite(largest.numpy())
        if not finite.all():
            for row in np.flatnonzero(~finite.all(0)).tolist():
                empty = finite[0, row] and largest[1, row] == -torch.inf
                errors[row] = NOTHING_LEFT if empty else NOT_FINITE
        logprobs: dict[int, TokenLogprobs] = {}
        for index, (rows, _) in enumerate(self._logprobs):
            values = read_logprobs(*pending[3 * index : 3 * index + 3])
            logprobs |= {r: value for r, value in zip(rows, values, strict=True) if r not in errors}
        return tokens.tolist(), logprobs, errors


class Sampler:
    """Samples for steps one at a time, in order. Of the requests it keeps only the token counts that penalties need: a
    step brings its requests' options, those of the draw as tensors on the device (`Samples.options`)."""

    def __init__(
        self, vocab_size: int, max_num_seqs: int, device: torch.device, ops: SamplingOps | None = None
    ) -> None:
        """Without `ops`, a CPU samples."""
        self._vocab_size, self._device = vocab_size, device
        self.seen = TokenCounts(max_num_seqs, vocab_size, device)
        stride = -(-vocab_size // BLOCK) * BLOCK
        part_rows = max(1, min(max_num_seqs, WORK_BYTES[device.type] // (4 * stride)))
        self._edited = torch.zeros(part_rows, stride, device=device)
        self.ops: SamplingOps = ops or CpuSampling(vocab_size, part_rows)
        self._plan: _Plan | None = None

    def admit(self, request: Admission, tokens: np.ndarray) -> None:
        """Count the tokens of a request in its slot. tokens [n] int32: those of the admission."""
        if is_penalized(request.sampling):
            self.seen.admit(request.slot, tokens, request.num_prompt)

    def extend(self, request: Admission, tokens: tuple[int, ...]) -> None:
        """Count tokens of the request that were not sampled."""
        if is_penalized(request.sampling):
            self.seen.extend(request.slot, tokens)

    def start(
        self,
        logits: Tensor,
        requests: list[Admission],
        positions: np.ndarray,
        masks: RowMasks | None,
        options: Sequence[Tensor],
    ) -> SampledTokens:
        """Sample from logits [S, V], which are unchanged afterwards except by `masks`. positions[i], int64: the index
        of row i's new token in its request. options [S] each: the arguments of `SamplingOps.choose`."""
        if self._plan is None or self._plan.requests != requests:
            # The same requests decode for many steps, so everything that depends only on their options is cached.
            self._plan = self._make_plan(requests)
        plan = self._plan
        raw = logits
        if masks is not None:
            raw = logits.clone() if plan.logprobs else logits
            masks.apply(logits, self.ops)
        temperature, *others = options
        for part in plan.parts:  # of these rows only the largest logit is needed here
            temperature = temperature.index_fill(0, part.index, 0.0)
        tokens, largest = self.ops.choose(logits, temperature, *others)
        edited = largest.clone() if plan.parts else largest
        for part in plan.parts:
            values = self._edited[: len(part.rows)]
            own = values[:, : self._vocab_size]
            own.copy_(logits[part.rows[0] : part.rows[-1] + 1] if part.is_range else logits[part.index])
            part.edits.apply(values, positions[part.rows], self.seen, self.ops)
            selected = options if len(part.rows) == len(logits) else [o.index_select(0, part.index) for o in options]
            chosen, top = self.ops.choose(own, *selected)
            edited.index_copy_(0, part.index, top)
            tokens.index_copy_(0, part.index, chosen)
        bounds = largest.expand(2, -1)
        if plan.parts:
            bounds, tokens = torch.stack([largest, edited]), torch.where(torch.isfinite(largest), tokens, 0)
        for part in plan.parts:
            part.edits.count(tokens[part.index], self.seen)
        logprobs = [(rows, token_logprobs(raw[index], tokens[index], num)) for num, rows, index in plan.logprobs]
        return SampledTokens(tokens, bounds, logprobs)

    def _make_plan(self, requests: list[Admission]) -> "_Plan":
        samplings, part_rows = [request.sampling for request in requests], len(self._edited)

        def parts_of(rows: list[int]) -> list[tuple[list[int], Tensor]]:
            parts = [rows[first : first + part_rows] for first in range(0, len(rows), part_rows)]
            return [(part, send_list(part, torch.int64, self._device)) for part in parts]

        parts = [
            _Part(
                np.array(rows),
                index,
                is_range=rows[-1] - rows[0] + 1 == len(rows),
                edits=Edits([requests[row] for row in rows], self._edited.shape[1], self._device),
            )
            for rows, index in parts_of([row for row, sampling in enumerate(samplings) if is_edited(sampling)])
        ]
        logprobs = [
            (num, *part)
            for num in {s.logprobs for s in samplings if s.logprobs is not None}
            for part in parts_of([row for row, sampling in enumerate(samplings) if sampling.logprobs == num])
        ]
        return _Plan(requests, parts, logprobs)


@dataclass(frozen=True)
class _Part:
    """Rows of a batch that are edited together."""

    rows: np.ndarray  # [R] rows of the batch, ascending
    index: Tensor  # the same, on the device
    is_range: bool
    edits: Edits


@dataclass(frozen=True)
class _Plan:
    """Everything that depends only on the options of these requests."""

    requests: list[Admission]
    parts: list[_Part]
    logprobs: list[tuple[int, list[int], Tensor]]  # number of log-probabilities, and the rows


def token_logprobs(logits: Tensor, chosen: Tensor, num: int) -> LogprobTensors:
    """Return the log-probabilities of the chosen tokens [n] int64 and the `num` most likely ones (-1: all) of [n, V].

    The rank is one plus the number of strictly more likely tokens: all tokens that tie for the first place, which is
    common with bfloat16 logits, have rank 1.
    """
    logits, chosen = logits.float(), chosen[:, None]
    whole = logits
    if logits.is_cuda and logits.shape[1] % 8:  # torch's order of summation depends on the row's alignment
        whole = F.pad(logits, (0, -logits.shape[1] % 8), value=-torch.inf)
    values = whole.log_softmax(-1)
    ranks = (logits > logits.gather(1, chosen)).sum(-1) + 1
    if num < 0:
        ids = torch.argsort(logits, dim=-1, descending=True, stable=True)
    else:
        ids = logits.topk(min(num, logits.shape[1]), -1).indices
    ids = torch.cat([chosen, ids], 1)
    return ids, values.gather(1, ids), ranks


def read_logprobs(ids: Tensor, values: Tensor, ranks: Tensor) -> list[TokenLogprobs]:
    """Convert log-probability tensors that are on the host."""
    rows = zip(ids.tolist(), values.tolist(), ranks.tolist(), strict=True)
    return [TokenLogprobs(tuple(ids), tuple(values), rank) for ids, values, rank in rows]


def prompt_logprobs(logits: Tensor, chosen: Tensor, num: int) -> list[TokenLogprobs]:
    """Return log-probabilities of prompt tokens `chosen` [n] from logits [n, V]; raise ValueError if not finite."""
    if not torch.isfinite(logits.amax(-1)).all():
        raise ValueError("prompt_logprobs: the model's logits are not finite")
    return read_logprobs(*token_logprobs(logits, chosen.long(), num))
