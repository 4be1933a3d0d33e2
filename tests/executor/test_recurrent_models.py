"""Models with recurrent layers through the whole engine: cached, preempted and restarted runs give transformers' tokens.
(test_models.py holds the layers themselves against transformers.)"""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.core.drafts import Drafter
from penstock.engine.core.request import Request
from penstock.engine.front.llm import LLM
from penstock.engine.sampling_params import SamplingParams
from penstock.executor.models.recurrent_layers import state_of
from penstock.executor.models.spec import ConvSpec, DeltaSpec, MambaSpec
from penstock.executor.protocol import ExecutorConfig, ExecutorError
from penstock.executor.uniproc import UniprocExecutor
from tests.support.driver import Driver
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


@pytest.fixture(params=["qwen3-next", "qwen3.5", "lfm2", "granite4-mamba"])
def case(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_prompts_with_a_common_beginning_in_chunks_and_again_from_the_cache(case: str) -> None:
    expected = [greedy(case, prompt, COUNT)[0] for prompt in PROMPTS]
    with llm(folder(case), max_num_batched_tokens=24, max_num_seqs=4) as model:
        assert answers(model, PROMPTS) == expected
        results = model.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [result.outputs[0].token_ids for result in results] == expected
        assert min(result.num_cached_tokens or 0 for result in results) >= 40, "from the common beginning's checkpoint"
        longer = [[*prompt, *answer] for prompt, answer in zip(PROMPTS, expected, strict=True)]
        assert answers(model, longer) == [greedy(case, prompt, COUNT)[0] for prompt in longer]


def test_requests_that_are_preempted_go_on_as_if_nothing_had_been(case: str) -> None:
    """There are pages for about two of six."""
    info = UniprocExecutor(ExecutorConfig(model=str(folder(case)), dtype="float32", block_size=BLOCK)).info
    pages = sum(group.most_pages(112, 24, BLOCK) for group in info.groups)
    with llm(
        folder(case),
        kv_cache_bytes=2 * pages * info.block_bytes,
        max_num_batched_tokens=24,
        max_num_seqs=6,
        max_model_len=112,
    ) as m:
        results = m.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [result.outputs[0].token_ids for result in results] == [greedy(case, each, COUNT)[0] for each in PROMPTS]
    assert sum(result.metrics.num_preemptions for result in results) > 0


def test_a_restarted_engine_goes_on_from_the_disk(case: str, tmp_path: Path) -> None:
    tiers = {"kv_disk_path": str(tmp_path), "kv_disk_bytes": 2**26, "kv_host_bytes": 2**24}
    for is_second in (False, True):
        with llm(folder(case), **tiers) as model:
            results = model.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [result.outputs[0].token_ids for result in results] == [greedy(case, each, COUNT)[0] for each in PROMPTS]
        assert not is_second or min(result.num_cached_tokens or 0 for result in results) > 0


def multimodal(case: str, goal: Path, changes: dict[str, Any]) -> Path:
    """The model as the text part of one that sees: its tensors' names and config nested, beside tensors of an eye and of
    tokens ahead; experts, if any, in one tensor for each product."""
    tensors = {}
    for name, tensor in load_file(folder(case) / "model.safetensors").items():
        tensors[name.replace("model.", "model.language_model.")] = tensor
    experts = sorted({name.split(".experts.")[0] for name in tensors if ".experts." in name})
    for layer in experts:
        stacked: dict[str, list[torch.Tensor]] = {"gate_up_proj": [], "down_proj": []}
        for number in range(6):
            own = [tensors.pop(f"{layer}.experts.{number}.{part}_proj.weight") for part in ("gate", "up", "down")]
            stacked["gate_up_proj"].append(torch.cat(own[:2]))
            stacked["down_proj"].append(own[2])
        tensors |= {f"{layer}.experts.{name}": torch.stack(parts) for name, parts in stacked.items()}
    tensors |= {name: torch.zeros(2) for name in ("model.visual.blocks.0.norm.weight", "mtp.layers.0.norm.weight")}
    goal.mkdir()
    save_file(tensors, goal / "model.safetensors")
    text = json.loads((folder(case) / "config.json").read_text())
    config = {"text_config": text, "vision_config": {}, "tie_word_embeddings": text["tie_word_embeddings"]}
    (goal / "config.json").write_text(json.dumps({**config, **changes}))
    return goal


@pytest.mark.parametrize(
    ("case", "name"),
    [("qwen3.5", "Qwen3_5ForConditionalGeneration"), ("qwen3.5-moe", "Qwen3_5MoeForConditionalGeneration")],
)
def test_the_text_of_models_that_see(case: str, name: str, tmp_path: Path) -> None:
    path = multimodal(case, tmp_path / "eye", {"architectures": [name]})
    driver = Driver(UniprocExecutor(ExecutorConfig(model=str(path), dtype="float32", kv_cache_bytes=2**22)))
    assert driver.generate(driver.admit(PROMPTS[0]), count=8, chunk=9) == [greedy(case, PROMPTS[0], 8)[0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_num_value_heads": 3}, "linear_num_value_heads: 3 found; a multiple of linear_num_key_heads"),
        ({"linear_key_head_dim": 512}, "linear_key_head_dim: 512 found; an integer from 1 to 256"),
        ({"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim: 9 found; an integer from 1 to 8"),
        ({"attention_bias": True}, "attention_bias: True found; False is expected"),
        ({"layer_types": ["mamba"] * 5}, "layer_types: .* found; 5 times 'full_attention' or 'linear_attention'"),
    ],
)
def test_settings_that_are_not_computed_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ExecutorError, match=message):
        UniprocExecutor(ExecutorConfig(model=str(folder("qwen3.5")), hf_overrides=change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layer_types": ["mamba"] * 2},
            r"layer_types: \['mamba', 'mamba'\] found; 3 times 'attention' or 'mamba', one",
        ),
        ({"layer_types": ["conv"] * 3}, "layer_types: .* found; 3 times 'attention' or 'mamba'"),
        ({"layer_types": None}, "layer_types: None found; 3 times 'attention' or 'mamba'"),
        ({"time_step_limit": [0.0, 0.1]}, r"time_step_limit: \[0.0, 0.1\] found; None or \[0.0, inf\] or"),
        ({"mamba_n_heads": 7}, r"mamba_n_heads: 7 found; a divisor of mamba_expand \* hidden_size \(128\) is expected"),
        ({"mamba_n_heads": 0}, "mamba_n_heads: 0 found; an integer from 1 to"),
        ({"mamba_n_groups": 3}, r"mamba_n_groups: 3 found; a divisor of mamba_n_heads \(8\) is expected"),
        ({"mamba_d_head": 8}, "mamba_d_head: 8 found; 'auto' or 16 is expected"),
        ({"mamba_expand": 17}, "mamba_expand: 17 found; an integer from 1 to 16"),
        (
            {"mamba_expand": 16, "mamba_n_heads": 2},
            "mamba_n_heads: 2 found; enough for heads of at most 256 numbers is expected",
        ),
        ({"mamba_d_state": 257}, "mamba_d_state: 257 found; an integer from 1 to 256"),
        ({"mamba_d_conv": 9}, "mamba_d_conv: 9 found; an integer from 1 to 8"),
        ({"mamba_conv_bias": "no"}, "mamba_conv_bias: 'no' found; true or false"),
        ({"mamba_d_state": 16}, r"mamba\.(in_proj|conv1d)\..* of shape .*: its rows are not mamba\."),
    ],
)
def test_mamba_layers_that_are_not_computed_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    change = {"mamba_d_head": "auto", **change}
    with pytest.raises(ExecutorError, match=message):
        UniprocExecutor(ExecutorConfig(model=str(folder("granite4-mamba")), hf_overrides=change))


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
