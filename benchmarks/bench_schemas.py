"""Measures structured outputs with JSON schemas of others: how many compile, and what their grammars accept.

    python benchmarks/bench_schemas.py {suite,public} --folder FOLDER [--coerce-one-of] [--list-all]

`suite`: FOLDER has files of the JSON-Schema-Test-Suite; the sdist of `jsonschema` on PyPI carries
json/tests/draft2020-12, with the required part in the folder itself. `public`: FOLDER has one schema per file, at any
depth; a random answer to each that compiles is checked by `jsonschema`. The vocabulary is the 256 bytes. Wrong answers
that are accepted are printed, with `--list-all` also refusals and right answers that are rejected.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from pairs import main
from tests.support.fake_engine import byte_tokenizer

from penstock.engine.grammar.compiler import Compiler, GrammarRefused
from penstock.engine.grammar.matcher import Matcher
from penstock.engine.grammar.rules import grammar_source
from penstock.engine.grammar.vocabulary import GrammarVocabulary
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.sampling_params import StructuredOutputs

END = 256
COMPILE_LIMIT_S = 60.0
MAX_WALK = 4000  # bytes; longer answers are not checked


def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(byte_tokenizer(), END + 1)


class Schemas:
    def __init__(self, coerce_one_of: bool, list_all: bool) -> None:
        self.counts: Counter[str] = Counter()
        self._compiler = Compiler(vocabulary)
        self._coerce_one_of, self.lists_all = coerce_one_of, list_all

    def compiled(self, schema: Any, where: str) -> Matcher | None:
        """Return None if the schema is refused."""
        try:
            wanted = StructuredOutputs(json=schema, coerce_one_of=self._coerce_one_of)
            return self._compiler.start(grammar_source(wanted)).result.result(COMPILE_LIMIT_S)
        except (GrammarRefused, InvalidRequest, TimeoutError) as error:
            if self.lists_all:
                print("refused", where, str(error)[:200], sep=" | ")
        return None


def suite(folder: str = "", coerce_one_of: bool = False, list_all: bool = False) -> dict[str, int]:
    schemas = Schemas(coerce_one_of, list_all)
    for file in sorted(Path(folder).glob("*.json")):
        for case in json.loads(file.read_text()):
            where = f"{file.stem} | {case['description']}"
            matcher = schemas.compiled(case["schema"], where)
            if matcher is None:
                schemas.counts["refused"] += len(case["tests"])
                continue
            for test in case["tests"]:
                copy = matcher.backend.deep_copy()
                data = json.dumps(test["data"], ensure_ascii=False).encode()
                accepted = copy.consume_tokens(list(data)) and copy.is_accepting()
                kind = f"{'valid' if test['valid'] else 'invalid'} {'accepted' if accepted else 'rejected'}"
                schemas.counts[kind] += 1
                if accepted != test["valid"] and (accepted or schemas.lists_all):
                    print(kind, where, test["description"], sep=" | ")
    return schemas.counts


def public(folder: str = "", coerce_one_of: bool = False, list_all: bool = False) -> dict[str, int]:
    schemas = Schemas(coerce_one_of, list_all)
    for file in sorted(Path(folder).rglob("*.json")):
        schema = json.loads(file.read_text())
        matcher = schemas.compiled(schema, file.stem)
        schemas.counts["compiled" if matcher is not None else "refused"] += 1
        if matcher is None:
            continue
        text = bytes(walk(matcher.backend, random.Random(0)))
        schemas.counts["answers" if len(text) < MAX_WALK else "answers cut short"] += 1
        if len(text) < MAX_WALK and (why := complaint(schema, text)):
            schemas.counts["invalid answers"] += 1
            print("invalid answer", file.stem, why, text.decode(errors="replace")[:200], sep=" | ")
    return schemas.counts


def walk(backend: Any, rng: random.Random) -> Iterator[int]:
    """Yield the bytes of a random answer, ending it as soon as it is complete."""
    mask = allocate_token_bitmask(1, END + 1)
    for _ in range(MAX_WALK):
        if backend.is_accepting():
            return
        fill_next_token_bitmask(backend, mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:END])
        closing = [token for token in allowed if token in b'"}]']  # preferred, so that most answers end
        token = int(rng.choice(closing if closing and rng.random() < 0.5 else list(allowed)))
        backend.consume_token(token)
        yield token


def complaint(schema: Any, text: bytes) -> str:
    """Return what jsonschema finds wrong with an answer; nothing if it is valid, or a pattern is none of Python's."""
    try:
        jsonschema.validators.validator_for(schema, jsonschema.Draft7Validator)(schema).validate(json.loads(text))
    except (jsonschema.ValidationError, ValueError) as error:
        return str(error).splitlines()[0][:200]
    except re.error:
        pass
    return ""


if __name__ == "__main__":
    main(__doc__, "schemas", suite, public)
