"""Every architecture against transformers in float32: the same greedy tokens, the same logits, the same states."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.engine.front.submit import Pooling
from penstock.executor.models.spec import LatentSpec
from penstock.executor.protocol import Sampling
from tests.support.checkpoints import compute_with, copied, edit_config, executor_of, prompts
from tests.support.driver import Driver
from tests.support.small_models import CASES, RECURRENT, greedy, reference
from tests.support.twins import torch_ops

LATENT = ["deepseek-v2-lite", "deepseek-v2-yarn", "deepseek-v3"]


# Between them all that the decoder has beside products.
PLAIN = [
    *("llama-rope-yarn", "mistral-sliding", "gemma3", "gemma2", "gemma4", "gpt-oss", "opt", "smollm3", "ministral3"),
    *("minimax-m2", "hunyuan", "qwen3.5", "granite4-mamba"),
    *LATENT,
]
OTHERS = [pytest.param(case, marks=pytest.mark.slow) for case in (*CASES, *RECURRENT) if case not in PLAIN]


@pytest.mark.parametrize("case", [*PLAIN, *OTHERS])
def test_a_chunked_prompt_and_its_decode_match_transformers(case: str, recorded: list[torch.Tensor]) -> None:
    prompt = prompts(1, low=41, high=41)[0]
    tokens, logits = greedy(case, prompt, 24)
    driver = Driver(executor_of(case))
    assert driver.generate(driver.admit(prompt), count=24, chunk=7) == [tokens]
    ours = torch.cat(recorded)
    assert (ours - logits).abs().max() <= 1e-4 * logits.abs().max()


@pytest.mark.parametrize("case", [*PLAIN, *OTHERS])
def test_a_mixed_batch_matches_transformers_row_by_row(case: str) -> None:
    """Prompts of many lengths start at different steps, so that chunks and decodes share every step."""
    given = prompts(6, seed=1)
    driver = Driver(executor_of(case))
    running = []
    for prompt in given:
        running.append(driver.admit(prompt))
        driver.advance(*reversed(running), chunk=5)
    got = driver.generate(*running, count=24, chunk=5)
    assert got == [greedy(case, prompt, 24)[0] for prompt in given]


@pytest.mark.parametrize("case", PLAIN)
def test_plain_torch_computes_the_same_where_there_are_no_kernels(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain-torch operations run on other devices, and are the reference of the kernels. Stale blocks are NaN."""
    compute_with(monkeypatch, torch_ops)
    monkeypatch.setattr(LatentSpec, "is_expanded", lambda self, count: count > 4)
    given = prompts(5, seed=1)  # which the test above asks for, too
    executor = executor_of(case)
    executor._rank.kv.fill_(float("nan"))
    driver = Driver(executor)
    running = [driver.admit(prompt) for prompt in given]
    assert driver.generate(*running, count=16, chunk=13) == [greedy(case, prompt, 16)[0] for prompt in given]


def test_chunks_long_enough_to_expand_their_latents_are_those_that_compute_less() -> None:
    lite = LatentSpec(kv_rank=512, q_rank=None, nope_dim=128, rope_dim=64, value_dim=128)
    assert [lite.is_expanded(count) for count in (1, 170, 171, 8192)] == [False, False, True, True]
    narrow = LatentSpec(kv_rank=64, q_rank=None, nope_dim=128, rope_dim=64, value_dim=128)
    assert not narrow.is_expanded(10**9)


