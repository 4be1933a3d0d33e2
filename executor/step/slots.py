"""What an executor remembers of each request between steps, by slot: its tokens, its block table, how to sample.

Tokens live on the device, where the sampler writes them and the next step reads them without the host in
between. Block tables change only by the host's word and stay there; a batch gets a copy of the part it needs.
"""

import numpy as np
import torch

from penstock.executor.kernels.state import DeviceState
from penstock.executor.protocol import Admission, Row
from penstock.executor.sampling.edits import is_plain


class Slots:
    def __init__(self, num_slots: int, max_model_len: int, block_size: int, state: DeviceState | None = None) -> None:
        """With `state` tokens and block tables are a GPU's, and nothing is written here but for what it is told."""
        self.block_size = block_size
        self.width, max_blocks = slot_sizes(max_model_len, block_size)
        self._state = state
        # calloc'ed: a slot takes memory as far as it was used.
        self.tokens = torch.from_numpy(np.zeros((num_slots, self.width), np.int32)) if state is None else state.tokens
        self.blocks = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self.admissions: list[Admission | None] = [None] * num_slots
        self.asks_more = np.zeros(num_slots, dtype=bool)  # prompt log-probabilities or an embedding
        self.is_plain = np.ones(num_slots, dtype=bool)  # no more than a draw; every rank must know, one samples

    def admit(self, admission: Admission) -> np.ndarray:
        """Take over the slot; returns the tokens so far, int32."""
        tokens = np.frombuffer(admission.tokens, dtype="<i4").astype(np.int32)
        assert 0 < admission.num_prompt <= len(tokens) < self.width
        if self._state is None:
            self.tokens[admission.slot, : len(tokens)] = torch.from_numpy(tokens)
        else:
            self._state.write_tokens(admission.slot, 0, tokens)
            self._state.write_options(admission.slot, admission.sampling)
        self.admissions[admission.slot] = admission
        self.asks_more[admission.slot] = admission.pooling is not None or admission.sampling.prompt_logprobs is not None
        self.is_plain[admission.slot] = is_plain(admission.sampling)
        return tokens

    def admission(self, slot: int) -> Admission:
        admission = self.admissions[slot]
        assert admission is not None, f"slot {slot} was never admitted"
        return admission

    def extend(self, row: Row) -> None:
        """Take in the tokens that a row brings along."""
        tokens = np.array(row.tokens, dtype=np.int32)
        if self._state is None:
            self.tokens[row.slot, row.first_token : row.first_token + len(tokens)] = torch.from_numpy(tokens)
        else:
            self._state.write_tokens(row.slot, row.first_token, tokens)

    def edit_blocks(self, rows: list[Row]) -> None:
        for row in rows:
            if row.blocks:
                self.blocks[row.slot, row.first_block : row.first_block + len(row.blocks)] = row.blocks


def slot_sizes(max_model_len: int, block_size: int) -> tuple[int, int]:
    """Tokens and blocks of a slot; the token sampled at the very end is stored, never computed."""
    return max_model_len + 1, -(-max_model_len // block_size)
