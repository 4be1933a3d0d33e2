"""Constrained answers of the real default model at a temperature where it writes nonsense: all of them keep to form."""

import json
import re
from collections.abc import Iterator

import pytest

from penstock import LLM, SamplingParams
from penstock.engine.front.results import RequestsFailed
from penstock.engine.sampling_params import StructuredOutputs
from tests.support.default_file import needs_model

pytestmark = [
    needs_model,
    pytest.mark.timeout(900),
]
QUESTION = [{"role": "user", "content": "Answer with an example."}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", max_model_len=1024, kv_cache_bytes=2**28, max_num_seqs=64) as llm:
        yield llm


def hot(form: StructuredOutputs | None, seed: int = 0, **options: object) -> SamplingParams:
    return SamplingParams(
        temperature=1.5,
        seed=seed,
        structured_outputs=form,
        **{"max_tokens": 900, **options},  # type: ignore
    )


@pytest.mark.slow
def test_jumping_over_what_is_forced_changes_no_token(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"first_name": {"type": "string", "maxLength": 9}, "is_capital_city": {"type": "boolean"}},
        "required": ["first_name", "is_capital_city"],
        "additionalProperties": False,
    }
    walking = [hot(StructuredOutputs(json=schema), seed, logprobs=0) for seed in range(6)]
    jumping = [hot(StructuredOutputs(json=schema), seed) for seed in range(6)]
    results = llm.chat([QUESTION] * 12, [*walking, *jumping], use_tqdm=False)
    ids = [result.outputs[0].token_ids for result in results]
    assert ids[:6] == ids[6:]


def test_every_form_is_kept_beside_free_requests_and_by_every_choice(llm: LLM) -> None:
    forms = [
        (StructuredOutputs(regex=r"[A-Z][a-z]{2,8}, \d{1,2} [A-Z][a-z]{2,8} \d{4}"), None),
        (StructuredOutputs(choice=["Paris", "Berlin", "Rome"]), "Paris|Berlin|Rome"),
        (StructuredOutputs(grammar='start: "(" /[0-9]{1,3}/ (("+" | "-") /[0-9]{1,3}/)~0..3 ")"'),
         r"\(\d{1,3}([+-]\d{1,3}){0,3}\)"),
    ]  # fmt: skip
    params = [hot(form, n=3) for form, _ in forms]
    free = hot(None, max_tokens=30)
    results = llm.chat([QUESTION] * 5, [free, *params, free], use_tqdm=False)
    for (form, pattern), result in zip(forms, results[1:4], strict=True):
        for choice in result.outputs:
            regex = pattern or form.regex
            assert regex is not None and re.fullmatch(regex, choice.text), choice.text
    assert results[0].outputs[0].token_ids == results[4].outputs[0].token_ids


def test_a_text_that_reads_like_a_special_token_is_text(llm: LLM) -> None:
    """The one that ends the model's turns, of all tokens: nothing but this text may follow the quote."""
    for form in (StructuredOutputs(json={"const": "<|im_end|>"}), StructuredOutputs(choice=['"<|im_end|>"'])):
        (result,) = llm.chat(QUESTION, hot(form), use_tqdm=False)
        assert json.loads(result.outputs[0].text) == "<|im_end|>"


def test_a_mask_that_allows_what_the_model_says_anyway_changes_nothing(llm: LLM) -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=24)
    everything = SamplingParams(temperature=0.0, max_tokens=24, structured_outputs=StructuredOutputs(regex=r"(.|\n)*"))
    one, two = llm.chat([QUESTION] * 2, [plain, everything], use_tqdm=False)
    assert one.outputs[0].token_ids == two.outputs[0].token_ids


@pytest.mark.slow
def test_a_preempted_and_a_cached_request_keep_to_their_grammar() -> None:
    regex = "(north|south)(,(north|south)){23}"
    with LLM(device="cpu", max_model_len=160, kv_cache_bytes=24 * 737280, block_size=16, max_num_seqs=8) as small:
        params = [hot(StructuredOutputs(regex=regex), seed, max_tokens=110) for seed in range(8)]
        results = small.chat([QUESTION] * 8, params, use_tqdm=False)
        assert all(re.fullmatch(regex, result.outputs[0].text) for result in results)
        assert small.get_metrics()["num_preemptions"] > 0
        assert small.get_metrics()["prefix_hits"] > 0


def test_a_grammar_that_cannot_be_compiled_fails_its_request_with_the_reason(llm: LLM) -> None:
    with pytest.raises(RequestsFailed, match="the grammar cannot be compiled: Invalid type: objct"):
        llm.generate("x", hot(StructuredOutputs(json={"type": "objct"})), use_tqdm=False)
