"""Builds the text of the grammar for a request's structured_outputs, but does not compile it.

Whitespace between JSON tokens is bounded (a space, or a line break with indentation). Otherwise a model sampled at a
high temperature can write whitespace until it reaches max_tokens, and its output is not valid JSON.
"""

from penstock.engine.grammar.json_schema import lark_json, prepared
from penstock.engine.grammar.library import shortened
from penstock.engine.grammar.rules import Rules, schema_json
from penstock.engine.http.errors import clip
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.sampling_params import StructuredOutputs


def grammar_source(outputs: StructuredOutputs) -> str:
    """Return the text of the grammar for an output format that has been checked."""
    if outputs.kind in ("json", "json_object"):  # not in Lark, within which llguidance takes 1 ms longer to compile it
        return f'{{"grammars": [{{"json_schema": {schema_json(outputs)}}}]}}'
    if outputs.grammar is not None:
        return outputs.grammar
    rules = Rules({})
    return rules.lark(rules.answer(outputs))


def check_pattern(pattern: str, field: str) -> None:
    """Raise InvalidRequest if llguidance cannot parse a pattern of a schema. Only compiling it shows if it is too large."""
    from llguidance import LLMatcher

    schema = prepared({"type": "string", "pattern": pattern}, field)
    if error := LLMatcher.validate_grammar(f"start: {lark_json(schema)}"):
        what = f"{shortened(error).rpartition('error: ')[2]}; a regular expression without look-around is allowed"
        raise InvalidRequest(field, f"{clip(pattern)!r}: {what}")
