"""Computes a model's logits for token sequences, without gradients, for a trainer in the same process.

Loading, memory layout and kernels are those of the single-device executor, so the results are bitwise equal to those
that the engine samples from, whatever its batches, chunks and prefix-cache hits: on a CPU always, on a GPU with
`batch_invariant`. There are no requests and no prefix cache: every sequence is computed from its first token.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from penstock.executor.models.moe import recorded_choices
from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import Admission, ExecutorConfig, ExecutorError, ModelInfo, Row, Sampling, Step
from penstock.executor.ranks.rank import Rank, choose_device
from penstock.executor.sampling.sampler import token_logprobs
from penstock.executor.shared_tensors import SharedTensors
from penstock.executor.step.runner import PROMPT_LOGPROB_ROWS

# No cache tiers, no adapters, and no CUDA graphs, because these are for steps of single-token rows only.
_ALONE: dict[str, Any] = {
    "kv_host_bytes": 0, "kv_disk_path": "", "kv_disk_bytes": 0, "kv_peers": (), "kv_peer_listen": "",
    "enable_lora": False, "enforce_eager": True,
}  # fmt: skip


class Forward:
    """A loaded model. Its methods return tensors on the model's device and raise ValueError for an invalid sequence."""

    def __init__(self, config: ExecutorConfig, progress: Callable[[str], None] = lambda _line: None) -> None:
        if config.tensor_parallel_size != 1:
            raise ExecutorError(f"tensor_parallel_size: {config.tensor_parallel_size} given; a function runs one rank")
        self._config = msgspec.structs.replace(config, **_ALONE)
        self._rank = Rank(self._config, RankGroup(), choose_device(config.device), progress)

    @property
    def info(self) -> ModelInfo:
        return self._rank.info

    def __call__(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the logits after every token: one tensor [length, vocabulary] per sequence."""
        return self._compute(sequences, lambda logits, _following: logits)

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the log-probability of every token but the first: one float32 tensor [length - 1] per sequence."""

        def of_following(logits: Tensor, following: np.ndarray) -> Tensor:
            chosen = torch.from_numpy(following).to(logits.device, torch.int64)
            return token_logprobs(logits[: len(chosen)], chosen, 0)[1][:, 0]

        return self._compute(sequences, of_following)

    def routed_experts(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the experts that the routers choose for every token: one int16 tensor [length, layers, experts per
        token] per sequence. ValueError if the model has no experts."""
        layers, size = self._rank.runner.experts, self.info.max_num_batched_tokens
        if not layers:
            raise ValueError(f"{self.info.architecture} has no experts")
        found = []
        for index, sequence in enumerate(sequences):
            tokens, parts = self._checked(index, sequence), []
            for start in range(0, len(tokens), size):
                with recorded_choices(layers) as chosen:
                    self._rank.runner.hidden(self._step([tokens], start))
                parts.append(torch.stack(chosen, 1).to(torch.int16))
            found.append(torch.cat(parts))
        return found

    def update_weights(self, weights: "str | os.PathLike[str] | Mapping[str, Any]") -> None:
        """Replace the weights, given as for `LLM.update_weights`."""
        if isinstance(weights, Mapping):
            with SharedTensors(weights) as shared:
                return self.update_weights(shared.path)
        self._rank.prepare_weights(os.fspath(weights))
        return self._rank.take_weights()

    def _compute(
        self, sequences: Sequence[Sequence[int]], take: Callable[[Tensor, np.ndarray], Tensor]
    ) -> list[Tensor]:
        """Return the joined results of `take` per sequence; it maps logits [n, vocabulary] and the next tokens."""
        given = [self._checked(index, sequence) for index, sequence in enumerate(sequences)]
        parts: list[list[Tensor]] = [[] for _ in given]
        runner, size = self._rank.runner, self.info.max_num_batched_tokens
        for pack in self._packs([len(tokens) for tokens in given]):
            for start in range(0, max(len(given[index]) for index in pack), size):
                for index, hidden in zip(pack, runner.hidden(self._step([given[i] for i in pack], start)), strict=True):
                    for first in range(0, len(hidden), PROMPT_LOGPROB_ROWS):
                        logits = runner.logits(hidden[first : first + PROMPT_LOGPROB_ROWS])
                        parts[index].append(take(logits, given[index][start + first + 1 :][: len(logits)]))
        return [torch.cat(each) for each in parts]

    def _checked(self, index: int, sequence: Sequence[int]) -> np.ndarray:
        tokens, most, vocab_size = np.asarray(sequence), self.info.max_model_len, self.info.vocab_size
        if tokens.ndim != 1 or not 1 <= len(tokens) <= most:
            raise ValueError(
                f"sequences[{index}]: of shape {tokens.shape}; 1 to {most} (max_model_len) ids are expected"
            )
        if tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() >= vocab_size:
            raise ValueError(f"sequences[{index}]: token ids are integers from 0 to {vocab_size - 1}")
        return tokens.astype("<i4")

    def _packs(self, lengths: list[int]) -> Iterator[list[int]]:
        """Yield lists of sequences to compute together: as many as fit a step and the pages, or a single long one."""
        most = np.array([self._config.max_num_seqs, self.info.max_num_batched_tokens, self.info.num_blocks - 1])
        pack: list[int] = []
        left = most
        for index, length in enumerate(lengths):
            needed = np.array([1, length, sum(self._num_pages(length))])
            if pack and (needed > left).any():
                yield pack
                pack, left = [], most
            pack.append(index)
            left = left - needed
        if pack:
            yield pack

    def _num_pages(self, length: int) -> list[int]:
        """Return the pages that a sequence needs in each layer group; the pool always holds one of `max_model_len`."""
        size, block_size = self.info.max_num_batched_tokens, self.info.block_size
        return [group.pages or group.most_pages(length, size, block_size) for group in self.info.groups]

    def _step(self, sequences: list[np.ndarray], start: int) -> Step:
        """Build the step for the positions from `start` on; the first step admits. A sequence has consecutive pages."""
        rows, page = [], 1  # page 0 is never handed out
        for slot, tokens in enumerate(sequences):
            tables: list[tuple[int, tuple[int, ...]]] = []
            states: tuple[int, ...] = ()
            for group, num in zip(self.info.groups, self._num_pages(len(tokens)), strict=True):
                if group.kind == "state":
                    states = tuple(range(page, page + num))
                else:  # with fewer pages than blocks, pages that have left the window are reused
                    num_blocks = -(-len(tokens) // self.info.block_size)
                    tables.append((0, tuple(page + block % num for block in range(num_blocks))))
                page += num
            count = min(len(tokens) - start, self.info.max_num_batched_tokens)
            (_, blocks), *others = tables
            groups = tuple(others)
            rows.append(
                Row(slot, start, count, False, blocks=blocks, groups=groups, states_in=states, states_out=states)
            )
        admissions = [
            Admission(slot=slot, request_id=slot, tokens=each.tobytes(), num_prompt=len(each), sampling=Sampling())
            for slot, each in enumerate(sequences)
        ]
        return Step(0, [] if start else admissions, rows)
