"""One call of the offline API: its arguments, the adapters that it loads, and the loop that runs its requests, with a
progress bar and delayed Ctrl-C."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from types import FrameType
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from penstock.engine.core.engine_core import EngineCore
from penstock.engine.front.answer import Answer, OpenAnswers
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.messages import Output
from penstock.engine.sampling_params import plain_number, short

# An array of token ids counts as a list. A dictionary has "prompt" or "prompt_token_ids", and maybe "cache_salt".
Prompt = str | list[int] | dict[str, Any]
Messages = list[dict[str, Any]]
Bar = bool | Callable[..., Any]  # whether to show progress, or a function that makes the bar instead of tqdm
T = TypeVar("T")
PROMPT_FIELDS = ("prompt", "prompt_token_ids", "cache_salt")


class LoRARequest(msgspec.Struct, frozen=True):
    """A PEFT adapter in a folder. The first request with it reads the folder; another number makes it read again."""

    lora_name: str
    lora_int_id: Annotated[int, Meta(ge=1)]
    lora_path: str


LoraRequests = LoRARequest | Sequence[LoRARequest | None] | None


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts as a list; one prompt is a text, a dictionary, or a list or an array of numbers."""
    if isinstance(prompts, str | dict) or (len(prompts) > 0 and isinstance(plain_number(prompts[0]), int | float)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def split_salt(prompt: Prompt) -> tuple[str | list[int], str | None]:
    """Return the text or the token ids of a prompt, and its cache salt."""
    value: Any = prompt
    salt: Any = None
    if isinstance(prompt, dict):
        unknown = [name for name in prompt if name not in PROMPT_FIELDS and prompt[name] is not None]
        if unknown:
            known = ", ".join(PROMPT_FIELDS)
            raise InvalidRequest(f"prompt.{unknown[0]}", f"there is no such field; known are {known}")
        values = [prompt[name] for name in PROMPT_FIELDS[:2] if prompt.get(name) is not None]
        if len(values) != 1:
            what = f"{len(values)} of prompt and prompt_token_ids given; exactly one is expected"
            raise InvalidRequest("prompt", what)
        value, salt = values[0], prompt.get("cache_salt")
        if isinstance(prompt.get("prompt_token_ids"), str):
            raise InvalidRequest("prompt.prompt_token_ids", f"{short(value)} given; a list of token ids is expected")
        if not isinstance(salt, str | None):
            raise InvalidRequest("prompt.cache_salt", f"{type(salt).__name__} given; a text is expected")
    if isinstance(value, bytes):  # `begin_answer` would take it as checked and encoded ids
        raise InvalidRequest("prompt", "bytes given; a text or a list of token ids is expected")
    return value, salt


def for_each(field: str, values: T | Sequence[T | None] | None, kind: type[T], num_prompts: int) -> Sequence[T | None]:
    """Return one value per prompt from one value for all, none, or a list."""
    if values is None or isinstance(values, kind):
        return [values] * num_prompts
    if not (isinstance(values, Sequence) and all(isinstance(each, kind | None) for each in values)):
        raise InvalidRequest(field, f"{type(values).__name__} given; a {kind.__name__}, or a list of them is expected")
    if len(values) != num_prompts:
        raise InvalidRequest(field, f"{len(values)} given for {num_prompts} prompts; give one, or one for each")
    return values


class LoadedAdapters:
    """The adapters of earlier calls, at most `most`; the least recently used one is unloaded first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: dict[LoRARequest, str] = {}  # the most recently used one last

    def keys(self, requests: Sequence[LoRARequest | None], core: EngineCore) -> list[str | None]:
        """Return the key of each request's adapter, in call order. Unloading is safe here because only one call runs at a
        time."""
        if (num := len({*requests} - {None})) > self._most:
            raise InvalidRequest("lora_request", f"{num} adapters in one call; max_cpu_loras is {self._most}")
        return [None if each is None else self._key(each, core) for each in requests]

    def _key(self, request: LoRARequest, core: EngineCore) -> str:
        key = self._keys.pop(request, None)
        if key is None:
            while len(self._keys) >= self._most:
                core.unload_adapter(self._keys.pop(next(iter(self._keys))))
            core.pauses.drain()  # a step of the previous call may be in flight, though its requests have ended
            key = core.load_adapter(request.lora_path).key
        self._keys[request] = key
        return key


class Batch:
    """The requests of one call, which run until all have finished."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.is_broken = False  # a step failed halfway, so the state of the engine is undefined
        self._open = OpenAnswers()
        self.prompts: dict[Answer, str | None] = {}  # the text of each answer's prompt, if it was given as text

    def add(self, answer: Answer, text: str | None) -> None:
        self.prompts[answer] = text
        self._open.add(answer)

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            output = self.core.abort(request_id)
            if output is not None:
                self._open.deliver(output)

    def run(self, use_tqdm: Bar) -> None:
        core = self.core
        if core.pauses.asleep:
            raise RuntimeError("this LLM sleeps; wake_up comes first")
        backlog = iter([message for answer in self.prompts for message in answer.messages])
        showing = contextlib.closing(Progress(len(self.prompts), use_tqdm)) if use_tqdm else contextlib.nullcontext()
        try:
            with showing as progress, interrupts_between_steps() as check_interrupt:
                while self._open:
                    # The queue is bounded: hand over as much as it takes, and the rest later.
                    for message in islice(backlog, core.scheduler.num_free_places):
                        core.submit(message)
                    for output in self._step():
                        reached = self._open.deliver(output)
                        if reached is not None and progress is not None:
                            progress.note(reached, output)
                    check_interrupt()
        except BaseException:
            if not self.is_broken:  # Ctrl-C, or the caller's own bar failed: the engine is whole
                self.abort([*self._open])
                while core.has_work():
                    self._step()
            raise

    def _step(self) -> list[Output]:
        try:
            return self.core.step()
        except BaseException:
            self.is_broken = True
            raise


class Progress:
    """A bar over the requests, with the tokens read and written per second."""

    def __init__(self, num_requests: int, make: Bar) -> None:
        from tqdm import tqdm

        self._bar = (make if callable(make) else tqdm)(total=num_requests, desc="Requests", dynamic_ncols=True)
        self._started_s = time.monotonic()
        self._num_input = self._num_output = 0

    def note(self, answer: Answer, output: Output) -> None:
        self._num_output += len(output.tokens)
        if output.reuse is not None and output.request_id == answer.messages[0].request_id:
            self._num_input += answer.num_prompt_tokens
        if answer.is_finished:
            seconds = max(time.monotonic() - self._started_s, 1e-9)
            self._bar.set_postfix_str(
                f"in {self._num_input / seconds:.0f} tok/s, out {self._num_output / seconds:.0f} tok/s", refresh=False
            )
            self._bar.update()

    def close(self) -> None:
        self._bar.close()


@contextlib.contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Delay Ctrl-C until the yielded function is called, because an interrupted step would be half applied.

    A second Ctrl-C is not delayed. Outside of the main thread there are no signals, and this does nothing.
    """
    pending: list[int] = []

    def check() -> None:
        if pending:
            raise KeyboardInterrupt

    def note(number: int, _frame: FrameType | None) -> None:
        check()
        pending.append(number)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield check
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
