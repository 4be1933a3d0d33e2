"""Grammars are compiled in threads: some are kept, some refused, and none brings the process down. A hundred tools of the size
that MCP servers have stay within the limits. Masks are filled by one thread or many, into buffers that take turns."""

import json
import os
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from llguidance import LLExecutor, LLMatcher, LLParserLimits

from penstock.engine.core import grammars
from penstock.engine.core.grammars import GrammarRefused, StepMasks
from penstock.engine.grammar import compiler as compiler_module
from penstock.engine.grammar import masks as masks_module
from penstock.engine.grammar.compiler import Compiler
from penstock.engine.grammar.library import LIMITS
from penstock.engine.grammar.masks import MaskFiller
from penstock.engine.grammar.matcher import Matcher
from penstock.engine.grammar.rules import grammar_source
from penstock.engine.grammar.tool_calls import grammar
from penstock.engine.grammar.validator import Validator
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.sampling_params import MAX_GRAMMAR_CHARS, StructuredOutputs
from penstock.engine.text.tools.call_kinds import Calls, ToolSpec
from tests.support.call_writers import FORMS
from tests.support.fake_engine import EOS, compile_within_limits
from tests.support.grammar_rig import COMPILER, VOCAB_SIZE, GatedCompiler, matcher, vocabulary
from tests.support.refusals import cases, hardest
from tests.support.running_server import until


def source_of(regex: str) -> str:
    return grammar_source(StructuredOutputs(regex=regex))


SOURCE = source_of("a+")


def any_of(number: int) -> dict[str, Any]:
    """Return a schema whose parts need one of four properties each: a grammar would list the product of all."""
    parts = [[f"p{part}_{i}" for i in range(4)] for part in range(number)]
    return {"allOf": [{"anyOf": [{"properties": {n: {"type": "string"}}, "required": [n]} for n in p]} for p in parts]}


def chain(num_chars: int) -> str:
    """Return rules within each other, as deep as the text allows."""
    count = num_chars // 14
    return "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(count)) + f'\nr{count}: "x"'


BOMBS: dict[str, dict[str, Any]] = dict(
    cases(__file__, "bombs", any_of=any_of, chain=chain, MAX_GRAMMAR_CHARS=MAX_GRAMMAR_CHARS)
)


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_or_harmless(name: str) -> None:
    """Compiled or not: the process lives, the next grammar is served, and the answer is bounded."""
    try:
        compile_within_limits(COMPILER, grammar_source(StructuredOutputs(**BOMBS[name])))
    except (InvalidRequest, GrammarRefused) as error:
        assert len(str(error)) < 1000
    compile_within_limits(COMPILER, SOURCE)


@pytest.mark.parametrize("name", ["deep rules", "deep terminals", "deep references"])
async def test_a_grammar_as_deep_as_its_text_is_long_is_validated(name: str) -> None:
    source = grammar_source(StructuredOutputs(**BOMBS[name]))
    assert len(await Validator().refusal(source) or "") < 1000


