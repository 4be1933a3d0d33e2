"""The executor seam, kept to the letter: shared blocks, skipped writes, table edits, preemption, drafts and masks.
Embeddings and log-probabilities of models, against transformers; special features of some families and of some files.

test_models.py has the tokens of all of them."""

import gc
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from penstock import LLM, SamplingParams
from penstock.engine.front.submit import Pooling
from penstock.executor.models.spec import LatentSpec
from penstock.executor.protocol import ExecutorConfig, Sampling, Step, WeightsError
from penstock.executor.ranks import runner_factory
from penstock.executor.ranks.preview import preview
from penstock.executor.uniproc import UniprocExecutor
from tests.support.checkpoints import (
    WEIGHTS,
    config_of,
    copied,
    edit_config,
    edit_weights,
    executor_of,
    prompts,
    refusal,
)
from tests.support.driver import Driver
from tests.support.refusals import cases, hardest_rows
from tests.support.small_models import CASES, SEEING, folder, generated, greedy, random_model, reference
from tests.support.stored_models import stored, text_of_images
from tests.support.twins import torch_inputs

CASE = "mistral-sliding"  # its window of 11 also makes positions fall out of sight
PROMPT = [(7 * i * i + 3 * i) % 160 for i in range(48)]


def open_driver() -> Driver:
    return Driver(executor_of(CASE))


@pytest.fixture
def driver() -> Driver:
    return open_driver()


def kv_of(driver: Driver) -> torch.Tensor:
    assert isinstance(driver.executor, UniprocExecutor)
    return driver.executor._rank.kv


def test_a_row_reads_blocks_that_an_earlier_row_of_the_same_step_fills(driver: Driver) -> None:
    first, second = driver.admit(PROMPT), driver.admit([*PROMPT[:40], 9, 9, 9])
    whole = driver.row(first)
    second.blocks, second.computed = first.blocks[:5], 40
    driver.step((first, whole), (second, driver.row(second)))
    expected = [greedy(CASE, PROMPT, 10)[0], greedy(CASE, [*PROMPT[:40], 9, 9, 9], 10)[0]]
    assert driver.generate(first, second, count=10) == expected


def test_positions_below_write_from_are_not_written(driver: Driver) -> None:
    owner, hit = driver.admit(PROMPT), driver.admit(PROMPT)
    driver.advance(owner)
    hit.blocks, hit.computed = list(owner.blocks), len(PROMPT) - 20
    kv_of(driver)[owner.blocks] += 0.5  # what a second write would undo
    before = kv_of(driver)[owner.blocks].clone()
    driver.step((hit, driver.row(hit, write_from=len(PROMPT))))
    assert torch.equal(kv_of(driver)[owner.blocks], before)


def test_a_partly_skipped_row_writes_the_rest(driver: Driver) -> None:
    owner, hit = driver.admit(PROMPT[:24]), driver.admit(PROMPT)
    driver.advance(owner)
    hit.blocks, hit.computed = owner.blocks[:3], 16
    row = driver.row(hit, write_from=24)
    marked = kv_of(driver)[hit.blocks[2:4]]
    kv_of(driver)[hit.blocks[3]] = float("nan")  # must be written
    driver.step((hit, row))
    assert torch.equal(kv_of(driver)[hit.blocks[2]], marked[0])
    assert driver.generate(hit, count=12) == [greedy(CASE, PROMPT, 12)[0]]


@pytest.mark.parametrize("options", cases(__file__, "options of forced tokens"))
def test_tokens_that_a_row_brings_count_as_if_they_were_sampled(driver: Driver, options: dict[str, Any]) -> None:
    sampling, forced = Sampling(temperature=0.0, **options), (5, 9, 5, 77)
    sampled, forced_to = driver.admit(PROMPT[:20], sampling), driver.admit(PROMPT[:20], sampling)
    driver.generate(sampled, forced_to, count=3)
    sampled.tokens += forced
    driver.readmit(sampled, slot=9)
    first = len(forced_to.tokens)
    forced_to.tokens += forced
    row = msgspec.structs.replace(driver.row(forced_to), first_token=first, tokens=forced)
    driver.step((forced_to, row))
    assert driver.generate(sampled, count=12) == driver.generate(forced_to, count=12)


