"""Constrained answers of the real default model at a temperature where it writes nonsense: all of them keep to form."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
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
NAMES = [
    *("id", "name", "city", "tags", "price", "score", "is_open", "notes", "parent", "created", "address", "lines"),
    *("unit", "status", "größe"),
]
WORDS = ["red", "green", "blue", "a b", "", 'say "hi"', "é", "C:\\", "<|im_end|>", "0", "null"]
PATTERNS = ["^[A-Z]{2}-[0-9]{3}$", "^(yes|no)$", "^[a-f0-9]{8}$", "^[^\\s]{1,6}$"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4"]  # email and uri have no longest


def random_schema(seed: int) -> dict[str, Any]:
    """Of a seed: an object at the top in most cases, as callers ask for them. Numbers apart, every answer is finite."""
    rng = random.Random(seed)
    definitions: dict[str, Any] = {"point": _object(rng, 1), "code": _string(rng)}
    schema = _object(rng, 3) if rng.random() < 0.8 else _any(rng, 3)
    return {"$defs": definitions, **schema}


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    simple = [_string, _integer, _number, _enum, _const, _boolean, _nullable]
    nested = [_array, _object, _any_of, _reference]
    place = rng.randrange(len(simple) + (len(nested) if depth > 0 else 0))
    return simple[place](rng) if place < len(simple) else nested[place - len(simple)](rng, depth - 1)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4))
    properties = {name: _any(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.7]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth), "minItems": low, "maxItems": low + rng.randint(0, 3)}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth) for _ in range(rng.randint(1, 3))]}


def _reference(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{rng.choice(['point', 'code'])}"}


def _string(rng: random.Random) -> dict[str, Any]:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": rng.choice(FORMATS)}
    low = rng.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 20)}


def _integer(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.choice([0, 5, 100, 10**6])}


def _number(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-100, 100) / 4
    return {"type": "number", "minimum": low, "maximum": low + rng.choice([0.5, 10, 1000])}


def _enum(rng: random.Random) -> dict[str, Any]:
    return {"enum": rng.sample([*WORDS, 1, -2.5, True, None, [1, 2]], rng.randint(1, 5))}


def _const(rng: random.Random) -> dict[str, Any]:
    return {"const": rng.choice([*WORDS, 17, False, None, {"a": [1]}])}


def _boolean(rng: random.Random) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null"])}


def _nullable(rng: random.Random) -> dict[str, Any]:
    return {"type": ["string", "null"], "maxLength": rng.randint(1, 10)}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", max_model_len=1024, kv_cache_bytes=2**28, max_num_seqs=64) as llm:
        yield llm


def hot(wanted: StructuredOutputs | None, seed: int = 0, **options: object) -> SamplingParams:
    return SamplingParams(
        temperature=1.5,
        seed=seed,
        structured_outputs=wanted,
        **{"max_tokens": 900, **options},  # type: ignore
    )


def check_schemas(llm: LLM, seeds: range) -> None:
    schemas = {seed: random_schema(seed) for seed in seeds}
    params = [hot(StructuredOutputs(json=schema), seed) for seed, schema in schemas.items()]
    results = llm.chat([QUESTION] * len(params), params, use_tqdm=False)
    num_cut = 0
    for schema, result in zip(schemas.values(), results, strict=True):
        answer = result.outputs[0]
        if answer.finish_reason == "length":  # a number whose decimals did not end: 2 in 120 at this heat
            num_cut += 1
            continue
        assert answer.finish_reason == "stop"
        validator = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        validator.validate(json.loads(answer.text))
    assert num_cut <= 1 + len(schemas) // 20


@pytest.mark.slow
def test_answers_to_random_schemas_parse_and_validate(llm: LLM) -> None:
    check_schemas(llm, range(16))


@pytest.mark.slow
def test_answers_to_hundreds_of_random_schemas_parse_and_validate(llm: LLM) -> None:
    check_schemas(llm, range(1000, 1300))


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
    params = [hot(wanted, n=3) for wanted, _ in forms]
    free = hot(None, max_tokens=30)
    results = llm.chat([QUESTION] * 5, [free, *params, free], use_tqdm=False)
    for (wanted, pattern), result in zip(forms, results[1:4], strict=True):
        for choice in result.outputs:
            regex = pattern or wanted.regex
            assert regex is not None and re.fullmatch(regex, choice.text), choice.text
    assert results[0].outputs[0].token_ids == results[4].outputs[0].token_ids


def test_a_text_that_reads_like_a_special_token_is_text(llm: LLM) -> None:
    """The one that ends the model's turns, of all tokens: nothing but this text may follow the quote."""
    for wanted in (StructuredOutputs(json={"const": "<|im_end|>"}), StructuredOutputs(choice=['"<|im_end|>"'])):
        (result,) = llm.chat(QUESTION, hot(wanted), use_tqdm=False)
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
