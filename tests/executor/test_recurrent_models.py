"""Models with recurrent layers through the whole engine: cached and restarted runs give transformers' tokens.

test_models.py compares the layers themselves with transformers, test_scheduled_models.py preempted requests.
"""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.engine.core.drafts import Drafter
from penstock.engine.core.request import Request
from penstock.engine.front.llm import LLM
from penstock.engine.sampling_params import SamplingParams
from penstock.executor.models.recurrent_layers import state_of
from penstock.executor.models.spec import ConvSpec, DeltaSpec, MambaSpec
from penstock.executor.protocol import ExecutorError
from tests.support.small_models import folder, greedy

BLOCK, COUNT = 8, 20
RNG = random.Random(5)
COMMON = [RNG.randrange(160) for _ in range(50)]
PROMPTS = [[*COMMON, *(RNG.randrange(160) for _ in range(RNG.randint(1, 40)))] for _ in range(6)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT)


def llm(path: Path, **options: Any) -> LLM:
    given = {"dtype": "float32", "block_size": BLOCK, "kv_cache_bytes": 2**22, "max_model_len": 128, **options}
    return LLM(str(path), skip_tokenizer=True, **given)


def answers(of: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in of.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.fixture(
    params=[
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("qwen3-next", "lfm2")),
        "qwen3.5",
        "granite4-mamba",
    ]
)
def case(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_prompts_with_a_common_beginning_in_chunks_and_again_from_the_cache(case: str) -> None:
    twice = [greedy(case, prompt, 2 * COUNT)[0] for prompt in PROMPTS]
    expected = [tokens[:COUNT] for tokens in twice]
    with llm(folder(case), max_num_batched_tokens=24, max_num_seqs=4) as model:
        assert answers(model, PROMPTS) == expected
        results = model.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [result.outputs[0].token_ids for result in results] == expected
        assert min(result.num_cached_tokens or 0 for result in results) >= 40, "from the common beginning's checkpoint"
        longer = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, expected, strict=True)]
        assert answers(model, longer) == [tokens[COUNT:] for tokens in twice]


def test_a_restarted_engine_goes_on_from_the_disk(case: str, tmp_path: Path) -> None:
    tiers = {"kv_disk_path": str(tmp_path), "kv_disk_bytes": 2**26, "kv_host_bytes": 2**24}
    for is_second in (False, True):
        with llm(folder(case), **tiers) as model:
            results = model.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [result.outputs[0].token_ids for result in results] == [greedy(case, each, COUNT)[0] for each in PROMPTS]
        assert not is_second or min(result.num_cached_tokens or 0 for result in results) > 0


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("qwen3-next", 2),
        ("qwen3.5", 2),
        ("lfm2", 4),
        ("granite4-mamba", 2),  # whose only group both ranks have
        ("granite4-mamba-groups", 2),
        ("granite4-mamba-groups", 4),
    ],
)
def test_ranks_share_out_heads_and_channels_and_give_the_tokens_of_one(
    name: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, from the cache, and with drafts: of two tokens, of which the second is often wrong."""
    prompt = PROMPTS[0][:40]
    expected, drafts = [greedy(name, prompt, COUNT)[0]], {"method": "ngram"}

    def guess(_drafter: Drafter, request: Request, room: int) -> tuple[int, ...]:
        first = request.num_outputs
        most = max(0, min(room, request.max_tokens - first - 1, 2))
        return (*expected[0][first : first + 1], first % 3)[:most]

    monkeypatch.setattr(Drafter, "_expected", guess)
    monkeypatch.setattr("penstock.engine.core.drafts.LEAST_TRUST", 3)
    sizes = {"max_num_batched_tokens": 24, "max_num_seqs": 4, "tensor_parallel_size": ranks}
    with llm(folder(name), **sizes, speculative_config=drafts) as model:
        assert answers(model, [prompt]) == expected
        assert answers(model, [prompt]) == expected
        assert model.get_metrics()["accepted_tokens"] > 0 and model.get_metrics()["prefix_hits"] > 0


def test_what_ranks_cannot_share_out_is_refused_by_its_number() -> None:
    delta, conv = DeltaSpec(2, 4, 16, 24, 4, False), ConvSpec(3, False)
    spec: Any = SimpleNamespace(hidden_size=62)
    with pytest.raises(ExecutorError, match="^tensor_parallel_size: 4 given; it must divide the model's 2 key heads"):
        state_of(spec, delta, torch.float32, 4)
    with pytest.raises(ExecutorError, match="^tensor_parallel_size: 4 given; it must divide the model's 62 channels"):
        state_of(spec, conv, torch.float32, 4)
    mamba = MambaSpec(2, 12, 16, 24, 4, True, False, 1e-6)
    with pytest.raises(
        ExecutorError, match=r"^tensor_parallel_size: 5 .* the model's 12 Mamba heads \(mamba_n_heads\)$"
    ):
        state_of(spec, mamba, torch.float32, 5)
    with pytest.raises(
        ExecutorError, match=r"^tensor_parallel_size: 3 .* 2 groups of Mamba heads \(mamba_n_groups\), or"
    ):
        state_of(spec, mamba, torch.float32, 3)
    assert state_of(spec, mamba, torch.float32, 4) == (1 + 3, max(16 * 24 * 4, 3 * (2 * 16 + 3 * 24) * 4))
    assert state_of(spec, delta, torch.float32, 2) == (1 + 2, max(16 * 24 * 4, 3 * (2 * 16 + 2 * 24) * 4))