def drafts_of(expected: list[int], first: int, rng: random.Random) -> list[int]:
    """Return up to five tokens that follow, some of them wrong."""
    drafts = expected[first : first + rng.randint(0, 5)]
    return [token if rng.random() < 0.8 else rng.randrange(160) for token in drafts]


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(temperature=1.3, seed=77, top_k=50)])
@pytest.mark.parametrize("is_device", [False, True])
def test_drafts_change_no_sampled_token(is_device: bool, sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right and wrong drafts, beside a request without any; stale blocks hold nothing that a sum would survive."""
    if is_device:
        monkeypatch.setattr(runner_factory, "select_input_ops", lambda _: torch_inputs)
    driver = open_driver()
    kv_of(driver).fill_(float("nan"))
    prompts = [PROMPT[:5], PROMPT[:17], PROMPT]
    alone = driver.generate(*[driver.admit(prompt, sampling) for prompt in prompts], count=30)
    sequences = [driver.admit(prompt, sampling) for prompt in prompts]
    driver.advance(*sequences)
    rng = random.Random(6)
    gains = []
    while min(len(sequence.output) for sequence in sequences) < 24:
        drafts = {index: drafts_of(alone[index], len(sequences[index].output), rng) for index in (0, 2)}
        gains += driver.advance_with_drafts(drafts, *sequences)
    for sequence, expected in zip(sequences, alone, strict=True):
        assert sequence.output[:24] == expected[:24]
    assert {1, 2, 3, 4} <= set(gains)


def test_a_step_without_rows_is_answered(driver: Driver) -> None:
    sequence = driver.admit(PROMPT)
    assert driver.step().tokens == []  # and the admission it carried counts
    assert driver.generate(sequence, count=3) == [greedy(CASE, PROMPT, 3)[0]]


def test_a_request_whose_numbers_break_fails_alone(driver: Driver) -> None:
    sound, broken = driver.admit(PROMPT), driver.admit(PROMPT[:20])
    driver.advance(sound, broken)
    kv_of(driver)[broken.blocks[-1]] = float("nan")
    row = driver.row(broken)
    result = driver.step_unchecked((broken, row), (sound, driver.row(sound)))
    assert "not finite" in result.errors[0] and list(result.errors) == [0]
    assert result.tokens[0] == -1
    assert result.tokens[1] == greedy(CASE, PROMPT, 2)[0][1]


def test_prompt_log_probabilities_and_embeddings_that_break_fail_alone(driver: Driver) -> None:
    with_logprobs = Sampling(temperature=0.0, prompt_logprobs=1)
    sequences = [
        driver.admit(PROMPT, with_logprobs),  # the one that is sound
        driver.admit(PROMPT, pooling="mean"),
        driver.admit(PROMPT, pooling="last"),
        driver.admit(PROMPT, with_logprobs),
    ]
    driver.advance(*sequences, chunk=20)
    for broken in sequences[1:]:
        kv_of(driver)[broken.blocks[2]] = float("nan")
    result = driver.step_unchecked(*((each, driver.row(each)) for each in sequences))
    assert sorted(result.errors) == [1, 2, 3] and result.embeddings == {}
    assert all("not finite" in error for error in result.errors.values())
    assert result.tokens == [greedy(CASE, PROMPT, 1)[0][0], -1, -1, -1]
    assert len(result.prompt_logprobs[0]) == len(PROMPT) - 20 - 1


def test_a_mean_is_the_same_bits_wherever_chunks_end(driver: Driver) -> None:
    whole = driver.advance(driver.admit(PROMPT, pooling="mean")).embeddings[0]
    for chunk in (1, 7, 16, 47):
        sequence = driver.admit(PROMPT, pooling="mean")
        embeddings: dict[int, bytes] = {}
        while not embeddings:
            embeddings = driver.advance(sequence, chunk=chunk).embeddings
        assert embeddings[0] == whole


def test_a_mean_over_a_prompt_with_skipped_positions_fails_that_row_alone(driver: Driver) -> None:
    chat, pooled = driver.admit(PROMPT), driver.admit(PROMPT, pooling="mean")
    pooled.computed = 8
    pooled.blocks = [driver.free.pop()]
    result = driver.advance(chat, pooled)
    assert "40 of 48" in result.errors[1] and result.embeddings == {}
    assert chat.output == greedy(CASE, PROMPT, 1)[0]


def test_a_masked_row_samples_from_its_mask_and_the_next_step_goes_on(driver: Driver) -> None:
    masked, free = driver.admit(PROMPT[:20]), driver.admit(PROMPT)
    for allowed in ({5, 6}, {70}, {33, 99, 120}):
        driver.advance(masked, free, masks={0: allowed})
        assert masked.output[-1] in allowed
    assert free.output == greedy(CASE, PROMPT, 3)[0]
    expected = greedy(CASE, PROMPT[:20] + masked.output, 5)[0]
    assert driver.generate(masked, count=8)[0][3:] == expected


def test_a_mask_goes_to_the_row_it_names_whatever_the_order_of_the_batch(driver: Driver) -> None:
    single, long, other = driver.admit(PROMPT[:9]), driver.admit(PROMPT), driver.admit(PROMPT[:5])
    driver.advance(single)
    # The row of one token comes first in the batch, though it is the second of the step.
    driver.advance(long, single, other, masks={0: {41}, 1: {42}, 2: {43}})
    assert (long.output[-1], single.output[-1], other.output[-1]) == (41, 42, 43)
    ended, last = driver.admit(PROMPT), driver.admit(PROMPT)
    driver.advance(ended, last, masks={0: None, 1: {3}})  # the request of the first has ended meanwhile
    assert ended.output == greedy(CASE, PROMPT, 1)[0] and last.output == [3]


def test_a_step_is_not_collected_before_its_masks_came(driver: Driver) -> None:
    row = driver.row(driver.admit(PROMPT), masked=True)
    driver.executor.submit(Step(1, driver._admissions, [row]))
    with pytest.raises(AssertionError, match="before its masks"):
        driver.executor.collect()


STATES = ("granite4-mamba", "qwen3-next", "lfm2")


def test_latents_are_expanded_where_that_computes_less() -> None:
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


def test_a_weight_that_embedding_and_head_share_is_kept_once() -> None:
    """Where the CPU's layers repack theirs it was kept in both forms, and counted so."""
    overrides = [{"tie_word_embeddings": is_tied} for is_tied in (True, False)]
    tied, apart = (executor_of("qwen3", load_format="dummy", hf_overrides=each) for each in overrides)
    assert apart.info.memory["weights"] - tied.info.memory["weights"] == 160 * 64 * 4


@pytest.mark.parametrize("is_repacked", [True, False])
def test_a_changed_file_changes_no_weights(is_repacked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding that is the head too may be repacked from the mapped file, but never stays there."""
    if not is_repacked:
        monkeypatch.setattr("penstock.executor.kernels.linear.is_repacked", lambda _: False)
    path = copied("gemma3", tmp_path / "model")
    driver, prompt = Driver(executor_of(path)), prompts(1)[0]
    with (path / "model.safetensors").open("r+b") as file:  # in its place, so that mappings see it
        begin = file.seek(8 + int.from_bytes(file.read(8), "little"))
        file.write(b"\x7f" * (file.seek(0, 2) - file.seek(begin)))
    assert driver.generate(driver.admit(prompt), count=8) == [greedy("gemma3", prompt, 8)[0]]


def test_longrope_goes_by_the_longest_sequence_there_may_be(tmp_path: Path) -> None:
    model = random_model("Phi3Config", CASES["phi3-longrope"][1] | {"original_max_position_embeddings": 64})
    model.save_pretrained(tmp_path)
    prompt, long = prompts(1, low=20, high=20)[0], prompts(1, low=70, high=70)[0]

    short, whole = executor_of(tmp_path, max_model_len=64), executor_of(tmp_path)
    assert short.info.fingerprint != whole.info.fingerprint
    for executor, tokens in ((short, prompt), (whole, long)):
        driver = Driver(executor)
        assert driver.generate(driver.admit(tokens), count=20) == [generated("longrope", model, tokens, 20)[0]]


@pytest.mark.parametrize(("case", "name"), cases(__file__, "tensors that draft"))
def test_layers_that_only_draft_are_left_out(case: str, name: str, tmp_path: Path) -> None:
    path = copied(case, tmp_path / case)
    edit_config(path, num_nextn_predict_layers=1)
    edit_weights(path, {name: torch.ones(4)})
    assert executor_of(path).info.fingerprint == executor_of(case).info.fingerprint
    assert preview(config_of(path)).memory == preview(config_of(case)).memory


def test_layers_that_read_others_keys_take_no_pages() -> None:
    """Six layers, of which two read others' keys; the widest has two heads of 32."""
    info = executor_of("gemma4").info
    assert info.block_bytes * len(info.groups) == 4 * 2 * 8 * 64 * 4  # a layer in a page of each group
    assert info.num_blocks == 2**22 // info.block_bytes


@pytest.mark.parametrize("case", ["qwen3.5", *(pytest.param(case, marks=pytest.mark.slow) for case in STATES)])
def test_a_restarted_engine_goes_on_from_states_on_the_disk(case: str, tmp_path: Path) -> None:
    given = [[*prompts(1, low=50, high=50)[0], *rest] for rest in prompts(6, low=1, high=40)]
    expected = [greedy(case, prompt, 20)[0] for prompt in given]
    tiers: dict[str, Any] = {"kv_disk_path": str(tmp_path), "kv_disk_bytes": 2**26, "kv_host_bytes": 2**24}
    sizes: dict[str, Any] = {"dtype": "float32", "block_size": 8, "kv_cache_bytes": 2**22, "max_model_len": 128}
    for is_second in (False, True):
        with LLM(str(folder(case)), skip_tokenizer=True, **sizes, **tiers) as model:
            results = model.generate(given, SamplingParams(temperature=0.0, max_tokens=20), use_tqdm=False)
        assert [result.outputs[0].token_ids for result in results] == expected
        assert not is_second or min(result.num_cached_tokens or 0 for result in results) > 0


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_a_scale_that_is_no_number_is_refused_by_name(dtype: str, tmp_path: Path) -> None:
    path, name = copied(stored("mxfp4/gpt-oss")[0], tmp_path / "broken"), "model.layers.1.mlp.experts.down_proj_scales"
    scales = load_file(path / WEIGHTS)[name]
    scales[2, 7, 1] = 255
    edit_weights(path, {name: scales})
    assert "layers.1.mlp.experts.2.down_proj.weight': row 7 has a scale" in refusal(path, dtype=dtype)


IMAGES = [(case, ("model.language_model.", "")) for case in SEEING]
IMAGES += [(case, ("language_model.model.", "language_model.")) for case in SEEING if case != "gemma4"]


@pytest.mark.parametrize(("case", "prefixes"), hardest_rows(IMAGES, [IMAGES[2], IMAGES[5]]))
def test_the_text_of_a_model_that_sees_is_the_model(case: str, prefixes: tuple[str, str], tmp_path: Path) -> None:
    path = text_of_images(case, tmp_path / "model", *prefixes)
    executor = executor_of(path)
    assert executor.info.fingerprint == executor_of(case).info.fingerprint
    assert preview(config_of(path)).memory == preview(config_of(case)).memory
    given = prompts(2, seed=3)
    assert Driver(executor).one_by_one(16, given) == [greedy(case, prompt, 16)[0] for prompt in given]


def test_a_stored_head_is_used_where_it_differs_from_the_embedding(tmp_path: Path) -> None:
    """transformers then ignores that the config ties them. An update with such a head is of another model."""
    path, prompt, tied = copied("qwen3", tmp_path / "model"), prompts(1)[0], executor_of("qwen3")
    table = load_file(path / WEIGHTS)["model.embed_tokens.weight"]
    edit_weights(path, {"lm_head.weight": table})
    tied.update_weights(str(path))
    assert executor_of(path).info.fingerprint == tied.info.fingerprint == executor_of("qwen3").info.fingerprint
    edit_weights(path, {"lm_head.weight": table.roll(1, 0)})
    with pytest.raises(WeightsError, match="another model: its tied_head is False"):
        tied.update_weights(str(path))
    driver, model = Driver(executor_of(path)), AutoModelForCausalLM.from_pretrained(path)
    assert driver.generate(driver.admit(prompt), count=8) == [generated("another head", model, prompt, 8)[0]]


def test_the_file_is_let_go_as_soon_as_it_is_loaded() -> None:
    """Held by a cycle until the collector came by, it took its size in memory once more."""
    path, _ = stored("gguf/mixed")
    gc.collect()
    gc.disable()
    try:
        executor = executor_of(path, dtype="auto")
        assert str(path) not in Path("/proc/self/maps").read_text()
        del executor
    finally:
        gc.enable()


def test_random_weights_need_no_codes_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((stored("mxfp4/gpt-oss")[0] / "config.json").read_text())
    config = ExecutorConfig(model=str(tmp_path), load_format="dummy", kv_cache_bytes=2**22)
    assert "weights as codes" not in UniprocExecutor(config).info.memory
