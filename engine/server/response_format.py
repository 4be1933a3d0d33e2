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
    if request.response_format is not None:
        _check_parts(request.response_format)
    if request.response_format is not None and request.response_format.type != "text":
        if wanted.outputs is not None:
            raise InvalidRequest("structured_outputs", "give only one of it and response_format")
        wanted = _of_format(request.response_format)
    if wanted.outputs is not None:
        wanted.outputs.check(wanted.field)
        if coerce_one_of and wanted.outputs.has_schema:
            wanted = wanted._replace(outputs=msgspec.structs.replace(wanted.outputs, coerce_one_of=True))
    return wanted


def _of_format(given: ResponseFormat) -> Wanted:
    if given.type == "json_object":
        return Wanted(StructuredOutputs(json_object=True), "response_format")
    if given.type == "structural_tag":
        tag = {"structures": given.structures, "triggers": given.triggers}
        return Wanted(StructuredOutputs(structural_tag=tag), "response_format")
    if given.json_schema is None or given.json_schema.schema is None:
        field = "response_format.json_schema" + ("" if given.json_schema is None else ".schema")
        raise InvalidRequest(field, "the field is required")
    return Wanted(StructuredOutputs(json=given.json_schema.schema), "response_format.json_schema.schema")


def _check_parts(given: ResponseFormat) -> None:
    """Refuse fields that belong to another type, since they would be ignored silently."""
    for name, owner in (
        ("json_schema", "json_schema"),
        ("structures", "structural_tag"),
        ("triggers", "structural_tag"),
    ):
        if getattr(given, name) and given.type != owner:
            field = f"response_format.{name}"
            raise InvalidRequest(field, f"the type is {given.type!r}; only {owner!r} has it")
