"""Drafts tokens with the model's own draft layer (executor/models/draft_layer.py), once a step has sampled its tokens."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.executor.batch import ForwardBatch, KvPages, StatePages
from penstock.executor.models.decoder import Decoder
from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import ExecutorConfig, Row
from penstock.executor.staging import send


class DraftModel:
    """Runs the draft layer, which stores its keys and values in the pages of the step that was just computed."""

    def __init__(self, model: Decoder, pages: KvPages, config: ExecutorConfig, group: RankGroup) -> None:
        self._model, self._pages, self._group = model, pages, group
        self._block_size, self.most = config.block_size, config.draft_tokens

    def clear(self, rows: Sequence[Row]) -> None:
        """Store zeros in the blocks that begin in these rows or later, since the layer may not compute all their positions. A
        page may have held the state of a recurrent layer, whose bytes may not be numbers of the layer's dtype: one of them
        would end all right drafts."""
        blocks: list[int] = []
        for row in rows:
            first = -(-max(row.start, row.write_from) // self._block_size)
            blocks += row.blocks[max(0, first - row.first_block) :]
        pages = self._pages[-1]
        assert not isinstance(pages, StatePages), "the draft layer attends"
        for each in pages if blocks else ():
            each.index_fill_(0, send(np.array(blocks), each.device), 0)

    def draft(
        self, batch: ForwardBatch, hidden: Tensor, next_tokens: Tensor, rows: Tensor | None, counts: Tensor, most: int
    ) -> Tensor:
        """Draft up to `most` tokens after each of the `rows` [D], which ask for `counts` [D] of them: [D, most]. The rest
        of each row is undefined. None: all rows, of a token each.

        hidden [T, hidden] and next_tokens [T]: the state of each token of the batch, and the token after it."""
        contexts, tables, ends = batch.context_lens, batch.block_tables, None
        if rows is not None:
            ends = batch.query_starts.index_select(0, rows + 1).long() - 1
            contexts, tables = contexts.index_select(0, rows), tables.index_select(0, rows)
        states = self._model.draft_states(next_tokens, hidden, batch, self._pages, ends)
        if not most:
            return next_tokens.new_empty(0, 0)
        drafts = [self._choose(states)]
        starts = torch.arange(len(counts) + 1, dtype=torch.int32, device=counts.device)
        for ahead in range(1, most):
            # A row without a further position computes one that exists, and stores nothing: block 0 is unused.
            is_asked = counts > ahead
            positions = torch.where(is_asked, contexts + (ahead - 1), 0)
            blocks = tables.gather(1, (positions // self._block_size).long()[:, None])[:, 0].long()
            after = ForwardBatch(
                drafts[-1].int(),
                positions,
                torch.where(is_asked, blocks * self._block_size + positions % self._block_size, 0),
                starts,
                positions + 1,
                tables,
                num_single_rows=len(counts),
                max_single_context=tables.shape[1] * self._block_size,
            )
            states = self._model.draft_states(drafts[-1], states, after, self._pages, None)
            drafts.append(self._choose(states))
        return torch.stack(drafts, dim=1)

    def _choose(self, states: Tensor) -> Tensor:
        logits = self._model.draft_logits(states)
        tokens = states.new_empty(len(states), dtype=torch.int64) if logits is None else logits.argmax(1)
        return self._group.broadcast(tokens)


def last_right_rows(batch: ForwardBatch, slots: Tensor, next_tokens: Tensor) -> Tensor:
    """Tell of each row [R] whether it is the last one of its slot that was computed with the right tokens: those that the
    rows before it have sampled. Only such a row may draft: the layer's results for later positions replace theirs."""
    begins, ends = batch.query_starts[:-1].long(), batch.query_starts[1:].long() - 1
    goes_on = (slots[1:] == slots[:-1]) & (batch.positions[begins[1:]] == batch.context_lens[:-1])
    wrong = torch.zeros_like(slots, dtype=torch.int64)
    wrong[1:] = goes_on & (batch.tokens[begins[1:]] != next_tokens[ends[:-1]])
    num_wrong = wrong.cumsum(0)
    at_first = num_wrong.clone()  # of the slot's rows
    at_first[1:].masked_fill_(goes_on, 0)
    is_right = num_wrong == at_first.cummax(0).values
    is_last = is_right.clone()
    is_last[:-1] &= ~(goes_on & is_right[1:])
    return is_last
