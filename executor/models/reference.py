"""What transformers makes of token sequences: beside it the engine's log-probabilities are held, as a trainer would."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from penstock.executor.loading.checkpoint import open_checkpoint
from penstock.executor.models.export import export
from penstock.executor.models.weights import DTYPES


@torch.inference_mode()
def reference_logprobs(model: str, sequences: Sequence[Sequence[int]], dtype: str = "float32") -> list[list[float]]:
    """The log-probability of every token but the first of each sequence, by one forward pass for each."""
    from transformers import AutoModelForCausalLM

    with TemporaryDirectory(prefix="penstock-reference-") as folder:
        path = Path(model)
        if not path.is_dir():  # of another format: what it says in numbers
            export(open_checkpoint(path), folder, "float32")
            path = Path(folder)
        network = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype]).eval()
    found = []
    for sequence in sequences:
        ids = torch.tensor([[*sequence]])
        logprobs = network(ids).logits[0, :-1].float().log_softmax(-1)
        found.append(logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist())
    return found
