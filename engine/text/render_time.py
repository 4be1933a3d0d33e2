"""Limits the time that a chat template may take.

The code that Jinja generates calls `tick` in every loop iteration and every macro call (template_environment.py), so that
the thread that renders ends the rendering itself: threads cannot be ended from outside.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic

from penstock.engine.invalid_request import InvalidRequest

RENDER_S = 10.0  # for one conversation; the longest contexts take a tenth of a second
NEVER = float("inf")
TRIAL_S = 0.05  # on the event loop, before the rendering is started again in a thread


class RenderTimeout(InvalidRequest):
    """Raised when a rendering exceeds its limit."""


# When the running rendering must end, and its limit in seconds. A context variable is read faster than a thread's own.
_limit: ContextVar[tuple[float, float]] = ContextVar("limit", default=(NEVER, NEVER))


def tick() -> None:
    """Raise RenderTimeout if the rendering of this thread has exceeded its limit."""
    ends_s, seconds = _limit.get()
    if monotonic() > ends_s:
        what = f"the model's chat template takes longer than {seconds:g} s to render them, which is the limit"
        raise RenderTimeout("messages", what)


@contextmanager
def limited(most_s: float | None = None) -> Iterator[None]:
    """Limit the renderings of this thread, by default to RENDER_S, unless they are limited already."""
    limit, seconds = _limit.get(), RENDER_S if most_s is None else most_s
    token = _limit.set((monotonic() + seconds, seconds) if limit[0] == NEVER else limit)
    try:
        yield
    finally:
        _limit.reset(token)
