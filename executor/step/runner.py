"""Turns a `Step` into tensors, runs the model and the sampler, and returns a `StepResult`.

It works in two halves, so that a device can compute one step while the host builds the next: `launch` does not need
any result of an earlier step on the host; `finish` waits for the results. `Pooler` makes the embeddings of prompts.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
import numpy as np
import torch

from penstock.executor.batch import ForwardBatch, KvPages
from penstock.executor.models.adapters import AdapterStore
from penstock.executor.models.decoder import Decoder
from penstock.executor.outbox import HostCopy, Outbox
from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import Admission, Row, Step, StepResult
from penstock.executor.sampling.edits import RowMasks, is_plain
from penstock.executor.sampling.sampler import SampledTokens, Sampler, prompt_logprobs
from penstock.executor.staging import send
from penstock.executor.step.drafting import DraftModel, last_right_rows
from penstock.executor.step.graphs import StepGraphs
from penstock.executor.step.inputs import Inputs, PaddedSize, Samples
from penstock.executor.step.layout import Layout
from penstock.executor.step.memory import naming_options
from penstock.executor.step.rebalance import Rebalancer
from penstock.executor.tiers.transfers import RankTransfers

STEP_OPTIONS = "lower gpu_memory_utilization, kv_cache_bytes, max_num_batched_tokens or max_num_seqs"
PROMPT_LOGPROB_ROWS = 128  # prompt positions per chunk of logits: those of a whole prompt would fill the memory


class Pooler:
    def __init__(self) -> None:
        self._sums: dict[int, tuple[torch.Tensor, int]] = {}  # slot → (sum so far [hidden], number of positions)

    def admit(self, admission: Admission) -> None:
        self._sums.pop(admission.slot, None)

    def mean(self, admission: Admission, hidden: torch.Tensor, end: int) -> bytes | None:
        """Add a chunk's hidden states [count, hidden]; return the embedding once the prompt is complete, else None.

        Raises ValueError if it is not finite, or if positions were skipped: a cached prefix has no hidden states.
        """
        # float64 makes the embedding independent of chunk boundaries.
        total, count = self._sums.pop(admission.slot, (torch.zeros((), dtype=torch.float64), 0))
        total, count = total.to(hidden.device) + hidden.sum(0, dtype=torch.float64), count + len(hidden)
        if end < admission.num_prompt:
            self._sums[admission.slot] = (total, count)
            return None
        if count != admission.num_prompt:
            raise ValueError(f"mean pooling saw {count} of {admission.num_prompt} positions; it cannot use cached ones")
        return embedding_bytes(total / count)


def embedding_bytes(embedding: torch.Tensor) -> bytes:
    """Return an embedding [hidden] for a step's result; raise ValueError if not finite."""
    embedding = embedding.float().cpu()
    if not torch.isfinite(embedding).all():
        raise ValueError("the model's hidden states are not finite (NaN or infinity)")
    return embedding.numpy().astype(np.dtype("<f4")).tobytes()


@dataclass(slots=True)
class LaunchedStep:
    """A step in flight. Row indices are the step's."""

    step: Step
    started_s: float
    result: StepResult  # as far as it is known
    is_masked: bool  # some rows wait for the masks of `set_masks`
    sampled: SampledTokens | None = None
    sampled_rows: list[int] = field(default_factory=list)
    unsampled: tuple[Layout, Samples, torch.Tensor] | None = None  # a step whose logits [S, vocabulary] wait for masks
    draft: Callable[[], None] = lambda: None  # runs the draft layer, if any, once the step's tokens are sampled
    drafted: tuple[list[int], HostCopy] | None = None  # rows that asked for drafts, and these


