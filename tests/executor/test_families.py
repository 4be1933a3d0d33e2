"""Families beyond their small models: how their checkpoints come, and what is refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock import LLM, SamplingParams
from penstock.executor.protocol import ExecutorConfig, ExecutorError
from penstock.executor.uniproc import UniprocExecutor
from tests.executor.test_models import executor_of, prompts
from tests.support.driver import Driver
from tests.support.small_models import CASES, REFUSED, folder, greedy, random_model

NEW = ["phi3", "granite4-moe", "glm4-moe", "minimax-m2"]
SLOW = ["olmo3", "smollm3", "ministral3", "ernie4.5-moe", "glm4", "hunyuan"]


def load(path: Path, **options: Any) -> UniprocExecutor:
    return UniprocExecutor(ExecutorConfig(model=str(path), kv_cache_bytes=2**21, dtype="float32", **options))


def edited(tmp_path: Path, case: str, **changes: Any) -> Path:
    """A copy of a case with other fields in its config; None removes one."""
    path = Path(shutil.copytree(folder(case), tmp_path / case))
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return path


@pytest.mark.parametrize("case", [*NEW, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)])
def test_preempted_and_cached_requests_get_the_same_tokens(case: str) -> None:
    """A pool that is too small for all of them; the second round finds the prompts in the cache, or what is left.

    A request with windows is admitted when all that it can ever need is free: such a pool makes it wait."""
    given = [prompts(1, seed=9, low=30, high=30)[0] + prompts(1, seed=seed, low=5, high=20)[0] for seed in range(6)]
    expected = [greedy(case, prompt, 20)[0] for prompt in given]
    info = executor_of(case).info
    with LLM(
        str(folder(case)),
        skip_tokenizer=True,
        dtype="float32",
        executor="uniproc",
        block_size=8,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        kv_cache_bytes=(25 if len(info.groups) == 1 else 48) * info.block_bytes,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        rounds = [llm.generate(given, params, use_tqdm=False) for _ in range(2)]
        num_preemptions = llm.get_metrics()["num_preemptions"]
    assert [[output.outputs[0].token_ids for output in each] for each in rounds] == [expected, expected]
    assert any(output.num_cached_tokens for output in rounds[1])
    assert num_preemptions > 0 or any(group.kind == "window" for group in info.groups)


def test_longrope_goes_by_the_longest_sequence_there_may_be(tmp_path: Path) -> None:
    path = edited(tmp_path, "phi3-longrope", original_max_position_embeddings=64)
    config = CASES["phi3-longrope"][1] | {"original_max_position_embeddings": 64}
    model = random_model("Phi3Config", config)
    model.save_pretrained(path)
    prompt, long = prompts(1, low=20, high=20)[0], prompts(1, low=70, high=70)[0]

    def expected(tokens: list[int]) -> list[int]:
        with torch.no_grad():
            out: torch.Tensor = model.generate(torch.tensor([tokens]), max_new_tokens=20, do_sample=False)
        return out[0, len(tokens) :].tolist()

    short, whole = load(path, max_model_len=64), load(path)
    assert short.info.fingerprint != whole.info.fingerprint
    for executor, tokens in ((short, prompt), (whole, long)):
        driver = Driver(executor)
        assert driver.generate(driver.admit(tokens), count=20) == [expected(tokens)]


@pytest.mark.parametrize("prefixes", [("language_model.model.", "language_model."), ("model.language_model.", "")])
@pytest.mark.parametrize("case", ["ministral3", "mistral", "gemma3"])
def test_the_text_of_a_multimodal_checkpoint_runs(case: str, prefixes: tuple[str, str], tmp_path: Path) -> None:
    path = Path(shutil.copytree(folder(case), tmp_path / "model"))
    text = json.loads((path / "config.json").read_text())
    outer = "Gemma3ForConditionalGeneration" if case == "gemma3" else "Mistral3ForConditionalGeneration"
    tied = text.pop("tie_word_embeddings", False)
    config = {"architectures": [outer], "text_config": text, "vision_config": {}, "dtype": text.pop("dtype")}
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    named = {
        prefixes[0] + name.removeprefix("model.") if name.startswith("model.") else prefixes[1] + name: tensor
        for name, tensor in tensors.items()
    }
    seen = {"vision_tower.a.weight": torch.ones(2), "model.multi_modal_projector.norm.weight": torch.ones(3)}
    (path / "model.safetensors").unlink()
    save_file(named | seen, path / "model.safetensors")
    assert tied != any("lm_head" in name for name in named)
    executor, prompt = load(path), prompts(1)[0]
    assert executor.info.fingerprint == load(folder(case)).info.fingerprint
    driver = Driver(executor)
    assert driver.generate(driver.admit(prompt), count=20) == [greedy(case, prompt, 20)[0]]


@pytest.mark.parametrize(
    ("case", "name"),
    [("glm4-moe", "model.layers.3.eh_proj.weight"), ("ernie4.5-moe", "model.mtp_block.0.mlp.up_proj.weight")],
)
def test_layers_that_guess_ahead_are_left(case: str, name: str, tmp_path: Path) -> None:
    path = edited(tmp_path, case, num_nextn_predict_layers=1)
    tensors = load_file(path / "model.safetensors") | {name: torch.ones(4)}
    (path / "model.safetensors").unlink()
    save_file(tensors, path / "model.safetensors")
    assert load(path).info.fingerprint == load(folder(case)).info.fingerprint


@pytest.mark.parametrize(("case", "changes", "expected"), REFUSED["families"])
def test_a_config_that_is_not_computed_is_refused_by_name(
    case: str, changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ExecutorError) as caught:
        load(edited(tmp_path, case, **changes))
    assert expected in str(caught.value) and "\n" not in str(caught.value)
