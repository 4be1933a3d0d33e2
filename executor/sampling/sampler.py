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
from penstock.executor.protocol import NOTHING_LEFT, Admission, Sampling, TokenLogprobs, is_penalized
from penstock.executor.sampling.draw import BLOCK, draw, filter_weights, uniforms
from penstock.executor.sampling.edits import Edits, RowMasks, TokenCounts, is_edited
from penstock.executor.staging import send, send_list

# Weights are processed in parts of this size, which stay in the CPU's cache.
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
    step brings its requests' options, and on a GPU those of the draw lie on the device (`Samples.options`)."""

    def __init__(
        self, vocab_size: int, max_num_seqs: int, device: torch.device, ops: SamplingOps | None = None
    ) -> None:
        """With `ops`, a kernel draws rows with all filters at once, instead of filter by filter."""
        self.ops, self._vocab_size, self._device = ops, vocab_size, device
        self._seen = TokenCounts(max_num_seqs, vocab_size, device)
        self._stride = -(-vocab_size // BLOCK) * BLOCK
        self._part_rows = max(1, min(max_num_seqs, WORK_BYTES[device.type] // (4 * self._stride)))
        # Columns beyond the vocabulary stay zero forever, so they are never drawn.
        self._weights = torch.zeros(self._part_rows, self._stride, device=device)
        self._scratch = torch.empty_like(self._weights) if ops is None else self._weights[:0]
        self._plan: _Plan | None = None

    def admit(self, request: Admission, tokens: np.ndarray) -> None:
        """Count the tokens of a request in its slot. tokens [n] int32: those of the admission."""
        if is_penalized(request.sampling):
            self._seen.admit(request.slot, tokens, request.num_prompt)

    def allocate_counts(self) -> None:
        """Allocate now what the first request with penalties would allocate, so that it can be measured."""
        self._seen.allocate()

    def extend(self, request: Admission, tokens: tuple[int, ...]) -> None:
        """Count tokens of the request that were not sampled."""
        if is_penalized(request.sampling):
            self._seen.extend(request.slot, tokens)

    def start(
        self,
        logits: Tensor,
        requests: list[Admission],
        positions: np.ndarray,
        masks: RowMasks | None = None,
        options: Sequence[Tensor] | None = None,
    ) -> SampledTokens:
        """Sample from logits [S, V], which are unchanged afterwards except by `masks`. positions[i], int64: the index
        of row i's new token in its request. options [S] each: the arguments of `SamplingOps.choose`, with a kernel."""
        if self._plan is None or self._plan.requests != requests:
            # The same requests decode for many steps, so everything that depends only on their options is cached.
            self._plan = self._make_plan(requests)
        plan = self._plan
        raw = logits
        if masks is not None:
            raw = logits.clone() if plan.logprobs else logits
            masks.apply(logits, self.ops)
        if self.ops is not None:
            assert options is not None
            temperature, *others = options
            for part in plan.parts:  # of these rows only the largest logit is needed here
                temperature = temperature.index_fill(0, part.index, 0.0)
            tokens, largest = self.ops.choose(logits, temperature, *others)
        elif plan.has_plain:
            largest, tokens = _top(logits)
        else:  # several times faster without the index
            largest, tokens = logits.amax(-1), torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        largest = largest.float()
        edited = largest.clone() if plan.parts else largest
        for part in plan.parts:
            chosen = self._sample_part(part, logits, largest, edited, positions[part.rows], options)
            tokens.index_copy_(0, part.index, chosen)
        bounds = torch.stack([largest, edited]) if plan.parts else largest.expand(2, -1)
        tokens = _zero_failed(tokens, bounds)
        for part in plan.parts:
            if part.edits is not None:
                part.edits.count(tokens[part.index], self._seen)
        logprobs = [(rows, token_logprobs(raw[index], tokens[index], num)) for num, rows, index in plan.logprobs]
        return SampledTokens(tokens, bounds, logprobs)

    def _sample_part(
        self,
        part: "_Part",
        logits: Tensor,
        largest: Tensor,
        edited: Tensor,
        positions: np.ndarray,
        options: Sequence[Tensor] | None,
    ) -> Tensor:
        """Return the tokens [R] of the part's rows; store their largest logits after edits in `edited` [S]."""
        weights = self._weights[: len(part.rows)]
        values = weights[:, : self._vocab_size]
        rows = logits[part.rows[0] : part.rows[-1] + 1] if part.is_range else logits[part.index]
        if part.edits is None:
            top = largest[part.index]
        else:
            values.copy_(rows)
            part.edits.apply(weights, positions, self._seen, self.ops)
            if self.ops is not None and options is not None:
                tokens, top = self.ops.choose(values, *(option.index_select(0, part.index) for option in options))
                edited.index_copy_(0, part.index, top)
                return tokens
            if part.draw is None:
                top, tokens = _top(values)
                edited.index_copy_(0, part.index, top)
                return tokens
            top = values.amax(-1)
            edited.index_copy_(0, part.index, top)
            rows = values
        assert part.draw is not None
        torch.sub(rows, top[:, None], out=values)
        if part.draw.temperature is not None:
            values.div_(part.draw.temperature)
        values.exp_()
        filter_weights(weights, self._scratch[: len(weights)], *part.draw.filters, part.draw.max_top_k)
        return draw(weights, send(uniforms(part.draw.seeds, positions)[:, None], self._device))

    def _make_plan(self, requests: list[Admission]) -> "_Plan":
        samplings = [request.sampling for request in requests]
        drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
        edited = [row for row, sampling in enumerate(samplings) if is_edited(sampling)]
        greedy = [row for row in edited if samplings[row].temperature == 0]
        parts = [
            self._make_part(rows[first : first + self._part_rows], requests)
            for rows in ((drawn, greedy) if self.ops is None else (edited,))
            for first in range(0, len(rows), self._part_rows)
        ]
        logprobs = []
        for num in {s.logprobs for s in samplings if s.logprobs is not None}:
            rows = [row for row, sampling in enumerate(samplings) if sampling.logprobs == num]
            for first in range(0, len(rows), self._part_rows):
                part = rows[first : first + self._part_rows]
                logprobs.append((num, part, self._tensor(part, torch.int64)))
        return _Plan(requests, parts, len(drawn) + len(greedy) < len(requests), logprobs)

    def _make_part(self, rows: list[int], requests: list[Admission]) -> "_Part":
        own = [requests[row] for row in rows]
        samplings = [request.sampling for request in own]
        has_draw = self.ops is None and samplings[0].temperature > 0
        return _Part(
            rows=np.array(rows),
            index=self._tensor(rows, torch.int64),
            is_range=rows[-1] - rows[0] + 1 == len(rows),
            edits=Edits(own, self._stride, self._device) if any(map(is_edited, samplings)) else None,
            draw=self._make_draw(samplings) if has_draw else None,
        )

    def _make_draw(self, samplings: list[Sampling]) -> "_Draw":
        def column(values: Sequence[float], neutral: float, dtype: torch.dtype = torch.float32) -> Tensor | None:
            """Return the values as [R, 1], or None if every row has the neutral value."""
            return None if all(v == neutral for v in values) else self._tensor(values, dtype)[:, None]

        top_ks = [min(s.top_k, self._stride) or self._stride for s in samplings]
        return _Draw(
            seeds=np.array([s.seed for s in samplings], dtype=np.uint64),
            temperature=column([s.temperature for s in samplings], 1.0),
            filters=(
                column([s.min_p for s in samplings], 0.0),
                column(top_ks, self._stride, torch.int64),
                column([s.top_p for s in samplings], 1.0, torch.float64),
            ),
            max_top_k=max((k for k in top_ks if k < self._stride), default=0),
        )

    def _tensor(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return send_list(values, dtype, self._device)


@dataclass(frozen=True)
class _Part:
    """Rows of a batch that are processed together: all greedy with edits or all drawn; with a kernel, all edited."""

    rows: np.ndarray  # [R] rows of the batch, ascending
    index: Tensor  # the same, on the device
    is_range: bool
    edits: Edits | None
    draw: "_Draw | None"  # None: greedy, or drawn by the kernel


@dataclass(frozen=True)
class _Draw:
    """The options with which R rows are drawn on a CPU."""

    seeds: np.ndarray  # [R] uint64
    temperature: Tensor | None  # [R, 1]
    filters: tuple[Tensor | None, Tensor | None, Tensor | None]  # min_p, top_k and top_p, [R, 1] each
    max_top_k: int


@dataclass(frozen=True)
class _Plan:
    """Everything that depends only on the options of these requests."""

    requests: list[Admission]
    parts: list[_Part]
    has_plain: bool  # some rows are in no part: their token is the largest logit
    logprobs: list[tuple[int, list[int], Tensor]]  # number of log-probabilities, and the rows


def _top(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's largest logit and its index. On a CPU numpy is ten times as fast as torch at this."""
    numbers = logits.float().numpy()
    places = numbers.argmax(-1)
    return torch.from_numpy(numbers[np.arange(len(places)), places]), torch.from_numpy(places)


def _zero_failed(tokens: Tensor, bounds: Tensor) -> Tensor:
    """Replace the tokens of rows with a non-finite bound by 0. On a CPU numpy's check takes a tenth of torch's time."""
    if tokens.device.type != "cpu":
        return torch.where(torch.isfinite(bounds).all(0), tokens, 0)
    finite = np.isfinite(bounds.numpy()).all(0)
    return tokens if finite.all() else tokens * torch.from_numpy(finite)


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
