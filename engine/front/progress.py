"""While a batch runs: its bar, and Ctrl-C."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from penstock.engine.front.answer import Answer
from penstock.engine.messages import Output

Bar = bool | Callable[..., Any]  # whether to show progress, or what makes the bar in place of tqdm


class Progress:
    """A bar over the requests, with the tokens read and written per second."""

    def __init__(self, num_requests: int, make: Bar) -> None:
        from tqdm import tqdm

        self._bar = (make if callable(make) else tqdm)(total=num_requests, desc="Requests", dynamic_ncols=True)
        self._started_s = time.monotonic()
        self._num_input = self._num_output = 0

    def note(self, answer: Answer, output: Output) -> None:
        self._num_output += len(output.tokens)
        if output.num_cached_tokens is not None and output.request_id == answer.messages[0].request_id:
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
    """Hold Ctrl-C back until the yielded function is called: a step that is cut in two leaves half of its writes.

    A second Ctrl-C does not wait. Outside the main thread no signal arrives, and nothing is changed.
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
