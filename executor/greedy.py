"""The most likely token and nothing else, with the sampler's interface: for as long as there is no other."""

import numpy as np
import torch

from penstock.executor.protocol import ExecutorError, Sampling, TokenLogprobs


class Sampler:
    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        pass

    def admit(self, slot: int, sampling: Sampling, tokens: np.ndarray, num_prompt: int) -> None:
        pass

    def sample(
        self, logits: torch.Tensor, slots: list[int], positions: list[int]
    ) -> tuple[torch.Tensor, dict[int, TokenLogprobs], dict[int, str]]:
        return logits.argmax(-1), {}, {}


def prompt_logprobs(logits: torch.Tensor, chosen: torch.Tensor, num: int) -> list[TokenLogprobs]:
    raise ExecutorError("prompt_logprobs need the full sampler")
