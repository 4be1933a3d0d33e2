"""Answers with drafts of a model's own layer, over `LLM`: they are the same as without, and most of the drafts are right.

The model in tests/support/draft_model continues two counters whose text never repeats (its README.md says how it was trained).
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file

from penstock import LLM, LoRARequest, SamplingParams
from penstock.engine import sampling_params
from penstock.engine.core.drafts import StepCost
from penstock.engine.front.results import RequestOutput
from tests.support.adapters import Adapter
from tests.support.checkpoints import WEIGHTS
from tests.support.checkpoints import prompts as random_prompts
from tests.support.draft_models import draft_model
from tests.support.refusals import cases, hardest_rows

MODEL = Path(__file__).parents[1] / "support/draft_model"
# No text of these tests repeats 60 tokens, so all drafts are the layer's.
MTP = {"method": "mtp", "num_speculative_tokens": 2, "prompt_lookup_min": 60, "prompt_lookup_max": 60}
BLOCK = 16
FIRST, SECOND = 256, 353  # the tokens of " 0" and ":0"
Params = dict[str, Any]
FIELDS: Params = {"temperature": 0.7, "seed": 3, "logprobs": 1, "max_tokens": 48, "ignore_eos": True}

# Sampling parameters, each alone and all together in one batch. " 7:" ends within a token; a grammar and a penalty do not
# draft; 0 to 255 are bytes, which the model never writes.
ANSWERS: dict[str, Params] = dict(cases(__file__, "answers with drafts", **vars(sampling_params) | globals()))


def counting(start: int, length: int) -> list[int]:
    """Return the tokens of two counters."""
    pairs = (
        (FIRST + (start + i * (1 + start % 5)) % 97, SECOND + (7 * start + i * (1 + start % 4)) % 101) for i in count()
    )
    return [token for pair in islice(pairs, (length + 1) // 2) for token in pair][:length]


def opened(path: Path = MODEL, *, has_drafts: bool, **options: Any) -> LLM:
    speculation: dict[str, Any] = {"speculative_config": MTP} if has_drafts else {}
    options = {"device": "cpu", "kv_cache_bytes": 2**24, "block_size": BLOCK, "max_num_seqs": 32, "seed": 1} | options
    return LLM(str(path), **speculation | options, skip_tokenizer=path is not MODEL)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 40} | fields)


def contents(results: Sequence[RequestOutput]) -> list[Any]:
    """Return all of the results that may not depend on drafts."""
    return [
        (each.prompt_logprobs, [msgspec.structs.replace(output, weights_versions=None) for output in each.outputs])
        for each in results
    ]


@pytest.fixture(scope="module", autouse=True)
def always_pays() -> Iterator[None]:
    """Draft in all steps but a few: whether it pays is measured, and tests of answers must not depend on times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepCost, "pays", lambda *_: True)
        yield


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[LLM, LLM]]:
    with opened(has_drafts=True) as drafting, opened(has_drafts=False, enable_prefix_caching=False) as plain:
        yield drafting, plain


def test_more_than_half_of_the_drafts_are_accepted(pair: tuple[LLM, LLM]) -> None:
    drafting, before = pair[0], pair[0].get_metrics()
    results = drafting.generate([counting(start, 8) for start in range(20, 26)], params(max_tokens=100), use_tqdm=False)
    for start, result in enumerate(results, 20):
        assert [*result.prompt_token_ids, *result.outputs[0].token_ids] == counting(start, 108)
    sent, accepted = (drafting.get_metrics()[name] - before[name] for name in ("draft_tokens", "accepted_tokens"))
    assert 2 * accepted > sent > 200


