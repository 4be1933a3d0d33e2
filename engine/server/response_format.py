"""Reads the requested output format from OpenAI's `response_format` or vLLM's `structured_outputs`."""

from typing import NamedTuple

import msgspec

from penstock.engine.sampling_params import InvalidRequest, StructuredOutputs
from penstock.engine.server.requests import GenerateRequest, ResponseFormat


class Wanted(NamedTuple):
    """The requested output format. `field`: the client's field that specifies it, for error messages."""

    outputs: StructuredOutputs | None
    field: str | None = None


def wanted_outputs(request: GenerateRequest, coerce_one_of: bool) -> Wanted:
    """Return the requested output format, validated as far as possible without compiling it. `coerce_one_of`: the
    server's setting for all requests."""
    wanted = Wanted(request.structured_outputs)
    form = request.response_format
    if form is not None and form.json_schema is not None and form.type != "json_schema":  # it would have no effect
        raise InvalidRequest("response_format.json_schema", f"the type is {form.type!r}; only 'json_schema' has it")
    if form is not None and form.type != "text":
        if wanted.outputs is not None:
            raise InvalidRequest("structured_outputs", "give only one of it and response_format")
        wanted = _of_format(form)
    if wanted.outputs is not None:
        wanted.outputs.check(wanted.field)
        if coerce_one_of and wanted.outputs.has_schema:
            wanted = wanted._replace(outputs=msgspec.structs.replace(wanted.outputs, coerce_one_of=True))
    return wanted


def _of_format(given: ResponseFormat) -> Wanted:
    if given.type == "json_object":
        return Wanted(StructuredOutputs(json_object=True), "response_format")
    if given.json_schema is None or given.json_schema.schema is None:
        field = "response_format.json_schema" + ("" if given.json_schema is None else ".schema")
        raise InvalidRequest(field, "the field is required")
    return Wanted(StructuredOutputs(json=given.json_schema.schema), "response_format.json_schema.schema")
