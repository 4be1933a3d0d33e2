"""Constrained requests in the engine core, over the oracle executor: waiting for grammars, masks, ends, preemption."""

import random
import re
import threading
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from penstock.engine.config import SpeculativeConfig
from penstock.engine.core.grammars import StepMasks
from penstock.engine.grammar.compiler import Compiler
from penstock.engine.grammar.masks import MaskFiller
from penstock.engine.grammar.rules import grammar_source
from penstock.engine.grammar.vocabulary import GrammarVocabulary
from penstock.engine.sampling_params import StructuredOutputs
from penstock.executor.protocol import GroupInfo, Sampling
from tests.engine.test_groups import FULL, STATE, WINDOW
from tests.support.fake_engine import EOS
from tests.support.grammar_rig import FORMS, Core, GatedCompiler, submit, text_of, vocabulary
from tests.support.refusals import hardest
from tests.support.simulation import BLOCK_SIZE, serve

DIGITS = StructuredOutputs(regex="[0-9]{3,5}")
LETTERS = StructuredOutputs(regex="[a-z]{30}")


def test_an_end_that_the_grammar_allows_ends_even_if_ends_are_ignored() -> None:
    ends = set()
    for seed in range(20):
        world = Core()
        sampling = Sampling(temperature=1.0, seed=seed)  # no stop ids: ignore_eos
        world.submit(submit("a", [1, 2], StructuredOutputs(regex="[ab]+"), 60, sampling=sampling))
        world.run()
        ends.add((world.last("a").finish_reason, world.last("a").stop_token))
        assert EOS not in world.tokens("a")[:-1]
    assert ("stop", EOS) in ends


def test_min_tokens_holds_an_end_back_until_a_grammar_ends() -> None:
    sampling = Sampling(temperature=0.0, stop_ids=(EOS,), min_tokens=8)
    world = Core()
    world.submit(submit("a", [1, 2], StructuredOutputs(regex="[ab]+"), 30, sampling=sampling))
    world.submit(submit("b", [3], StructuredOutputs(regex="[ab]{1,4}"), 30, sampling=sampling))
    # Ends at once when only an end may follow, though the lexer learns that late.
    late = StructuredOutputs(grammar='start: "k" TAIL?\nTAIL: /z/ & /y/')
    world.submit(submit("c", [3], late, 30, sampling=sampling))
    world.run()
    assert len(world.tokens("a")) >= 8
    assert len(world.tokens("b")) == 4 and world.last("b").finish_reason == "stop"
    assert text_of(world.tokens("c")) == "k" and world.last("c").finish_reason == "stop"


def test_a_request_waits_for_its_grammar_while_others_run() -> None:
    compiler = GatedCompiler(is_vocabulary_gated=True)
    world = Core(compiler=compiler)
    world.submit(submit("slow", [1, 2, 3], DIGITS))
    world.submit(submit("aborted", [1, 2, 3], DIGITS))
    world.submit(submit("free", [4, 5, 6], None, 5))
    assert world.core.stats().num_waiting == 3
    while world.end("free") is None:
        world.step()
    assert world.outputs["slow"] == [] and list(world.core.scheduler.held)
    world.abort("aborted")
    compiler.gate.set()
    world.run()
    assert world.last("aborted").finish_reason == "abort"
    assert text_of(world.tokens("slow")).isdigit() and world.last("slow").finish_reason == "stop"


def assert_fails_alone(world: Core, outputs: StructuredOutputs, error: str, other: StructuredOutputs | None) -> None:
    """Run a request that fails with this error, and another that does not."""
    world.submit(submit("bad", [2], outputs))
    world.submit(submit("good", [1], other))
    world.run()
    last = world.last("bad")
    assert last.finish_reason == "error" and error in str(last.error)
    assert last.is_refusal is (other is not None), "a refusal is the fault of the grammar"
    assert world.last("good").finish_reason == ("length" if other is None else "stop")


def test_a_grammar_that_takes_too_long_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GatedCompiler()
    compiler.start(grammar_source(LETTERS)).result.result(60)  # so that the limit is for the other grammar alone
    monkeypatch.setattr("penstock.engine.core.grammars.COMPILE_LIMIT_S", 0.05)
    error = "the grammar cannot be compiled: it was not compiled within 0.05 s"
    assert_fails_alone(Core(compiler=compiler), StructuredOutputs(regex="slow"), error, LETTERS)
    compiler.gate.set()


