"""Turns a `Step` into tensors, runs the model and the sampler, and turns what comes out into a `StepResult`.

In two halves, so that a device can be busy with one step while the host builds the next: `launch` needs
nothing that an earlier step has still to bring to the host, `finish` waits.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from penstock.executor.batch import KvPages
from penstock.executor.models.registry import CausalModel
from penstock.executor.outbox import Outbox
from penstock.executor.parallel import Group
from penstock.executor.protocol import Row, Step, StepResult, TokenLogprobs
from penstock.executor.sampling.masking import RowMasks
from penstock.executor.sampling.sampler import Sampled, Sampler, prompt_logprobs
from penstock.executor.staging import send
from penstock.executor.step.graphs import DecodeGraphs
from penstock.executor.step.inputs import Ends, Inputs
from penstock.executor.step.layout import Layout
from penstock.executor.step.memory import naming_options
from penstock.executor.step.pooling import Pooler
from penstock.executor.step.rebalance import Rebalancer
from penstock.executor.step.slots import Slots
from penstock.executor.tiers.transfers import RankTransfers

STEP_OPTIONS = "lower gpu_memory_utilization, kv_cache_bytes, max_num_batched_tokens or max_num_seqs"
PROMPT_LOGPROB_ROWS = 128  # logits of so many prompt positions at a time: a whole prompt's would fill the memory


@dataclass(slots=True)
class Launched:
    """A step on its way. Row indices are the step's own."""

    step: Step
    started_s: float
    sampled: Sampled | None = None
    sampled_rows: list[int] = field(default_factory=list)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    embeddings: dict[int, bytes] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    unsampled: tuple[Layout, Ends, torch.Tensor] | None = None  # its logits [S, vocabulary] wait for masks