@pytest.mark.parametrize("case", ["llama", "gemma3", "opt-norm-after-projected"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_transformers_last_hidden_states(case: str, pooling: Pooling) -> None:
    given = prompts(3, seed=2)
    driver = Driver(executor_of(case))
    sequences = [driver.admit(prompt, pooling=pooling) for prompt in given]
    chat = driver.admit(given[0])
    found: dict[int, np.ndarray] = {}
    while len(found) < len(given):
        left = [s for s in sequences if s.computed < s.num_prompt]
        result = driver.advance(chat, *left, chunk=9)
        for row, data in result.embeddings.items():
            found[left[row - 1].slot] = np.frombuffer(data, "<f4")
    for sequence, prompt in zip(sequences, given, strict=True):
        with torch.no_grad():
            hidden = reference(case).base_model(torch.tensor([prompt])).last_hidden_state[0]
        expected = hidden[-1] if pooling == "last" else hidden.mean(0)
        np.testing.assert_allclose(found[sequence.slot], expected, rtol=1e-4, atol=1e-4)
    assert chat.output == greedy(case, given[0], len(chat.output))[0]


@pytest.mark.parametrize("chunk", [None, 11])
def test_log_probabilities_are_transformers(chunk: int | None) -> None:
    prompt, count = prompts(1, seed=4, low=33, high=33)[0], 6
    tokens, _ = greedy("qwen3", prompt, count)
    with torch.no_grad():
        expected = reference("qwen3")(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
    driver = Driver(executor_of("qwen3"))
    plain = driver.admit(prompts(1, seed=5)[0])
    sequence = driver.admit(prompt, Sampling(temperature=0.0, logprobs=3, prompt_logprobs=2))
    of_prompt, of_output = [], []
    while len(sequence.output) < count:
        result = driver.advance(plain, sequence, chunk=chunk)
        of_prompt += result.prompt_logprobs.get(1, [])
        of_output += [result.logprobs[1]] if 1 in result.logprobs else []
    assert len(of_prompt) == len(prompt) - 1 and len(of_output) == count
    for index, (found, num) in enumerate([(f, 2) for f in of_prompt] + [(f, 3) for f in of_output]):
        values, chosen = expected[index], (prompt + tokens)[index + 1]
        assert found.ids[0] == chosen
        assert found.rank == 1 + int((values > values[chosen]).sum())
        assert list(found.ids[1:]) == values.topk(num).indices.tolist()
        np.testing.assert_allclose(found.values, values[list(found.ids)], rtol=1e-4, atol=1e-4)


def test_transformers_4_spelling_of_rope_gives_the_same_tokens(tmp_path: Path) -> None:
    old = copied("llama-rope-llama3", tmp_path / "old")
    config = json.loads((old / "config.json").read_text())
    scaling = config["rope_parameters"]
    changes = {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling, "torch_dtype": config["dtype"]}
    edit_config(old, rope_parameters=None, dtype=None, **changes)
    prompt = prompts(1)[0]
    driver = Driver(executor_of(old))
    assert driver.generate(driver.admit(prompt), count=24) == [greedy("llama-rope-llama3", prompt, 24)[0]]


def test_a_weight_that_embedding_and_head_share_is_kept_once() -> None:
    """Where the CPU's layers repack theirs it was kept in both forms, and counted so."""
    overrides = [{"tie_word_embeddings": is_tied} for is_tied in (True, False)]
    tied, apart = (executor_of("qwen3", load_format="dummy", hf_overrides=each) for each in overrides)
    assert apart.info.memory["weights"] - tied.info.memory["weights"] == 160 * 64 * 4


@pytest.mark.parametrize("is_repacked", [True, False])
def test_what_is_loaded_does_not_change_with_its_file(
    is_repacked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An embedding that is the head too may be repacked from the mapped file, but never stays there."""
    if not is_repacked:
        monkeypatch.setattr("penstock.executor.kernels.linear.is_repacked", lambda _: False)
    path = copied("gemma3", tmp_path / "model")
    driver, prompt = Driver(executor_of(path)), prompts(1)[0]
    with (path / "model.safetensors").open("r+b") as file:  # in its place, so that mappings see it
        begin = file.seek(8 + int.from_bytes(file.read(8), "little"))
        file.write(b"\x7f" * (file.seek(0, 2) - file.seek(begin)))
    assert driver.generate(driver.admit(prompt), count=8) == [greedy("gemma3", prompt, 8)[0]]
