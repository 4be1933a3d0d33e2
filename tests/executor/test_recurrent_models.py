"""Models with recurrent layers against transformers: the same greedy tokens, the same logits."""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from penstock.executor.batch import ForwardBatch, StateBatch, StatePages
from penstock.executor.models.load import LoadedModel, load_model
from penstock.executor.models.recurrent import state_units
from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import ExecutorConfig
from tests.support.small_models import RECURRENT, folder, greedy

BLOCK, PER_PAGE = 8, 5


def prompts(count: int, seed: int = 0, low: int = 3, high: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(160) for _ in range(rng.randint(low, high))] for _ in range(count)]


@dataclass
class Request:
    tokens: list[int]
    num_prompt: int
    number: int
    computed: int = 0
    steps: int = 0
    chunks: list[torch.Tensor] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class Pages:
    """A model with pages for some requests of 128 tokens: keys and values, and two sets of pages for each one's state, which
    it goes to and fro between. What was never written is NaN."""

    def __init__(self, loaded: LoadedModel, num_requests: int) -> None:
        self.model, spec = loaded.model, loaded.spec
        units = state_units(spec, loaded.dtype)
        assert units is not None
        per_request = 128 // BLOCK
        self.tables = torch.randperm(num_requests * per_request).int().view(num_requests, -1) + 1
        kv = torch.full((self.tables.numel() + 1, len(spec.layers), 2, BLOCK, self.model.kv_width), float("nan"))
        self.state_pages = -(-units.count // PER_PAGE)
        self.states = torch.randperm(2 * num_requests * self.state_pages).int().view(2, num_requests, -1)
        bytes_ = torch.full((self.states.numel(), PER_PAGE * units.unit_bytes // 4), float("nan")).view(torch.uint8)
        first = iter(units.first)
        self.pages: list[Any] = [
            (kv[:, index, 0], kv[:, index, 1])
            if layer.recurrent is None
            else StatePages(bytes_, next(first), PER_PAGE, units.unit_bytes)
            for index, layer in enumerate(spec.layers)
        ]

    def step(self, *parts: tuple[Request, int]) -> None:
        """So many tokens of each; who then has all sampled next."""
        parts = tuple(sorted(parts, key=lambda part: part[1]))
        positions = torch.cat([torch.arange(r.computed, r.computed + n) for r, n in parts]).int()
        rows = torch.tensor([r.number for r, n in parts for _ in range(n)])
        counts, contexts = [n for _, n in parts], [r.computed + n for r, n in parts]
        singles, numbers = counts.count(1), [r.number for r, _ in parts]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        blocks = self.tables[rows, positions // BLOCK].long()
        turns = torch.tensor([r.steps % 2 for r, _ in parts])
        read, write = self.states[turns, numbers], self.states[1 - turns, numbers]
        batch = ForwardBatch(
            tokens=torch.tensor([t for r, n in parts for t in r.tokens[r.computed : r.computed + n]]).int(),
            positions=positions,
            kv_slots=blocks * BLOCK + positions % BLOCK,
            query_starts=starts,
            context_lens=torch.tensor(contexts).int(),
            block_tables=self.tables[numbers],
            wanted=(starts[1:] - 1).long(),
            num_single_rows=singles,
            query_lens=tuple(counts[singles:]),
            query_contexts=tuple(contexts[singles:]),
            max_single_context=max(contexts[:singles], default=0),
            states=StateBatch(read, write, torch.tensor([r.computed == 0 for r, _ in parts])),
        )
        logits = self.model.logits(self.model.forward(batch, self.pages))
        assert logits is not None
        for (request, count), row in zip(parts, logits, strict=True):
            request.computed, request.steps = request.computed + count, request.steps + 1
            if request.computed == len(request.tokens):
                request.tokens.append(int(row.argmax()))
                request.chunks.append(row)


def load(case: str) -> LoadedModel:
    config = ExecutorConfig(model=str(folder(case)), dtype="float32", max_model_len=128)
    return load_model(config, torch.device("cpu"), RankGroup(0, 1), lambda _: None)


@pytest.mark.parametrize("case", RECURRENT)
def test_a_chunked_prompt_and_its_decode_match_transformers(case: str) -> None:
    prompt = prompts(1, low=41, high=41)[0]
    tokens, logits = greedy(case, prompt, 24)
    pages, request = Pages(load(case), 1), Request(list(prompt), len(prompt), 0)
    while len(request.output) < 24:
        pages.step((request, min(7, len(request.tokens) - request.computed)))
    assert request.output == tokens
    assert (torch.stack(request.chunks) - logits).abs().max() <= 1e-4 * logits.abs().max()


@pytest.mark.parametrize("case", RECURRENT)
def test_a_mixed_batch_matches_transformers_row_by_row(case: str) -> None:
    """Prompts of many lengths start at different steps, so that chunks and decodes share every step."""
    given = prompts(6, seed=1)
    pages = Pages(load(case), len(given))
    requests = [Request(list(prompt), len(prompt), number) for number, prompt in enumerate(given)]
    for step in range(100):
        running = [r for r in requests[: step + 1] if len(r.output) < 24]
        if running:
            pages.step(*((r, min(5, len(r.tokens) - r.computed)) for r in reversed(running)))
    assert [r.output for r in requests] == [greedy(case, prompt, 24)[0] for prompt in given]
