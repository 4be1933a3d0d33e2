"""The sampling parameters of a request and their validation.

The limits are annotations of the fields, so the server and the offline API behave the same: the constructor and `check`,
which knows the model, raise `InvalidRequest`, which names the field, the value and the limit. The engine core does not
check again.
"""

import numbers
import secrets
from collections.abc import Iterable
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.options import reason_of
from penstock.engine.vllm_options import REPLACED_SAMPLING, unknown_option
from penstock.executor.protocol import Sampling

MAX_N = 128  # choices of one request; each is a separate sequence
MAX_LOGPROBS = 20  # like OpenAI's top_logprobs
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters; up to this much text is held back
MAX_LISTED_IDS = 4096  # per list of token ids or biases; each id costs time in every step
MAX_LOGIT_BIAS = 100
MAX_GRAMMAR_CHARS = 256 * 1024  # length of a schema, expression or grammar
MAX_GRAMMAR_DEPTH = 64  # nesting of objects and lists in a schema
MAX_CHOICES = 1024
# Parameters whose defaults a model's generation_config.json may set.
DEFAULTABLE = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens"})
MAX_COUNT = 2**31 - 1  # largest number of tokens: the executor stores it in 32 bits


Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
TokenIds = Annotated[list[int], Meta(max_length=MAX_LISTED_IDS, description="a list of token ids is expected")]
Biases = Annotated[
    dict[int, float],
    Meta(
        max_length=MAX_LISTED_IDS,
        description=f"biases by token id, each from -{MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}, are expected",
    ),
]


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The format of the answer, given in exactly one of these forms. The names are those of vLLM."""

    json: str | dict[str, Any] | bool | None = None  # a JSON schema, as text or as an object
    json_object: bool | None = None  # any JSON object
    regex: str | None = None  # the whole answer matches; Rust's syntax, without look-around and back-references
    choice: list[str] | None = None  # one of these texts
    grammar: str | None = None  # Lark, as llguidance has it
    coerce_one_of: bool = False  # treat a oneOf that cannot be enforced exactly as anyOf

    @property
    def kind(self) -> str:
        """The name of the field that is set. `json_object=False` counts as not set."""
        (name,) = self._set_forms()
        return name

    @property
    def field(self) -> str:
        """The field that error messages name."""
        return f"structured_outputs.{self.kind}"

    def check(self) -> None:
        """Raise InvalidRequest unless exactly one form is given and its size is within the limits.

        Only engine/grammar/compiler.py, which takes longer, checks that the value can be compiled.
        """
        forms = self._set_forms()
        if len(forms) != 1:
            raise InvalidRequest(
                "structured_outputs",
                f"{', '.join(forms) or 'nothing'} given; exactly one of {', '.join(OUTPUT_FORMS)} is expected",
            )
        if self.coerce_one_of and forms != ["json"]:
            raise InvalidRequest("structured_outputs.coerce_one_of", f"{forms[0]} holds no oneOf")
        value = getattr(self, forms[0])
        if forms == ["choice"]:
            _choices(self.field, value)
        elif isinstance(value, str):
            _grammar_size(self.field, len(value))
        elif isinstance(value, dict):
            check_depth(self.field, value)
        if forms == ["grammar"] and "::=" in value:
            reason = "this looks like GBNF or EBNF; a Lark grammar with a rule 'start' is expected"
            raise InvalidRequest(self.field, reason)

    def _set_forms(self) -> list[str]:
        set_forms = [name for name in OUTPUT_FORMS if getattr(self, name) is not None]
        return [name for name in set_forms if name != "json_object" or self.json_object]


OUTPUT_FORMS = tuple(name for name in StructuredOutputs.__struct_fields__ if name != "coerce_one_of")


class _ExplainsKeywords(msgspec.StructMeta):
    """The type of classes that name the replacement of an unknown keyword."""

    def __call__(cls, *args: Any, **keywords: Any) -> Any:
        try:
            return super().__call__(*args, **keywords)
        except TypeError:
            for name in sorted(keywords.keys() - {*cls.__struct_fields__}):
                raise TypeError(f"{name}: {unknown_option(name, cls.__struct_fields__, REPLACED_SAMPLING)}") from None
            raise


class _Fields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, metaclass=_ExplainsKeywords):
    """The fields of SamplingParams, with the limits that hold for every model."""

    n: Annotated[int, Meta(ge=1, le=MAX_N)] = 1
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] = 0  # 0 or -1: off
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0  # logits divided by less could overflow
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    seed: int | None = None  # 64 bits, signed or unsigned; msgspec has no limit above 2**63 - 1
    # None: limited by the context only; 0: only compute the prompt.
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None = 16
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_COUNT)] = 0
    stop: Annotated[
        Stop | Annotated[list[Stop], Meta(max_length=MAX_STOP_STRINGS)] | None,
        Meta(description="a text or a list of texts is expected"),
    ] = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: Biases | None = None
    allowed_token_ids: TokenIds | None = None
    banned_token_ids: TokenIds | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputs | None = None  # or a dictionary of its fields


class SamplingParams(_Fields, kw_only=True):
    """Sampling parameters of one request. Names and defaults are those of vLLM."""

    def __post_init__(self) -> None:
        """Raise InvalidRequest for the first invalid field, and convert the numbers of other libraries to Python's,
        because the executor's messages hold only those. `msgspec.structs.replace` calls this, too."""
        values = msgspec.structs.asdict(self)
        try:
            valid = msgspec.convert(values, _Fields)
        except (msgspec.ValidationError, AttributeError):  # a value is invalid, or of another library
            valid = _Fields(**{field: _converted(field, value) for field, value in values.items()})
        for field in self.__struct_fields__:
            setattr(self, field, getattr(valid, field))
        _check_range("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        for bias in (self.logit_bias or {}).values():
            _check_range("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if self.allowed_token_ids == []:
            raise InvalidRequest("allowed_token_ids", "the list is empty; leave it out to allow every token")

    def clone(self) -> "SamplingParams":
        return msgspec.structs.replace(self)

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def check(self, vocab_size: int, max_logprobs: int = MAX_LOGPROBS) -> None:
        """Raise InvalidRequest for the first field that is invalid for a model with this vocabulary size."""
        for field in ("stop_token_ids", "allowed_token_ids", "banned_token_ids", "logit_bias"):
            for token in getattr(self, field) or ():
                _check_range(field, token, 0, vocab_size - 1)
        _check_range("logprobs", self.logprobs, 0, max_logprobs)
        _check_range("prompt_logprobs", self.prompt_logprobs, 0, max_logprobs)
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop", "stop strings need detokenize=True")
        if self.structured_outputs is not None:
            self.structured_outputs.check()

    def seed_of(self, index: int) -> int:
        """Return the seed of choice `index` of `n`; without a given seed, draw a random one."""
        return secrets.randbits(64) if self.seed is None else (self.seed + index) % 2**64

    def sampling(self, eos_ids: Iterable[int]) -> Sampling:
        """Return the executor's sampling parameters for the first choice, after `check`."""
        stop_ids = set(self.stop_token_ids or ()) | (set() if self.ignore_eos else set(eos_ids))
        return Sampling(
            temperature=0.0 if self.temperature < 1e-5 else self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed_of(0),
            logit_bias=tuple(sorted((self.logit_bias or {}).items())),
            allowed_ids=tuple(self.allowed_token_ids or ()),
            banned_ids=tuple(self.banned_token_ids or ()),
            min_tokens=self.min_tokens,
            stop_ids=tuple(sorted(stop_ids)),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


def plain_number(value: Any) -> Any:
    """Return the Python number of another library's scalar or tensor without dimensions, and other values unchanged."""
    if type(value) in (int, float, bool, str):
        return value
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # numpy, torch and jax
        value = value.item()
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return value


def _converted(field: str, value: Any) -> Any:
    """Convert a value to the type of its field; raise InvalidRequest if it is invalid."""
    plain = plain_number(value)
    if isinstance(plain, dict):
        plain = {plain_number(key): plain_number(each) for key, each in plain.items()}
    elif isinstance(plain, Iterable) and not isinstance(plain, str):
        plain = [*map(plain_number, plain)]
    kind = _KINDS[field]
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(field, _reason(value, plain, kind, error)) from None


def _reason(value: Any, plain: Any, kind: Any, error: msgspec.ValidationError) -> str:
    """Return the message about a value, as it was given and as a Python number, that its type `kind` does not allow."""
    limited = next((part for part in (kind, *get_args(kind)) if get_origin(part) is Annotated), None)
    if limited is None:
        return f"{short(value)} given; {reason_of(error)}"
    number, limit = limited.__origin__, limited.__metadata__[0]
    if limit.description is not None:
        return f"{short(value)} given; {limit.description} ({reason_of(error)})"
    limits = f"from {limit.ge} to {limit.le}" if limit.gt is None else f"above {limit.gt} and at most {limit.le}"
    if type(plain) in (int, number):
        return f"{short(plain)} is out of range; it must be {limits}"
    return f"{short(value)} given; {'an integer' if number is int else 'a number'} {limits} is expected"


def _check_range(field: str, value: float | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise InvalidRequest(field, f"{short(value)} is out of range; it must be from {low} to {high}")


def _choices(field: str, choices: list[str]) -> None:
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequest(field, f"{len(choices)} texts; 1 to {MAX_CHOICES} are allowed")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidRequest(field, "every choice must be a text of at least one character")
    _grammar_size(field, sum(map(len, choices)))


def _grammar_size(field: str, num_chars: int) -> None:
    if not 1 <= num_chars <= MAX_GRAMMAR_CHARS:
        raise InvalidRequest(field, f"{num_chars} characters; 1 to {MAX_GRAMMAR_CHARS} are allowed")


def check_depth(field: str, schema: dict[str, Any] | list[Any]) -> None:
    """Raise InvalidRequest for deep nesting. Traverses level by level, so that no depth can exhaust the stack."""
    level: list[Any] = [schema]
    depth = 0
    while level := [
        value
        for item in level
        for value in (item.values() if isinstance(item, dict) else item)
        if isinstance(value, (dict, list))
    ]:
        depth += 1
        if depth >= MAX_GRAMMAR_DEPTH:
            raise InvalidRequest(field, f"nested more than {MAX_GRAMMAR_DEPTH} deep, which is the limit")


def short(value: object) -> str:
    """Return a value as text for an error message, cut to 40 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        text = "an integer of more than 4300 digits"
    return text if len(text) <= 40 else f"{text[:37]}…"


_KINDS = get_type_hints(_Fields, include_extras=True)
