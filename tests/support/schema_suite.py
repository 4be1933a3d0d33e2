"""The JSON-Schema-Test-Suite against compiled grammars: how many schemas compile, and what they accept.

Not part of the tests, for it takes the suite's folder of one draft: the sdist of `jsonschema` on PyPI carries them as
json/tests/draft2020-12. Unsound is an invalid value that is accepted; each is printed.

    python -m tests.support.schema_suite FOLDER [FILE …]
"""

import json
import sys
from collections import Counter
from pathlib import Path

from penstock.engine.grammar.compiler import GrammarRefused
from penstock.engine.grammar.matcher import Matcher
from penstock.engine.sampling_params import InvalidRequest
from tests.support.grammar_rig import accepts, matcher


def counts(files: list[Path]) -> Counter[str]:
    found: Counter[str] = Counter()
    for file in files:
        for case in json.loads(file.read_text()):
            try:
                compiled = matcher(json=case["schema"])
            except (GrammarRefused, InvalidRequest) as why:
                found["refused"] += len(case["tests"])
                if "-v" in sys.argv:
                    print("refused", file.stem, case["description"], str(why)[:120], sep=" | ")
                continue
            for test in case["tests"]:
                taken = accepts(copied(compiled), json.dumps(test["data"], ensure_ascii=False))
                kind = f"{'valid' if test['valid'] else 'invalid'} {'accepted' if taken else 'rejected'}"
                found[kind] += 1
                if taken != test["valid"] and (taken or "-v" in sys.argv):
                    print(kind, file.stem, case["description"], test["description"], sep=" | ")
    return found


def copied(found: Matcher) -> Matcher:
    assert found._lexer is not None
    return Matcher(found.backend.deep_copy(), found.vocabulary, found._lexer)


if __name__ == "__main__":
    folder, *names = [word for word in sys.argv[1:] if word != "-v"]
    print(dict(counts([Path(folder) / name for name in names] or sorted(Path(folder).glob("*.json")))))