class ModelRunner:
    def __init__(
        self,
        model: CausalModel,
        pages: KvPages,
        sampler: Sampler | None,  # the group's first rank samples for all
        slots: Slots,
        inputs: Inputs,
        device: torch.device,
        group: Group,
        transfers: RankTransfers | None = None,
        rebalancer: Rebalancer | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._model, self._pages, self._sampler, self._device = model, pages, sampler, device
        self._slots, self._inputs = slots, inputs
        self._group, self._transfers, self._rebalancer = group, transfers, rebalancer
        self._graphs = graphs
        self._pooler, self._outbox = Pooler(), Outbox(device)

    def capture_graphs(self, progress: Callable[[str], None]) -> bool:
        """Before the first step. False if there are none to capture."""
        if self._graphs is not None:
            self._graphs.capture(progress)
        return self._graphs is not None

    @naming_options("a step", STEP_OPTIONS)
    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        launched = Launched(step, time.monotonic())
        if self._transfers is not None:
            self._transfers.begin(step.transfers, written_blocks(step.rows, self._slots.block_size))
        for admission in step.admissions:
            assert admission.adapter is None, "adapters are refused before they come here"
            tokens = self._slots.admit(admission)
            self._pooler.admit(admission)
            if self._sampler is not None:
                self._sampler.admit(admission.slot, admission.sampling, tokens, admission.num_prompt)
        if step.rows:
            if self._rebalancer is not None:
                self._rebalancer.boundary()
            self._inputs.edit_blocks(step.rows)
            for row in step.rows:
                if row.tokens:
                    self._slots.extend(row)
                    if self._sampler is not None:
                        self._sampler.extend(row.slot, row.first_token, row.tokens)
            self._compute(Layout(step.rows), launched)
        else:
            self._inputs.flush()
        return launched

    @naming_options("a step", STEP_OPTIONS)
    @torch.inference_mode()
    def sample_masked(self, launched: Launched, rows: np.ndarray, masks: np.ndarray) -> None:
        """The second half of `launch` for a step with masked rows. rows [n], masks [n, words] as in `set_masks`."""
        if self._sampler is None:  # this rank got the tokens from the first one
            return
        assert launched.unsampled is not None, "masks for a step that needs none, or got them already"
        (layout, ends, logits), launched.unsampled = launched.unsampled, None
        place = {row: place for place, row in enumerate(layout.order[layout.samples].tolist())}
        self._choose(layout, ends, logits, launched, RowMasks([place[row] for row in rows.tolist()], masks))

    def finish(self, launched: Launched) -> StepResult:
        assert launched.unsampled is None, "a step is collected before its masks came"
        tokens, logprobs, errors = [-1] * len(launched.step.rows), {}, launched.errors
        if launched.sampled is not None:
            rows = launched.sampled_rows
            sampled, found, failed = launched.sampled.wait()
            for row, token in zip(rows, sampled, strict=True):
                tokens[row] = token
            logprobs = {rows[index]: value for index, value in found.items()}
            errors |= {rows[index]: text for index, text in failed.items()}
        for row in errors:
            tokens[row] = -1
        return StepResult(
            launched.step.step_id,
            tokens,
            logprobs,
            launched.prompt_logprobs,
            launched.embeddings,
            errors,
            time.monotonic() - launched.started_s,
            None if self._transfers is None else self._transfers.end(),
            None if self._rebalancer is None else self._rebalancer.news(),
        )

    def _compute(self, layout: Layout, launched: Launched) -> None:
        asks = self._slots.asks_more[layout.slots].any()
        if self._graphs is not None and not asks and self._graphs.takes(layout):
            self._replay(self._graphs, layout, launched)
            return
        wanted = self._wanted(layout) if asks else layout.query_starts[1:][layout.samples] - 1
        prepared = self._inputs.prepare(layout, wanted)
        hidden = self._model.forward(prepared.batch, self._pages)  # [W, hidden]
        if asks:
            for row in np.flatnonzero(self._slots.asks_more[layout.slots]).tolist():
                self._answer_more(layout, row, wanted, hidden, launched)
            last = np.searchsorted(wanted, layout.query_starts[1:][layout.samples] - 1)
            hidden = hidden[send(last, self._device)]
        if layout.samples.any():
            self._sample(layout, prepared.ends, hidden, launched)

    def _replay(self, graphs: DecodeGraphs, layout: Layout, launched: Launched) -> None:
        """A step of single tokens: all of it by graphs, or up to the hidden states if somebody wants more than a draw."""
        num_rows = len(layout.slots)
        hidden, made = graphs.forward(layout)
        if any(row.masked for row in launched.step.rows) or not self._slots.is_plain[layout.slots].all():
            ends = Ends(made.targets[:num_rows], tuple(tensor[:num_rows] for tensor in made.draw()))
            self._sample(layout, ends, hidden, launched)
            return
        self._outbox.hold()  # the last step's tokens lie where this one's will
        tokens, largest = graphs.sample(num_rows)
        if self._sampler is None:  # the first rank says what came out
            return
        launched.sampled = Sampled(tokens, largest.expand(2, -1), [])
        launched.sampled.post(self._outbox)
        launched.sampled_rows = layout.order.tolist()

    def _wanted(self, layout: Layout) -> np.ndarray:
        """Indices of the tokens whose hidden state somebody reads, ascending, where not only samplers do."""
        need = np.zeros(layout.num_tokens, dtype=bool)
        need[layout.query_starts[1:][layout.samples] - 1] = True
        for row in np.flatnonzero(self._slots.asks_more[layout.slots]).tolist():
            admission = self._slots.admission(int(layout.slots[row]))
            first, end = layout.query_starts[row : row + 2]
            if admission.sampling.prompt_logprobs is not None:
                need[first : first + layout.prompt_targets(row, admission.num_prompt)] = True
            if admission.pooling == "mean":
                need[first:end] = True
            elif admission.pooling == "last":
                need[end - 1] = True
        return np.flatnonzero(need)

    def _answer_more(
        self, layout: Layout, row: int, wanted: np.ndarray, hidden: torch.Tensor, launched: Launched
    ) -> None:
        """What one row asks for beside a sample: prompt log-probabilities, an embedding."""
        admission = self._slots.admission(int(layout.slots[row]))
        index, end = int(layout.order[row]), int(layout.context_lens[row])
        first = int(np.searchsorted(wanted, layout.query_starts[row]))
        count = int(layout.counts[row])
        if admission.sampling.prompt_logprobs is not None:
            targets = layout.prompt_targets(row, admission.num_prompt)
            launched.prompt_logprobs[index] = self._prompt_logprobs(
                admission.slot,
                int(layout.starts[row]),
                hidden[first : first + targets],
                admission.sampling.prompt_logprobs,
                lambda why: launched.errors.setdefault(index, why),
            )
        try:
            if admission.pooling == "mean":
                embedding = self._pooler.mean(admission, hidden[first : first + count], end)
                if embedding is not None:
                    launched.embeddings[index] = embedding
            elif admission.pooling == "last" and end == admission.num_prompt:
                last = int(np.searchsorted(wanted, layout.query_starts[row + 1] - 1))
                launched.embeddings[index] = self._pooler.last(hidden[last : last + 1])
        except ValueError as error:
            launched.errors[index] = str(error)

    def _prompt_logprobs(
        self, slot: int, start: int, hidden: torch.Tensor, num: int, fail: Callable[[str], object]
    ) -> list[TokenLogprobs]:
        """hidden [n, hidden] of positions start … start + n - 1, which predict the prompt's next tokens."""
        chosen = self._slots.tokens[slot, start + 1 : start + 1 + len(hidden)].long()
        found: list[TokenLogprobs] = []
        for part, ids in zip(hidden.split(PROMPT_LOGPROB_ROWS), chosen.split(PROMPT_LOGPROB_ROWS), strict=True):
            logits = self._model.logits(part)
            if logits is not None:
                try:
                    found += prompt_logprobs(logits, ids, num)
                except ValueError as error:  # the other ranks go on with the next part, and so does this one
                    fail(str(error))
        return found

    def _sample(self, layout: Layout, ends: Ends, hidden: torch.Tensor, launched: Launched) -> None:
        """hidden [S, hidden] of the rows that sample."""
        logits = self._model.logits(hidden)
        if logits is not None and any(row.masked for row in launched.step.rows):
            launched.unsampled = layout, ends, logits
        else:
            self._choose(layout, ends, logits, launched)

    def _choose(
        self,
        layout: Layout,
        ends: Ends,
        logits: torch.Tensor | None,
        launched: Launched,
        masks: RowMasks | None = None,
    ) -> None:
        """The tokens go to the table for the next step, and on their way to the host. logits [S, vocabulary]."""
        slots, positions = layout.slots[layout.samples], layout.context_lens[layout.samples]
        if logits is None or self._sampler is None:
            tokens = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        else:
            if masks is None and ends.options is not None and self._sampler.are_plain(slots):
                launched.sampled = self._sampler.start_plain(logits, ends.options)
            else:
                on_device = None if ends.options is None else ends.options[-1]
                launched.sampled = self._sampler.start(logits, slots.tolist(), positions.tolist(), masks, on_device)
            launched.sampled.post(self._outbox)
            launched.sampled_rows = layout.order[layout.samples].tolist()
            tokens = launched.sampled.tokens
        self._slots.tokens.view(-1)[ends.targets] = self._group.broadcast(tokens).to(torch.int32)


def written_blocks(rows: list[Row], block_size: int) -> list[int]:
    """Of the blocks that these rows bring along, those that are written: by them, or by later ones of the request."""
    blocks: list[int] = []
    for row in rows:
        if row.blocks:
            first = max(row.start, row.write_from) // block_size
            blocks += row.blocks[max(0, first - row.first_block) :]
    return blocks