def test_a_grammar_that_costs_too_much_in_the_middle_fails_its_request_alone() -> None:
    properties = {f"p{number}": {"type": "string"} for number in range(3000)}  # any of them may come next
    large = StructuredOutputs(json={"type": "object", "properties": properties})
    assert_fails_alone(Core(), large, "grammar", LETTERS)


class Panic(BaseException):
    """A panic of Rust in Python, which is no Exception."""


@pytest.mark.parametrize("error", [OSError("no such file"), Panic("index out of bounds")], ids=repr)
def test_only_constrained_requests_need_the_vocabulary(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    load = vocabulary
    if isinstance(error, Panic):
        monkeypatch.setattr("llguidance.LLMatcher", Mock(side_effect=error))
    else:
        load = Mock(side_effect=error)
    assert_fails_alone(Core(compiler=Compiler(load)), DIGITS, f"{type(error).__name__}: {error}", None)


@pytest.mark.parametrize("name", ["masks", "grammars"])
def test_without_a_thread_only_constrained_requests_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    world = Core(compiler=Compiler(vocabulary))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        if name == "grammars":
            world.core.constraints.warm()  # as an idle core does
        assert_fails_alone(world, DIGITS, "can't start new thread", None)
    world.submit(submit("later", [1], DIGITS))
    world.run()
    assert world.last("later").finish_reason == "stop"


def test_a_new_request_with_the_id_of_an_aborted_one_does_not_get_its_grammar() -> None:
    compiler = GatedCompiler(is_vocabulary_gated=True)
    world = Core(compiler=compiler)
    world.submit(submit("a", [1], DIGITS))
    world.abort("a")
    world.submit(submit("a", [1], StructuredOutputs(choice=["other"])))
    compiler.gate.set()
    world.run()
    assert text_of(world.tokens("a")) == "other"


ALL_KINDS = (FULL, WINDOW, GroupInfo("state", pages=5))
CALL = StructuredOutputs(grammar='start: "call(" /[a-z]{3,9}/ ", with=[" /[0-9]{1,6}/ "], and nothing else)"')
CALLED = re.compile(r"call\([a-z]{3,9}, with=\[\d{1,6}\], and nothing else\)")


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_tokens_that_a_grammar_forces_are_computed_in_one_step_and_not_sampled(
    max_in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masks of a single step are filled in another thread, so that it computes meanwhile."""
    threads, fill = list[threading.Thread](), MaskFiller.fill

    def noted(*arguments: Any) -> StepMasks:
        threads.append(threading.current_thread())
        return fill(*arguments)

    monkeypatch.setattr(MaskFiller, "fill", noted)
    world = Core(max_in_flight=max_in_flight)
    world.submit(submit("a", [1, 2], CALL, 80))
    world.run()
    stats, num_tokens = world.core.stats(), len(world.tokens("a"))
    assert CALLED.fullmatch(text_of(world.tokens("a")))
    assert stats.generation_tokens == num_tokens and stats.forced_tokens >= len("all(, with=[], and nothing else)") - 4
    assert stats.num_steps <= num_tokens - stats.forced_tokens + max_in_flight
    assert max(len(output.tokens) for output in world.outputs["a"]) > 15
    assert (threading.main_thread() in threads) == (max_in_flight > 1)


@pytest.mark.parametrize("max_in_flight", hardest([1, 2], 2))
@pytest.mark.parametrize("groups", hardest([(FULL,), (FULL, STATE), ALL_KINDS], ALL_KINDS))
def test_forced_and_drafted_tokens_change_no_answer(
    groups: tuple[GroupInfo, ...], max_in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request is compared with itself alone, where every token is sampled in a row of its own."""
    monkeypatch.setattr("penstock.engine.core.drafts.LEAST_TRUST", 1)
    least = sum(group.most_pages(128, 16, BLOCK_SIZE) for group in groups)
    num_wrong = num_preempted = num_complete = 0
    for seed in range(2):
        rng = random.Random(seed)
        world = Core(least + 12, max_in_flight, groups=groups, drafts=SpeculativeConfig(method="ngram"))
        shared = rng.choices(range(32, 120), k=30)
        messages = []
        for number in range(24):
            allowed = () if number % 2 else rng.choice([(65, 66), (65, 66), (65,)])
            sampling = Sampling(temperature=1.0, seed=number % 5, stop_ids=(EOS,), allowed_ids=allowed)
            prompt, length = shared[: rng.randint(1, 30)], rng.choice([6, 30, 80])
            outputs, pattern = (None, None) if allowed else rng.choice([(CALL, CALLED), (CALL, CALLED), *FORMS])
            messages.append((submit(f"r{number}", prompt, outputs, length, sampling=sampling), pattern))
        waiting, aborted = [message for message, _ in messages], set()
        while waiting or world.core.has_work():
            if waiting and rng.random() < 0.4:
                world.submit(waiting.pop())
            if rng.random() < 0.02 and world.core.scheduler.running:
                aborted.add(next(iter(world.core.scheduler.running)).message.request_id)
                for name in aborted:
                    world.abort(name)
            world.step()
        stats = world.core.stats()
        assert stats.forced_tokens and stats.prefix_hits and stats.accepted_tokens and stats.num_used_blocks == 0
        num_wrong += stats.draft_tokens - stats.accepted_tokens
        num_preempted += stats.num_preemptions
        for message, pattern in messages:
            alone = Core(max_in_flight=1, groups=groups)
            sampling = msgspec.structs.replace(message.sampling, logprobs=0)
            alone.submit(msgspec.structs.replace(message, sampling=sampling))
            alone.run()
            got, expected = world.tokens(message.request_id), alone.tokens(message.request_id)
            assert alone.core.stats().forced_tokens == 0
            assert got == (expected[: len(got)] if message.request_id in aborted else expected)
            if pattern is not None and world.last(message.request_id).finish_reason == "stop":
                assert pattern.fullmatch(text_of(got))
                num_complete += 1
    assert num_complete > 5 and num_wrong > 0 and num_preempted > 0


def test_a_stop_token_of_the_user_ends_an_answer_within_forced_tokens() -> None:
    world = Core()
    world.submit(submit("a", [1], CALL, 80, sampling=Sampling(temperature=0.0, stop_ids=(EOS, ord("=")))))
    world.run()
    assert text_of(world.tokens("a")).endswith(", with=") and world.last("a").stop_token == ord("=")
    assert world.core.stats().forced_tokens > 0


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_using_up_a_grammar_harms_no_other_request(monkeypatch: pytest.MonkeyPatch, max_in_flight: int) -> None:
    """All copies share the states of a lexer, of which a long text takes many."""
    limits = {"max_lexer_states": 400, "verbose_errors": False}
    monkeypatch.setattr("penstock.engine.grammar.compiler.LIMITS", limits)
    compiler = Compiler(vocabulary)
    world = Core(max_in_flight=max_in_flight, compiler=compiler)
    text = StructuredOutputs(json={"type": "string", "maxLength": 5000})
    for number in range(4):  # each takes some of the states, all together more than there are
        sampling = Sampling(temperature=1.0, seed=number)
        world.submit(submit(f"r{number}", [40 + number], text, 60, sampling=sampling))
    world.submit(submit("long", [41], text, 120, sampling=Sampling(temperature=1.0, seed=9)))
    world.run()
    world.submit(submit("after", [42], text, 60, sampling=Sampling(temperature=1.0, seed=8)))
    world.run()
    for name in ("r0", "r1", "r2", "r3", "after"):
        assert world.last(name).finish_reason in ("length", "stop"), world.last(name)
    compiler.check()
    compiler.close()


def test_the_vocabulary_is_loaded_once_when_the_core_is_first_idle() -> None:
    is_loaded, loads = threading.Event(), []

    def load() -> GrammarVocabulary:
        loads.append(threading.current_thread())
        is_loaded.set()
        return vocabulary()

    world = Core(compiler=Compiler(load))
    serve(world.core, [submit("r", [1, 2, 3], None, 2)])
    assert not is_loaded.is_set(), "a core that was never idle loaded it"
    serve(world.core, [], [], [submit("s", [1, 2], None, 2)], [])
    assert is_loaded.wait(60)
    world.core.close()
    assert len(loads) == 1 and loads[0] is not threading.main_thread()