class ModelRunner:
    def __init__(
        self,
        model: Decoder,
        pages: KvPages,
        sampler: Sampler | None,  # the group's first rank samples for all
        inputs: Inputs,
        device: torch.device,
        group: RankGroup,
        transfers: RankTransfers | None = None,
        rebalancer: Rebalancer | None = None,
        graphs: StepGraphs | None = None,
        adapters: AdapterStore | None = None,
        drafts: DraftModel | None = None,
    ) -> None:
        self._model, self._pages, self._sampler, self._device = model, pages, sampler, device
        self._inputs = inputs
        self._group, self._transfers, self._rebalancer = group, transfers, rebalancer
        self.graphs, self._adapters, self._drafts = graphs, adapters, drafts
        # Adapter numbers of the store, by slot.
        self._adapter_of = None if adapters is None else np.zeros(inputs.num_slots, dtype=np.int64)
        self._pooler, self._outbox = Pooler(), Outbox(device)
        self._admissions: dict[int, Admission] = {}  # by slot
        self._asks_more = np.zeros(inputs.num_slots, dtype=bool)  # prompt log-probabilities or an embedding …
        self._asks_all = np.zeros(inputs.num_slots, dtype=bool)  # … that need every token's hidden state
        self._is_plain = np.ones(inputs.num_slots, dtype=bool)  # only needs a draw; every rank must know, one samples
        self._finished_s = 0.0  # when the last step did

    @property
    def draft_tokens(self) -> int:
        """The most drafts that a row may ask for."""
        return 0 if self._drafts is None else self._drafts.most

    def close(self) -> None:
        """Release the pages after the last step; clearing the list also releases those who share it."""
        self._pages.clear()

    def allocate_counts(self) -> None:
        """Allocate now what the first request with penalties would allocate, so that it can be measured."""
        if self._sampler is not None:
            self._sampler.seen.allocate()

    @naming_options("a step", STEP_OPTIONS)
    @torch.inference_mode()
    def launch(self, step: Step) -> LaunchedStep:
        result = StepResult(step.step_id, [-1] * len(step.rows), {}, {}, {}, {}, {})
        launched = LaunchedStep(step, time.monotonic(), result, any(row.masked for row in step.rows))
        if self._transfers is not None:
            self._transfers.begin(step.transfers, written_blocks(step.rows, self._inputs.block_size))
        for admission in step.admissions:
            self._admit(admission)
        if step.rows:
            if self._rebalancer is not None:
                self._rebalancer.boundary(sum(row.count for row in step.rows))
            self._inputs.take(step.rows)
            if self._drafts is not None:
                self._drafts.clear(step.rows)
            if self._sampler is not None:
                for row in step.rows:
                    if row.tokens:
                        self._sampler.extend(self._admissions[row.slot], row.tokens)
            self._compute(Layout(step.rows, self._adapter_of), launched)
        else:
            self._inputs.flush()
        return launched

    @naming_options("a step", STEP_OPTIONS)
    @torch.inference_mode()
    def sample_masked(self, launched: LaunchedStep, rows: np.ndarray, masks: np.ndarray) -> None:
        """Run the second half of `launch` for masked rows. rows [n] and masks [n, words] are those of `set_masks`."""
        if self._sampler is None:  # this rank gets the tokens from the first one
            return
        assert launched.unsampled is not None, "the step needs no masks, or already has them"
        (layout, ends, logits), launched.unsampled = launched.unsampled, None
        place = {row: place for place, row in enumerate(layout.order[layout.samples].tolist())}
        self._choose(layout, ends, logits, launched, RowMasks([place[row] for row in rows.tolist()], masks))

    def finish(self, launched: LaunchedStep) -> StepResult:
        assert launched.unsampled is None, "a step is collected before its masks have arrived"
        result, rows = launched.result, launched.sampled_rows
        if launched.sampled is not None:
            sampled, found, failed = launched.sampled.wait()
            for row, token in zip(rows, sampled, strict=True):
                result.tokens[row] = token
            result.logprobs.update({rows[index]: value for index, value in found.items()})
            result.errors.update({rows[index]: text for index, text in failed.items()})
        if launched.drafted is not None:
            asking, host_copy = launched.drafted
            (drafts,) = host_copy.wait()
            for row, tokens in zip(asking, drafts.tolist(), strict=True):
                result.drafts[row] = tokens[: launched.step.rows[row].drafts]
        for row in result.errors:
            result.tokens[row] = -1
        # A step that was launched while another ran begins when that one ends.
        begun_s, self._finished_s = max(launched.started_s, self._finished_s), time.monotonic()
        return msgspec.structs.replace(
            result,
            elapsed_s=self._finished_s - begun_s,
            transfers=None if self._transfers is None else self._transfers.end(),
            experts=None if self._rebalancer is None else self._rebalancer.take_update(),
        )

    def _admit(self, admission: Admission) -> None:
        slot, sampling = admission.slot, admission.sampling
        tokens = np.frombuffer(admission.tokens, dtype="<i4").astype(np.int32)
        assert 0 < admission.num_prompt <= len(tokens) < self._inputs.width
        self._admissions[slot] = admission
        if self._adapters is None or self._adapter_of is None:
            assert admission.adapter is None, "adapters are refused before they come here"
        else:
            self._adapter_of[slot] = self._adapters.number(admission.adapter)
        self._asks_all[slot] = admission.pooling == "mean" or sampling.prompt_logprobs is not None
        self._asks_more[slot] = self._asks_all[slot] or admission.pooling is not None
        self._is_plain[slot] = is_plain(sampling)
        self._inputs.admit(slot, tokens, sampling)
        self._pooler.admit(admission)
        if self._sampler is not None:
            self._sampler.admit(admission, tokens)

    def _compute(self, layout: Layout, launched: LaunchedStep) -> None:
        asks = self._asks_more[layout.slots].any()
        # Without drafts to come, the layer only has to know prompts: where it stays idle for long, drafts are not worth it.
        has_prompts = layout.num_tokens > len(layout.slots)
        drafts = self._drafts if has_prompts or layout.drafts.any() else None
        adapter_numbers = None if self._adapter_of is None else self._adapter_of[layout.slots]
        adapter_numbers = None if adapter_numbers is None or not adapter_numbers.any() else adapter_numbers
        if self.graphs is not None and not asks and (size := self.graphs.size_for(layout)):
            self.graphs.forward(size, layout, adapter_numbers)
            if drafts is not None:
                launched.draft = partial(self._draft_by_graph, self.graphs, layout, launched)
            self._sample_by_graph(self.graphs, size, layout, launched)
            return
        last = layout.query_starts[1:] - 1
        output_indices = self._output_indices(layout) if asks else last[layout.samples]
        if drafts is not None:
            output_indices = np.arange(layout.num_tokens)
        batch, ends = self._inputs.prepare(layout, output_indices)
        if self._adapters is not None and adapter_numbers is not None:
            adapters, output_adapters = self._adapters.of_step(adapter_numbers, layout.query_starts, output_indices)
            batch = replace(batch, adapters=adapters, output_adapters=output_adapters)
        hidden = self._model.forward(batch, self._pages)  # [W, hidden]
        if drafts is not None:
            launched.draft = partial(self._draft, drafts, layout, batch, hidden, launched)
        if asks:
            for row in np.flatnonzero(self._asks_more[layout.slots]).tolist():
                first, end = np.searchsorted(output_indices, layout.query_starts[row : row + 2]).tolist()
                self._answer_more(layout, row, hidden[first:end], launched)
        if len(output_indices) > np.count_nonzero(layout.samples):
            hidden = hidden[send(np.searchsorted(output_indices, last[layout.samples]), self._device)]
        if layout.samples.any():
            self._sample(layout, ends, hidden, launched)
        else:
            launched.draft()

    def _draft(
        self, drafts: DraftModel, layout: Layout, batch: ForwardBatch, hidden: torch.Tensor, launched: LaunchedStep
    ) -> None:
        """Run the draft layer over a step's tokens, which have all been sampled, and draft where rows ask for it."""
        at = layout.slots[layout.row_of] * self._inputs.width + layout.positions + 1
        next_tokens = self._inputs.tokens.view(-1).index_select(0, send(at, self._device))
        rows, may_draft = np.flatnonzero(layout.drafts), None
        if layout.has_drafts:
            may_draft = last_right_rows(batch, send(layout.slots, self._device), next_tokens)
            if self._device.type == "cpu":  # a GPU does not wait to know which rows these are
                rows = rows[may_draft.numpy()[rows]]
        asked = layout.drafts[rows]
        on_device, counts = send(rows, self._device), send(asked, self._device)
        if may_draft is not None:
            counts = counts * may_draft.index_select(0, on_device)
        batch = replace(batch, adapters=None, output_adapters=None)
        tokens = drafts.draft(batch, hidden, next_tokens, on_device, counts, int(asked.max(initial=0)))
        self._post_drafts(layout, rows, tokens, launched)

    def _draft_by_graph(self, graphs: StepGraphs, layout: Layout, launched: LaunchedStep) -> None:
        self._outbox.hold()  # the graph overwrites the drafts of the last step
        tokens, rows = graphs.draft(len(layout.slots)), np.flatnonzero(layout.drafts)
        self._post_drafts(layout, rows, tokens.index_select(0, send(rows, self._device)), launched)

    def _post_drafts(self, layout: Layout, rows: np.ndarray, tokens: torch.Tensor, launched: LaunchedStep) -> None:
        """Send the drafts of these rows to the host, on the rank that reports the results."""
        if len(rows) and self._sampler is not None:
            launched.drafted = layout.order[rows].tolist(), self._outbox.send([tokens])

    def _sample_by_graph(self, graphs: StepGraphs, size: PaddedSize, layout: Layout, launched: LaunchedStep) -> None:
        """Sample after a graph's forward pass: by another graph if all rows of a decode step need only a draw."""
        if size.has_prompts or launched.is_masked or not self._is_plain[layout.slots].all():
            if layout.samples.any():
                self._sample(layout, *graphs.results(size, layout), launched)
            else:
                launched.draft()
            return
        self._outbox.hold()  # the graph overwrites the tokens of the last step
        tokens, largest = graphs.sample(len(layout.slots))
        if self._sampler is not None:  # the first rank reports the results
            launched.sampled = SampledTokens(tokens, largest.expand(2, -1), [])
            launched.sampled.post(self._outbox)
            launched.sampled_rows = layout.order.tolist()
        launched.draft()

    def _output_indices(self, layout: Layout) -> np.ndarray:
        """Return ascending indices of tokens whose hidden state is needed, if some rows ask for more than a sample."""
        need: np.ndarray = self._asks_all[layout.slots][layout.row_of]
        need[layout.query_starts[1:][layout.samples | self._asks_more[layout.slots]] - 1] = True
        return np.flatnonzero(need)

    def _answer_more(self, layout: Layout, row: int, hidden: torch.Tensor, launched: LaunchedStep) -> None:
        """Compute what one row asks for beside a sample: prompt log-probabilities or an embedding. hidden [n, hidden]:
        the row's states that the step needs."""
        slot = int(layout.slots[row])
        admission = self._admissions[slot]
        index, start, end = int(layout.order[row]), int(layout.starts[row]), int(layout.context_lens[row])
        num, num_prompt = admission.sampling.prompt_logprobs, admission.num_prompt
        if num is not None:
            followed = hidden[: max(0, min(end, num_prompt - 1) - start)]  # states followed by a token of the prompt
            self._find_prompt_logprobs(index, slot, start, followed, num, launched)
        if end >= num_prompt:  # from here on it only decodes, which graphs do
            self._asks_more[slot] = self._asks_all[slot] = False
        try:
            embedding = None
            if admission.pooling == "mean":
                embedding = self._pooler.mean(admission, hidden, end)
            elif admission.pooling == "last" and end == num_prompt:
                embedding = embedding_bytes(hidden[-1])
            if embedding is not None:
                launched.result.embeddings[index] = embedding
        except ValueError as error:
            launched.result.errors[index] = str(error)

    def _find_prompt_logprobs(
        self, index: int, slot: int, start: int, hidden: torch.Tensor, num: int, launched: LaunchedStep
    ) -> None:
        """Compute log-probabilities from the hidden [n, hidden] of positions start …, which predict the next tokens."""
        chosen = self._inputs.tokens[slot, start + 1 : start + 1 + len(hidden)].long()
        logprobs = launched.result.prompt_logprobs[index] = []
        for first in range(0, len(hidden), PROMPT_LOGPROB_ROWS):
            part = slice(first, first + PROMPT_LOGPROB_ROWS)
            logits = self._model.logits(hidden[part])
            if logits is not None:
                try:
                    logprobs += prompt_logprobs(logits, chosen[part], num)
                except ValueError as error:  # continue like the other ranks, which do not know of it
                    launched.result.errors.setdefault(index, str(error))

    def _sample(self, layout: Layout, ends: Samples, hidden: torch.Tensor, launched: LaunchedStep) -> None:
        """Sample from hidden [S, hidden] of the rows that sample, or wait for their masks."""
        logits = self._model.logits(hidden)
        if logits is not None and launched.is_masked:
            launched.unsampled = layout, ends, logits
        else:
            self._choose(layout, ends, logits, launched)

    def _choose(
        self,
        layout: Layout,
        ends: Samples,
        logits: torch.Tensor | None,
        launched: LaunchedStep,
        masks: RowMasks | None = None,
    ) -> None:
        """Sample from logits [S, vocabulary]; store the tokens for the next step and send them to the host."""
        slots, positions = layout.slots[layout.samples], layout.context_lens[layout.samples]
        if logits is None or self._sampler is None:
            tokens = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        else:
            if masks is None and self._is_plain[slots].all():
                drawn, largest = self._sampler.ops.choose(logits, *ends.options)
                launched.sampled = SampledTokens(drawn, largest.expand(2, -1), [])
            else:
                requests = [self._admissions[slot] for slot in slots.tolist()]
                launched.sampled = self._sampler.start(logits, requests, positions, masks, ends.options)
            launched.sampled.post(self._outbox)
            launched.sampled_rows = layout.order[layout.samples].tolist()
            tokens = launched.sampled.tokens
        self._inputs.put(ends.targets, self._group.broadcast(tokens))
        launched.draft()


def written_blocks(rows: list[Row], block_size: int) -> list[int]:
    """Return the new blocks that these rows or later rows of their requests write."""
    blocks: list[int] = []
    for row in rows:
        if row.blocks or row.groups:
            first = max(row.start, row.write_from) // block_size
            for begin, brought in ((row.first_block, row.blocks), *row.groups):
                blocks += brought[max(0, first - begin) :]
        blocks += row.states_out
    return blocks
