"""The sampling parameters of a request and their validation.

The limits are annotations of the fields, so the server and the offline API behave the same: `check` raises
`InvalidRequest`, which names the field, the value and the limit. The engine core does not check again.
"""

import numbers
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import msgspec

from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.vllm_options import REPLACED_SAMPLING, unknown_option
from penstock.executor.protocol import Sampling

MAX_N = 128  # choices of one request; each is a separate sequence
MAX_LOGPROBS = 20  # like OpenAI's top_logprobs
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters; up to this much text is held back
MAX_LISTED_IDS = 4096  # per list of token ids or biases; each id costs time in every step
MAX_LOGIT_BIAS = 100.0
MAX_GRAMMAR_CHARS = 256 * 1024  # length of a schema, expression or grammar
MAX_GRAMMAR_DEPTH = 64  # nesting of objects and lists in a schema
MAX_CHOICES = 1024
# Parameters whose defaults a model's generation_config.json may set.
DEFAULTABLE = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens"})
MAX_COUNT = 2**31 - 1  # largest number of tokens: the executor stores it in 32 bits


class Limit(NamedTuple):
    """The valid range of a number, used as an annotation of its field."""

    low: float
    high: float
    is_open: bool = False  # `low` itself is out of range

    def __str__(self) -> str:
        return (
            f"above {self.low:g} and at most {self.high:g}" if self.is_open else f"from {self.low:g} to {self.high:g}"
        )


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
                f"{', '.join(forms) or 'nothing'} given; exactly one of {', '.join(self._forms)} is expected",
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

    @property
    def _forms(self) -> list[str]:
        return [name for name in self.__struct_fields__ if name != "coerce_one_of"]

    def _set_forms(self) -> list[str]:
        values = {name: getattr(self, name) for name in self._forms}
        return [n for n, value in values.items() if value is not None and not (n == "json_object" and value is False)]


class _ExplainsKeywords(msgspec.StructMeta):
    """The type of classes that name the replacement of an unknown keyword."""

    def __call__(cls, *args: Any, **keywords: Any) -> Any:
        try:
            return super().__call__(*args, **keywords)
        except TypeError:
            for name in keywords:
                if name not in cls.__struct_fields__:
                    raise TypeError(
                        f"{name}: {unknown_option(name, cls.__struct_fields__, REPLACED_SAMPLING)}"
                    ) from None
            raise


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, metaclass=_ExplainsKeywords):
    """Sampling parameters of one request. Names and defaults are those of vLLM."""

    n: Annotated[int, Limit(1, MAX_N)] = 1
    temperature: Annotated[float, Limit(0.0, 2.0)] = 1.0
    top_p: Annotated[float, Limit(0.0, 1.0, is_open=True)] = 1.0
    top_k: Annotated[int, Limit(-1, MAX_COUNT)] = 0  # 0 or -1: off
    min_p: Annotated[float, Limit(0.0, 1.0)] = 0.0
    repetition_penalty: Annotated[float, Limit(0.01, 100.0)] = 1.0  # logits divided by less could overflow
    presence_penalty: Annotated[float, Limit(-2.0, 2.0)] = 0.0
    frequency_penalty: Annotated[float, Limit(-2.0, 2.0)] = 0.0
    seed: Annotated[int, Limit(-(2**63), 2**64 - 1)] | None = None
    # None: limited by the context only; 0: only compute the prompt.
    max_tokens: Annotated[int, Limit(0, MAX_COUNT)] | None = 16
    min_tokens: Annotated[int, Limit(0, MAX_COUNT)] = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    banned_token_ids: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    structured_outputs: StructuredOutputs | None = None  # or a dictionary of its fields

    def __post_init__(self) -> None:
        if isinstance(self.structured_outputs, dict):
            try:
                found = msgspec.convert(self.structured_outputs, StructuredOutputs)
            except msgspec.ValidationError as error:
                raise InvalidRequest("structured_outputs", str(error)) from None
            msgspec.structs.force_setattr(self, "structured_outputs", found)

    def clone(self) -> "SamplingParams":
        return msgspec.structs.replace(self)

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def check(self, vocab_size: int, max_logprobs: int = MAX_LOGPROBS) -> None:
        """Raise InvalidRequest for the first field that is invalid for a model with this vocabulary size, and convert the
        numbers of other libraries to Python's, because the executor's messages hold only those."""
        for field, (check, limit, is_optional) in _LIMITS.items():
            if (value := getattr(self, field)) is not None or not is_optional:
                setattr(self, field, check(field, value, limit))
        if self.max_tokens is not None:
            _integer("min_tokens", self.min_tokens, Limit(0, self.max_tokens))
        if not isinstance(self.stop, str | list | tuple | None) or not all(
            isinstance(text, str) for text in self.stop or ()
        ):
            raise InvalidRequest("stop", f"{short(self.stop)} given; a text or a list of texts is expected")
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise InvalidRequest("stop", f"{len(self.stop_strings)} strings; at most {MAX_STOP_STRINGS} are allowed")
        for text in self.stop_strings:
            if not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise InvalidRequest("stop", f"a string of {len(text)} characters; 1 to {MAX_STOP_LENGTH} are allowed")
        if self.stop_strings and not self.detokenize:
            raise InvalidRequest("stop", "stop strings need detokenize=True")
        for field in ("stop_token_ids", "allowed_token_ids", "banned_token_ids"):
            if (ids := getattr(self, field)) is not None:
                setattr(self, field, _token_ids(field, ids, vocab_size))
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids", "the list is empty; leave it out to allow every token")
        if not isinstance(self.logit_bias, dict | None):
            raise InvalidRequest("logit_bias", f"{short(self.logit_bias)} given; biases by token id are expected")
        if self.logit_bias:
            limit = Limit(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
            biases = [_number("logit_bias", bias, limit) for bias in self.logit_bias.values()]
            self.logit_bias = dict(zip(_token_ids("logit_bias", self.logit_bias, vocab_size), biases, strict=True))
        for field in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, field)) is not None:
                setattr(self, field, _integer(field, value, Limit(0, max_logprobs)))
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


