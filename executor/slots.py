"""What an executor remembers of each request between steps, by slot: its tokens, its block table, how to sample.

Tokens live on the device, where the sampler writes them and the next step reads them without the host in
between. Block tables change only by the host's word and stay there; a batch gets a copy of the part it needs.
"""

import numpy as np
import torch

from penstock.executor.protocol import Admission, Row


class Slots:
    def __init__(self, num_slots: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.width = max_model_len + 1  # the token sampled at the very end is stored, never computed
        # calloc'ed: a slot takes memory as far as it was used.
        tokens = torch.from_numpy(np.zeros((num_slots, self.width), dtype=np.int32))
        self.tokens = tokens.to(device)
        self.blocks = np.zeros((num_slots, -(-max_model_len // block_size)), dtype=np.int32)
        self.admissions: list[Admission | None] = [None] * num_slots
        self.asks_more = np.zeros(num_slots, dtype=bool)  # prompt log-probabilities or an embedding

    def admit(self, admission: Admission) -> np.ndarray:
        """Take over the slot; returns the tokens so far, int32."""
        tokens = np.frombuffer(admission.tokens, dtype="<i4").astype(np.int32)
        assert 0 < admission.num_prompt <= len(tokens) < self.width
        self.tokens[admission.slot, : len(tokens)] = torch.from_numpy(tokens)
        self.admissions[admission.slot] = admission
        self.asks_more[admission.slot] = admission.pooling is not None or admission.sampling.prompt_logprobs is not None
        return tokens

    def admission(self, slot: int) -> Admission:
        admission = self.admissions[slot]
        assert admission is not None, f"slot {slot} was never admitted"
        return admission

    def extend(self, row: Row) -> None:
        """Take in the tokens that a row brings along."""
        tokens = torch.tensor(row.tokens, dtype=torch.int32)
        self.tokens[row.slot, row.first_token : row.first_token + len(tokens)] = tokens

    def edit_blocks(self, rows: list[Row]) -> None:
        for row in rows:
            if row.blocks:
                self.blocks[row.slot, row.first_block : row.first_block + len(row.blocks)] = row.blocks