def test_drafts_are_right_again_after_steps_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer stores nothing in such steps. The pages there may hold states of recurrent layers, which are no numbers
    of its own dtype."""
    monkeypatch.setattr("penstock.engine.core.drafts.PERIOD", 20)  # four of these steps have no drafts
    with opened(has_drafts=True) as llm:
        for start in range(8):
            assert accepted_share(llm, counting(start, 8), counting(start + 20, 8)) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_the_same_with_drafts(pair: tuple[LLM, LLM], name: str) -> None:
    prompts = [counting(3, 9), counting(11, 2 * BLOCK), random_prompts(1)[0], counting(30, 45)]
    drafted, plain = (contents(llm.generate(prompts, params(**ANSWERS[name]), use_tqdm=False)) for llm in pair)
    assert drafted == plain


def test_all_kinds_of_requests_share_a_batch(pair: tuple[LLM, LLM]) -> None:
    chosen = [params(**fields) for fields in ANSWERS.values()]
    prompts = [counting(start, 5 + 3 * start) for start in range(len(chosen))]
    drafted, plain = (contents(llm.generate(prompts, chosen, use_tqdm=False)) for llm in pair)
    assert drafted == plain


def generate(llm: LLM, *prompts: list[int]) -> list[RequestOutput]:
    return llm.generate(list(prompts), params(**FIELDS), use_tqdm=False)


def accepted_share(llm: LLM, *prompts: list[int]) -> float:
    """Return the share of the drafts that were right after these prompts."""
    before = llm.get_metrics()
    generate(llm, *prompts)
    sent, accepted = (llm.get_metrics()[name] - before[name] for name in ("draft_tokens", "accepted_tokens"))
    assert sent > 20 * len(prompts)
    return accepted / sent


def preempted(llm: LLM) -> list[RequestOutput]:
    results = generate(llm, *(counting(start, 40) for start in range(12)))
    assert llm.get_metrics()["num_preemptions"] > 0
    return results


def hits(llm: LLM) -> list[RequestOutput]:
    """Share blocks whose last entries of the draft layer depend on another next token, or on none."""
    prompt, results = counting(9, 3 * BLOCK), generate(llm, counting(9, 3 * BLOCK))
    for more in ([], [FIRST + 1], [SECOND], counting(4, BLOCK), []):
        results += generate(llm, prompt + more, prompt[: 2 * BLOCK] + more, prompt[: 2 * BLOCK + 3] + more)
        assert sum(result.num_cached_tokens for result in results[-3:]) >= 3 * BLOCK
    assert accepted_share(llm, prompt, prompt[: 2 * BLOCK]) > 0.5
    return results


def long(llm: LLM) -> list[RequestOutput]:
    """Fill the model's whole context. The drafts are as good at its end as at its beginning."""
    shares = [accepted_share(llm, counting(8, length)) for length in (10, 1024 - 48)]
    assert min(shares) > 0.5
    return generate(llm, *(counting(start, 1024 - start) for start in (1, 2, 3, 16, 17, 18, 30)))


def updated(llm: LLM) -> list[RequestOutput]:
    """Update the weights to those with another draft layer and back, and let the engine sleep."""
    prompts = [counting(start, 20) for start in range(3)]
    results = generate(llm, *prompts)
    tensors = load_file(MODEL / WEIGHTS)
    llm.update_weights(tensors | {"mtp.fc.weight": -tensors["mtp.fc.weight"]})
    assert accepted_share(llm, *prompts) < 0.3
    results += generate(llm, *prompts)
    llm.sleep(1)
    llm.wake_up()
    results += generate(llm, *prompts)
    llm.sleep(2)
    llm.wake_up(["weights"])
    llm.update_weights(MODEL)
    llm.wake_up(["kv_cache"])
    assert accepted_share(llm, *prompts) > 0.5
    return results + generate(llm, *prompts)


def repeated(llm: LLM) -> list[RequestOutput]:
    """Repeat text now and then, which is drafted without the layer."""
    phrases = random_prompts(3, high=8)
    return generate(llm, *(phrase * 4 for phrase in phrases), *(counting(5, 30) + phrase * 3 for phrase in phrases))


SMALL_STEPS = {"max_num_batched_tokens": 32, "max_num_seqs": 8}
SCENES = cases(__file__, "scenes with drafts", **vars(sampling_params) | globals())


@pytest.mark.parametrize(("run", "options"), hardest_rows(SCENES, SCENES[:1]))
def test_answers_are_the_same_with_drafts_after(
    run: Callable[[LLM], list[RequestOutput]], options: dict[str, Any], pair: tuple[LLM, LLM]
) -> None:
    with opened(has_drafts=True, **options) as llm:
        results = run(llm)
    assert contents(results) == contents(generate(pair[1], *(result.prompt_token_ids for result in results)))


@pytest.mark.slow
def test_blocks_on_the_disk_serve_drafts_after_a_restart(pair: tuple[LLM, LLM], tmp_path: Path) -> None:
    prompts = [counting(start, 70) for start in range(4)]
    tiers: dict[str, Any] = {"kv_host_bytes": 2**22, "kv_disk_path": str(tmp_path), "kv_disk_bytes": 2**26}
    for num_cached in (0, 64):
        with opened(has_drafts=True, **tiers) as llm:
            results = generate(llm, *prompts)
            assert [result.num_cached_tokens for result in results] == [num_cached] * 4
            assert contents(results) == contents(generate(pair[1], *prompts))
            assert accepted_share(llm, *prompts) > 0.5


WAYS: dict[str, Params] = dict(cases(__file__, "ways to run drafts"))
RANDOM = [("qwen3.5", "adapters"), *(("glm4-moe", way) for way in WAYS)]


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(("case", "way"), hardest_rows(RANDOM, RANDOM[:1]))
def test_random_models_answer_the_same_with_drafts(case: str, way: str, tmp_path: Path) -> None:
    path, chosen, found = draft_model(case, tmp_path / "model").path, None, []
    if way == "adapters":
        chosen = [None, LoRARequest("a", 1, str(Adapter(case, tmp_path / "adapter", 3).path))] * 3
    for has_drafts in (True, False):
        with opened(path, has_drafts=has_drafts, dtype="float32", **WAYS[way]) as llm:
            results = llm.generate(random_prompts(6), params(**FIELDS), use_tqdm=False, lora_request=chosen)
            assert (llm.get_metrics()["draft_tokens"] > 0) == has_drafts
            found.append(contents(results))
    assert found[0] == found[1]