def _integer(field: str, value: Any, limit: Limit) -> int:
    plain = plain_number(value)
    if not isinstance(plain, int) or isinstance(plain, bool):
        raise InvalidRequest(field, f"{short(value)} given; an integer from {limit.low} to {limit.high} is expected")
    if not limit.low <= plain <= limit.high:
        raise InvalidRequest(field, f"{short(plain)} is out of range; it must be from {limit.low} to {limit.high}")
    return plain


def _number(field: str, value: Any, limit: Limit) -> float:
    plain = plain_number(value)
    if not isinstance(plain, int | float) or isinstance(plain, bool):
        raise InvalidRequest(field, f"{short(value)} given; a number {limit} is expected")
    if not limit.low <= plain <= limit.high or (limit.is_open and plain == limit.low):  # NaN fits no range
        raise InvalidRequest(field, f"{short(plain)} is out of range; it must be {limit}")
    return float(plain)


def _token_ids(field: str, values: Any, vocab_size: int) -> list[int]:
    try:
        ids = list(values)
    except TypeError:
        raise InvalidRequest(field, f"{short(values)} given; a list of token ids is expected") from None
    if len(ids) > MAX_LISTED_IDS:
        raise InvalidRequest(field, f"{len(ids)} entries; at most {MAX_LISTED_IDS} are allowed")
    limit = Limit(0, vocab_size - 1)
    return [_integer(field, token, limit) for token in ids]


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


def _limits() -> Iterator[tuple[str, tuple[Callable[[str, Any, Limit], float], Limit, bool]]]:
    """Yield, for each field whose annotation has a limit, its check, the limit, and whether it may be None."""
    for field, kind in get_type_hints(SamplingParams, include_extras=True).items():
        for part in (kind, *get_args(kind)):  # Annotated, or Annotated | None
            for limit in getattr(part, "__metadata__", ()):
                yield field, (_integer if part.__origin__ is int else _number, limit, part is not kind)


_LIMITS = dict(_limits())
