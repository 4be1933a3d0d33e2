"""Embeddings: the last token's hidden state, or the mean over a prompt, which may arrive in several chunks."""

import numpy as np
import torch

from penstock.executor.protocol import Admission


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
    """Return an embedding or a label head's outputs [width] for a step's result; raise ValueError if not finite."""
    embedding = embedding.float().cpu()
    if not torch.isfinite(embedding).all():
        raise ValueError("the model's hidden states are not finite (NaN or infinity)")
    return embedding.numpy().astype(np.dtype("<f4")).tobytes()
