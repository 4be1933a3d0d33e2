"""What the offline API is given: a prompt and its parameters, for one or for each."""

from collections.abc import Sequence
from typing import Any, TypeVar

from penstock.engine.front.lora import LoRARequest
from penstock.engine.sampling_params import InvalidRequest

Prompt = str | list[int] | dict[str, Any]  # a dictionary has "prompt" or "prompt_token_ids", and maybe "cache_salt"
Messages = list[dict[str, Any]]
LoraRequests = LoRARequest | Sequence[LoRARequest | None] | None
T = TypeVar("T")
PROMPT_FIELDS = ("prompt", "prompt_token_ids", "cache_salt")


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | dict) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def plain(prompt: Prompt) -> tuple[str | list[int], str | None]:
    """The prompt and its cache salt."""
    if isinstance(prompt, bytes):  # the core's own form, unchecked
        raise InvalidRequest("prompt", "bytes given; a text or a list of token ids is expected")
    if not isinstance(prompt, dict):
        return prompt, None
    unknown = [name for name in prompt if name not in PROMPT_FIELDS and prompt[name] is not None]
    if unknown:
        raise InvalidRequest(f"prompt.{unknown[0]}", f"there is no such field; known are {', '.join(PROMPT_FIELDS)}")
    given = [prompt[name] for name in PROMPT_FIELDS[:2] if prompt.get(name) is not None]
    if len(given) != 1:
        raise InvalidRequest("prompt", f"{len(given)} of prompt and prompt_token_ids given; exactly one is expected")
    if not isinstance(salt := prompt.get("cache_salt"), str | None):
        raise InvalidRequest("prompt.cache_salt", f"{type(salt).__name__} given; a text is expected")
    return given[0], salt


def for_each(field: str, given: T | Sequence[T | None] | None, kind: type[T], num_prompts: int) -> Sequence[T | None]:
    """One for each prompt, where one for all was given, or none, or a list."""
    if given is None or isinstance(given, kind):
        return [given] * num_prompts
    if not (isinstance(given, Sequence) and all(isinstance(each, kind | None) for each in given)):
        raise InvalidRequest(field, f"{type(given).__name__} given; a {kind.__name__}, or a list of them is expected")
    if len(given) != num_prompts:
        raise InvalidRequest(field, f"{len(given)} given for {num_prompts} prompts; give one, or one for each")
    return given