def test_the_longest_chain_of_optional_parts_is_refused_before_it_is_worked_on() -> None:
    compiler = Compiler(vocabulary)
    job = compiler.start(source_of("x*" * (MAX_GRAMMAR_CHARS // 2)))
    assert isinstance(job.result.exception(60), GrammarRefused)  # without the limit it takes a quarter of an hour
    compiler.close()


def test_grammars_that_were_given_up_delay_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GatedCompiler()
    monkeypatch.setattr(grammars, "COMPILE_LIMIT_S", 0.05)
    for number in range(compiler_module.NUM_THREADS + 1):
        with pytest.raises(GrammarRefused, match="not compiled within"):
            compile_within_limits(compiler, source_of(f"slow{number}"))
    monkeypatch.setattr(grammars, "COMPILE_LIMIT_S", 30)
    compile_within_limits(compiler, source_of("fast"))
    before = {thread for thread in threading.enumerate() if thread.name == "grammars"}
    compiler.gate.set()
    compile_within_limits(compiler, source_of("slow0"))
    assert len(before) > compiler_module.NUM_THREADS
    compiler.close()


def test_a_thread_that_cannot_be_replaced_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "NUM_THREADS", 1)
    compiler = GatedCompiler(is_vocabulary_gated=True)
    job = compiler.start(SOURCE)
    until(job.result.running)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        compiler.give_up(job)
    compiler.gate.set()
    compiler.start(source_of("b+")).result.result(60)
    compiler.close()


def test_waiting_for_the_vocabulary_does_not_count_against_a_grammar() -> None:
    compiler = GatedCompiler(is_vocabulary_gated=True)
    job = compiler.start(SOURCE)
    assert job.began_s is None and job.limit_passed() is None
    compiler.gate.set()
    job.result.result(60)
    assert job.began_s is not None
    compiler.close()


def test_the_least_recently_used_grammars_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_KEPT", 3)
    compiler = Compiler(vocabulary)
    sources = [source_of(f"a{{{n}}}") for n in range(5)]
    for source in sources[:3]:
        compiler.start(source).result.result(60)
    assert compiler.cached(sources[0]) is not None
    for source in sources[3:]:
        compiler.start(source).result.result(60)
        compiler.check()
    assert [compiler.cached(source) is not None for source in sources] == [True, False, False, True, True]
    monkeypatch.setattr(compiler_module, "MAX_KEPT_CHARS", 150)
    compiler.start(source_of("b" * 200)).result.result(60)
    compiler.check()
    assert len(compiler._kept) == 1


def test_threads_end_when_the_compiler_is_closed() -> None:
    before = {*threading.enumerate()}
    compiler = Compiler(vocabulary)
    for regex in "abc":
        compiler.start(source_of(regex)).result.result(60)
    assert len({*threading.enumerate()} - before) == compiler_module.NUM_THREADS
    compiler.close()
    until(lambda: not {*threading.enumerate()} - before)


def test_a_grammar_that_no_text_keeps_to_is_refused_in_words() -> None:
    for endless in ("start: a\na: a", "start: A\nA: /a/ & /b/"):
        with pytest.raises(GrammarRefused, match="no text at all can keep to it"):
            compile_within_limits(COMPILER, grammar_source(StructuredOutputs(grammar=endless)))


NUM_TOOLS = 100
PROPERTIES: dict[str, Any] = json.loads(Path(__file__).with_name("many_tools.json").read_text())
ABOUT = "What the server does with it, in a sentence or two, as the descriptions of real servers have them. " * 3


def parameters(number: int) -> dict[str, Any]:
    properties = {**PROPERTIES, f"cursor_{number}": {"type": ["string", "null"], "format": "cursor"}}
    described = {name: {**schema, "description": ABOUT} for name, schema in properties.items()}
    return {"type": "object", "properties": described, "required": ["owner", "repo"], "additionalProperties": False}


@pytest.mark.parametrize("is_strict", hardest([False, True], True))
@pytest.mark.parametrize("must", hardest([False, True], False))
@pytest.mark.parametrize("name", hardest(FORMS, "hermes", "qwen3_coder", "gemma4", "deepseek_v3", "llama3_json"))
def test_a_hundred_tools_of_a_realistic_size_compile(name: str, must: bool, is_strict: bool) -> None:
    tools = [ToolSpec(f"mcp_server_{number}_call", parameters(number), is_strict) for number in range(NUM_TOOLS)]
    source = grammar({}, Calls(FORMS[name], tools, must, many=True))
    assert len(source) <= MAX_GRAMMAR_CHARS
    compiled = LLMatcher(vocabulary().backend, source, log_level=0, limits=LLParserLimits(**LIMITS))
    assert not compiled.is_error(), compiled.get_error()[:300]


def allowed(masks: StepMasks, index: int) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(masks.bits[index].view(np.uint8), bitorder="little")).tolist())


def after(text: str, **outputs: object) -> Matcher:
    state = matcher(**outputs)
    assert all(state.advance([byte]) for byte in text.encode())
    return state


@pytest.fixture
def filler() -> MaskFiller:
    return MaskFiller(60)


@pytest.mark.parametrize("pool_rows", [1, 1000])
def test_a_set_bit_is_a_token_that_may_follow(
    filler: MaskFiller, pool_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks_module, "POOL_ROWS", pool_rows)
    rows = [(3 * number, after("1" * (number % 4), regex="[0-9]{2,4}")) for number in range(60)]
    digits = set(b"0123456789")
    for masks in (filler.fill(rows), filler.fill(rows)):
        assert masks.rows.tolist() == [row for row, _ in rows] and masks.rows.dtype == np.int32
        for index in range(60):
            assert allowed(masks, index) == (digits if index % 4 < 2 else digits | {EOS})
        assert masks.ended == [] and masks.errors == {}


def test_the_buffer_of_the_step_before_is_left_alone(filler: MaskFiller) -> None:
    first = filler.fill([(0, after("", regex="a|b"))])
    second = filler.fill([(0, after("", regex="c"))])
    assert allowed(first, 0) == set(b"ab") and allowed(second, 0) == set(b"c")
    assert not np.shares_memory(first.bits, second.bits)


def test_a_row_after_which_only_an_end_may_follow_has_ended(filler: MaskFiller) -> None:
    late = after("k", grammar='start: "k" TAIL?\nTAIL: /z/ & /y/')
    masks = filler.fill([(5, late), (7, after("", regex="a"))])
    assert masks.ended == [5] and masks.errors == {}
    assert allowed(masks, 0) >= set(range(VOCAB_SIZE)), "what the executor samples there is not read"


def test_a_matcher_that_has_failed_is_reported_and_its_row_allows_all(filler: MaskFiller) -> None:
    broken = matcher(regex="a+")
    assert not broken.advance([ord("b")])
    masks = filler.fill([(0, broken), (1, after("", regex="a"))])
    assert list(masks.errors) == [0] and masks.errors[0]
    assert allowed(masks, 0) >= set(range(VOCAB_SIZE)) and allowed(masks, 1) == {ord("a")}


def test_masks_are_filled_by_no_more_threads_than_the_process_may_use(
    filler: MaskFiller, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_pool = Mock(side_effect=LLExecutor)
    monkeypatch.setattr("llguidance.LLExecutor", open_pool)
    monkeypatch.setattr(masks_module, "POOL_ROWS", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert allowed(filler.fill([(0, after("", regex="a"))]), 0) == {ord("a")}
    open_pool.assert_called_once_with(1)
