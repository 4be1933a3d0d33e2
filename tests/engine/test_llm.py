"""The offline API over the oracle executor: order, choices, limits, interrupts and errors. No torch."""

import os
import signal
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from penstock import RequestsFailed
from penstock.engine.config import ConfigError
from penstock.engine.front.llm import LLM
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.messages import Output, Submit
from penstock.engine.sampling_params import SamplingParams
from penstock.executor.protocol import StepResult
from tests.support.oracle_engine import oracle_llm
from tests.support.refusals import table
from tests.support.simulation import alone, submit
from tests.support.text_samples import sentencepiece

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with oracle_llm(folder) as llm:
        yield llm


def assert_idle_and_able(llm: LLM) -> None:
    metrics = llm.get_metrics()
    assert metrics["num_running"] == metrics["num_waiting"] == metrics["num_used_blocks"] == 0
    assert len(llm.generate([[1]], GREEDY, use_tqdm=False)) == 1


def test_results_come_in_the_order_of_the_prompts_whatever_finishes_first(llm: LLM) -> None:
    prompts = [[number % 50] * (1 + number % 40) for number in range(60)]
    params = [SamplingParams(temperature=0.0, max_tokens=1 + number % 20) for number in range(60)]
    results = llm.generate(prompts, params, use_tqdm=False)
    for prompt, param, result in zip(prompts, params, results, strict=True):
        assert result.prompt_token_ids == prompt
        assert result.outputs[0].token_ids == alone(submit("a", prompt, max_tokens=param.max_tokens or 0))[0]
        assert result.outputs[0].finish_reason == "length" and result.metrics.finished_s is not None


