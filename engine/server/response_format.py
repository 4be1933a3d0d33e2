"""Reads the requested output format from OpenAI's `response_format` or vLLM's `structured_outputs`."""

import msgspec

from penstock.engine.sampling_params import InvalidRequest, StructuredOutputs
from penstock.engine.server.call import Call
from penstock.engine.server.requests import GenerateRequest, ResponseFormat


def wanted_outputs(call: Call, request: GenerateRequest, coerce_one_of: bool) -> StructuredOutputs | None:
    """Return the requested output format, validated as far as possible without compiling it. `coerce_one_of`: the
    server's setting for all requests."""
    wanted = request.structured_outputs
    form = request.response_format
    if form is not None and form.json_schema is not None and form.type != "json_schema":  # it would have no effect
        raise InvalidRequest("response_format.json_schema", f"the type is {form.type!r}; only 'json_schema' has it")
    if form is not None and form.type != "text":
        if wanted is not None:
            raise InvalidRequest("structured_outputs", "give only one of it and response_format")
        wanted = _of_format(call, form)
    if wanted is not None:
        wanted.check()
        if coerce_one_of and wanted.kind == "json":
            wanted = msgspec.structs.replace(wanted, coerce_one_of=True)
    return wanted


def _of_format(call: Call, given: ResponseFormat) -> StructuredOutputs:
    if given.type == "json_object":
        call.paths["structured_outputs.json_object"] = call.client_path("response_format")
        return StructuredOutputs(json_object=True)
    if given.json_schema is None or given.json_schema.schema is None:
        field = "response_format.json_schema" + ("" if given.json_schema is None else ".schema")
        raise InvalidRequest(field, "the field is required")
    call.paths["structured_outputs.json"] = call.client_path("response_format.json_schema.schema")
    return StructuredOutputs(json=given.json_schema.schema)