def test_parameters_of_many_prompts_are_checked_and_converted_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of thousands of ids takes milliseconds each time."""
    checked: list[SamplingParams] = []
    monkeypatch.setattr(SamplingParams, "check", lambda params, *_: checked.append(params))
    prompts = [[1, 2, number] for number in range(20)]
    first = SamplingParams(temperature=1.0, max_tokens=6, detokenize=False)
    second = SamplingParams(temperature=0.0, max_tokens=2, detokenize=False)
    drawn = llm.generate([[1, 2, 3]] * 20, first)
    assert checked == [first]
    assert len({tuple(each.outputs[0].token_ids) for each in drawn}) > 10, "each has a seed of its own"
    mixed = llm.generate(prompts, [first] * 10 + [second] * 10)
    assert checked == [first, first, second]
    assert [len(each.outputs[0].token_ids) for each in mixed] == [6] * 10 + [2] * 10


def test_more_prompts_than_the_queue_holds_are_handed_over_bit_by_bit(folder: Path) -> None:
    with oracle_llm(folder, max_queued_requests=3, max_num_seqs=2, max_num_batched_tokens=8) as llm:
        assert len(llm.generate([[1]] * 50, GREEDY, use_tqdm=False)) == 50


def test_an_embedding_has_the_width_of_the_model(llm: LLM) -> None:
    first, second = llm.embed([[1, 2, 3], [1, 2, 4]], use_tqdm=False)
    assert len(first.outputs.embedding) == llm.info.hidden_size and first.outputs != second.outputs
    assert sum(value * value for value in first.outputs.embedding) == pytest.approx(1.0)
    (plain,) = llm.embed([1, 2, 3], use_tqdm=False, normalize=False)
    assert sum(value * value for value in plain.outputs.embedding) != pytest.approx(1.0)
    with pytest.raises(InvalidRequest, match="pooling"):
        llm.embed([[1]], pooling=cast(Any, "max"))


def test_a_prompt_may_have_a_salt_which_keeps_its_blocks_apart(llm: LLM) -> None:
    def cached(salt: str) -> int:
        prompt = {"prompt_token_ids": [1, 2, 3] * 8, "cache_salt": salt}
        return llm.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens

    assert [cached("a"), cached("b"), cached("a")] == [0, 0, 16]


def test_a_seed_of_the_engine_repeats_requests_that_have_none(folder: Path) -> None:
    def sample(**options: Any) -> list[list[int]]:
        with oracle_llm(folder, **options) as llm:
            results = llm.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=8), use_tqdm=False)
            return [result.outputs[0].token_ids for result in results]

    assert sample(seed=5) == sample(seed=5) != sample(seed=6)
    assert len(set(map(tuple, sample(seed=5)))) == 4
    assert sample() != sample()


def test_a_share_of_a_gpu_that_is_not_there_is_said_to_be_without_effect(folder: Path) -> None:
    with pytest.warns(UserWarning, match="^gpu_memory_utilization: without effect: .* use kv_cache_bytes"):
        oracle_llm(folder, gpu_memory_utilization=0.5).shutdown()


@pytest.mark.parametrize(("prompt", "params", "message"), table(__file__, "offline input", **globals()))
def test_bad_input_names_field_and_limit_and_leaves_nothing(llm: LLM, prompt: Any, params: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(prompt, params, use_tqdm=False)
    assert_idle_and_able(llm)


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["Ctrl-C", "ignored"])
def handler(request: pytest.FixtureRequest) -> Iterator[object]:
    """Set the reaction to SIGINT, which is ignored in a background job of a script."""
    before = signal.signal(signal.SIGINT, request.param)
    yield request.param
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_ends_the_batch_between_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch, handler: object) -> None:
    collect = llm._running().executor.collect
    calls = iter(range(100))

    def interrupt() -> StepResult:
        if next(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return collect()

    monkeypatch.setattr(llm._running().executor, "collect", interrupt)
    if handler is signal.SIG_IGN:
        llm.generate([[1]] * 5, SamplingParams(max_tokens=50), use_tqdm=False)
        assert next(calls) > 10
    else:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1]] * 5, SamplingParams(max_tokens=50), use_tqdm=False)
        assert next(calls) < 10
    assert_idle_and_able(llm)
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_executor_that_fails_ends_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm._running().executor, "submit", Mock(side_effect=MemoryError("no room")))
    with pytest.raises(MemoryError):
        llm.generate([[1]], GREEDY, use_tqdm=False)
    with pytest.raises(RuntimeError, match="shut down"):
        llm.generate([[1]], GREEDY, use_tqdm=False)


def test_options_are_checked_before_the_model_is_looked_for(folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_seqs: there is no such option"):
        oracle_llm(folder / "missing", max_seqs=3)


def test_threads_take_turns(llm: LLM) -> None:
    def work(number: int) -> list[tuple[list[int], list[int], list[int]]]:
        found = []
        for size in range(1, 6):
            prompts = [[number, each] for each in range(size)]
            for prompt, result in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
                found.append((prompt, result.prompt_token_ids, result.outputs[0].token_ids))
            llm.embed(prompts, use_tqdm=False)
            llm.reset_prefix_cache()
        return found

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(work, range(4)))
    for each in answers:
        assert len(each) == 15
        assert all(prompt == given and ids == alone(submit("a", prompt))[0] for prompt, given, ids in each)


def test_failed_requests_are_named_and_other_results_are_there(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core = llm._running()
    step, ended = core.step, list[Output]()

    def submit_some(message: Submit) -> None:
        request = core.scheduler.submit(message)
        if message.tokens in (array("i", [2]).tobytes(), array("i", [4]).tobytes()):
            ended.append(core.scheduler.end(request, "error", "no such thing"))

    def step_and_end() -> list[Output]:
        outputs = [*step(), *ended]
        ended.clear()
        return outputs

    monkeypatch.setattr(core, "submit", submit_some)
    monkeypatch.setattr(core, "step", step_and_end)
    with pytest.raises(RequestsFailed, match=r"prompt 2 of 5 failed: no such thing \(1 more failed\)") as failed:
        llm.generate([[0], [1], [2], [3], [4]], GREEDY, use_tqdm=False)
    given = [each and each.prompt_token_ids for each in failed.value.results]
    assert given == [[0], [1], None, [3], None]
    assert [each.outputs[0].finish_reason for each in failed.value.results if each] == ["length"] * 3
    assert failed.value.errors == [None, None, "no such thing", None, "no such thing"]
    with pytest.raises(RequestsFailed, match="prompt 0 of 1 failed: no such thing$"):
        llm.embed([2], use_tqdm=False)


def test_a_callers_bar_that_fails_costs_the_call_and_not_the_engine(llm: LLM) -> None:
    bar = Mock()
    bar().update.side_effect = bar().close.side_effect = OSError("the screen is gone")
    with pytest.raises(OSError, match="the screen"):
        llm.generate([[1]] * 5, [msgspec.structs.replace(GREEDY, max_tokens=1 + n) for n in range(5)], use_tqdm=bar)
    assert_idle_and_able(llm)


@pytest.mark.parametrize(("fields", "message"), table(__file__, "offline parameters", np=np))
def test_invalid_parameters_are_refused_also_after_a_change(llm: LLM, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**fields)
    changed = SamplingParams()
    for field, value in fields.items():
        setattr(changed, field, value)
    with pytest.raises(InvalidRequest, match=message):
        llm.generate([[1]], changed, use_tqdm=False)


@pytest.mark.parametrize(("name", "hint"), table(__file__, "unknown sampling parameters"))
def test_an_unknown_sampling_parameter_is_answered_with_what_to_use(name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=f"^{name}: there is no such option; {hint}"):
        SamplingParams(**{name: 2})  # type: ignore[arg-type]


def test_none_among_parameters_stands_for_those_of_the_models_authors(llm: LLM) -> None:
    longer = msgspec.structs.replace(GREEDY, max_tokens=3)
    mixed = llm.generate([[1], [1]], [longer, None], use_tqdm=False)
    alone = llm.generate([[1]], use_tqdm=False)
    assert len(mixed[0].outputs[0].token_ids) == 3
    assert len(mixed[1].outputs[0].token_ids) == len(alone[0].outputs[0].token_ids) != 3


def test_numbers_of_other_libraries_give_what_pythons_own_give(llm: LLM) -> None:
    plain: dict[str, Any] = {"n": 2, "temperature": 0.5, "top_k": 3, "seed": 7, "max_tokens": 4, "min_p": 0.25}
    plain |= {"logprobs": 0, "stop_token_ids": [9], "banned_token_ids": [2, 3], "logit_bias": {3: 1.5}}
    types: list[Any] = [np.uint8, np.float32, np.array, np.int64, np.int16, Fraction, np.uint64, np.array, np.array]
    other: dict[str, Any] = {name: kind(each) for (name, each), kind in zip(plain.items(), types, strict=False)}
    params = SamplingParams(**other, logit_bias={np.int64(3): np.float64(1.5)})  # type: ignore[dict-item]
    prompts = [[1, 2, 3], [1, 2, 4]]
    expected = [each.outputs for each in llm.generate(prompts, SamplingParams(**plain))]
    arrays: list[Any] = [np.array(prompts), [np.array(ids, np.uint8) for ids in prompts]]
    for given in arrays:
        assert [each.outputs for each in llm.generate(given, params)] == expected
    single: list[Any] = [np.array([1, 2, 3]), [*np.array([1, 2, 3])], {"prompt_token_ids": np.array([1, 2, 3])}]
    for given in single:
        (one,) = llm.generate(given, params)
        assert one.outputs == expected[0] and one.prompt_token_ids == [1, 2, 3]
    params.check(50)
    assert {name: repr(getattr(params, name)) for name in plain} == {name: repr(each) for name, each in plain.items()}


def test_a_begun_message_goes_on_with_the_space_before_its_next_word(folder: Path) -> None:
    tokenizer = sentencepiece()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages[-1].content }}"}')
    params = SamplingParams(max_tokens=1, allowed_token_ids=tokenizer.encode("world", add_special_tokens=False).ids)
    with oracle_llm(folder, skip_tokenizer=False, hf_overrides={"vocab_size": tokenizer.get_vocab_size()}) as llm:
        chat = partial(llm.chat, [{"role": "assistant", "content": "hello"}], params, add_generation_prompt=False)
        assert [chat(continue_final_message=is_begun)[0].outputs[0].text for is_begun in (True, False)] == [
            " world",
            "world",
        ]


def test_choices_that_find_the_first_ones_blocks_have_saved_nothing(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=2, n=3)
    assert llm.generate([[7] * 40], params)[0].num_cached_tokens == 0
    assert llm.generate([[7] * 40], params)[0].num_cached_tokens == 32
