"""Compiles grammars in threads of its own and keeps the last ones, so that a schema used again costs microseconds.

llguidance compiles most schemas in milliseconds with the interpreter's lock released. What a hostile one may cost
is bounded by `LIMITS`: some 45 seconds of one core, and by recursion as deep as the text is long, for which the
threads have their large stack (pages that are never touched cost nothing). Nothing can stop a thread, so while one is
at a grammar that every caller has given up, another takes its place.
"""

import contextlib
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from llguidance import LLMatcher, LLParserLimits

from penstock.engine.grammar.matcher import Lexer, Matcher, shortened
from penstock.engine.grammar.vocabulary import GrammarVocabulary

NUM_THREADS = 2  # so that one slow grammar does not hold up the others
MAX_GIVEN_UP = 6  # threads beside them, at grammars that no request waits for any more
STACK_BYTES = 512 << 20  # 20,000 rules in a chain, as many as fit the limit of 256 KiB of text, take a third of it
# After so many a kept grammar makes room for a fresh one: 11 states of its lexer for each were seen.
RECYCLE_TOKENS = 16_384
COMPILE_LIMIT_S = 2.0  # of the compiling thread's own work, so that a busy machine takes what an idle one does
WAIT_LIMIT_S = 20.0  # from when a thread takes it up
LOOK_S = 0.05  # between two looks at what was spent
MAX_KEPT = 256
MAX_REFUSED = 32
REFUSED_S = 60.0  # how long a refusal is remembered
MAX_KEPT_CHARS = 4 << 20  # of all kept sources together; a compiled grammar grows with its source
LIMITS = LLParserLimits(
    # The work grows with the square of a chain of optional parts: with a million, the default, 256 KiB of them keep a
    # thread for some 12 minutes. A hundred tools of a realistic size need 66,000.
    initial_lexer_fuel=80_000,
    # The library's own: a text of 20,000 characters in a schema takes 11 states of 650 bytes for each of its tokens.
    max_lexer_states=250_000,
    step_max_items=50_000,  # one mask of an ambiguous grammar took 105 ms of a core with 49,152 tokens, 245 with 152,064
    step_lexer_fuel=200_000,  # the dearest good mask seen took 60 ms: at most 50 words in 500 characters, 152,064 tokens
    verbose_errors=False,
)
NO_WAY_ON = ("NoExtension", "NoExtensionBias")  # all that llguidance says then
NOTHING_FITS = "no text at all can keep to it"


class GrammarRefused(ValueError):
    """The grammar cannot be compiled; the message is llguidance's."""


class Work:
    """Measures the CPU time that a thread spends on its job."""

    def __init__(self) -> None:
        """Begin to measure. Call it in the thread itself."""
        has_clock = hasattr(time, "pthread_getcpuclockid")  # not everywhere; else all time counts
        self._clock = time.pthread_getcpuclockid(threading.get_ident()) if has_clock else time.CLOCK_MONOTONIC
        self._began_s = time.clock_gettime(self._clock)
        self._began_at_s = time.monotonic()

    def spent_s(self) -> float:
        """Return the seconds spent. Any thread may call it."""
        try:
            return time.clock_gettime(self._clock) - self._began_s
        except OSError:  # the thread has ended, and its job with it
            return 0.0

    def waited_s(self) -> float:
        return time.monotonic() - self._began_at_s


class Job(NamedTuple):
    source: str
    began: Future[Work]  # done when a thread takes it up, with the vocabulary at hand
    result: Future[Matcher]  # a fresh matcher, or GrammarRefused

    def limit_passed(self) -> str | None:
        """Return the limit that the compiling has passed, or None."""
        if self.result.done() or not self.began.done():
            return None
        work = self.began.result()
        if work.spent_s() > COMPILE_LIMIT_S:
            return f"takes longer than {COMPILE_LIMIT_S:g} s of one core to compile, which is the limit"
        if work.waited_s() > WAIT_LIMIT_S:
            return f"was not compiled within {WAIT_LIMIT_S:g} s, which is the limit; the machine is busy"
        return None


class Compiler:
    """`load` makes the vocabulary, once, in the first thread that needs it."""

    def __init__(self, load: Callable[[], GrammarVocabulary]) -> None:
        self._load = load
        self._vocabulary: GrammarVocabulary | None = None
        self._loading = threading.Lock()
        self._kept: OrderedDict[str, tuple[LLMatcher, Lexer]] = OrderedDict()  # at their start; each use takes a copy
        self._kept_chars = 0
        # With their ends. An odd tool comes again with every request.
        self._refused: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self._lock = threading.Lock()  # over what is kept, refused and given up
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._num_threads = 0
        self._given_up: set[Future[Matcher]] = set()  # being compiled; another thread has taken the place of theirs

    def cached(self, source: str) -> Matcher | None:
        """Return a fresh matcher if the grammar is known. Takes 10 µs."""
        with self._lock:
            if source not in self._kept or self._vocabulary is None:
                return None
            backend, lexer = self._kept[source]
            if lexer.is_full or lexer.num_tokens >= RECYCLE_TOKENS:
                self._drop(source)
                return None
            self._kept.move_to_end(source)
            return Matcher(backend.deep_copy(), self._vocabulary, lexer)

    def warm(self) -> None:
        """Have the vocabulary made before the first request needs it, unless one has. There is no notice of its end.

        Some of it holds the interpreter's lock, up to a second with 152k tokens: call it when nothing else runs.
        """
        if self._num_threads == 0:
            self.start(LLMatcher.grammar_from_lark('start: "warm"'))

    def start(self, source: str) -> Job:
        """Have it compiled. The futures' callbacks run in the compiling thread. RuntimeError: no thread can be started."""
        job = Job(source, Future(), Future())
        if self._num_threads < NUM_THREADS:
            self._spawn()
            self._num_threads += 1
        self._jobs.put(job)
        return job

    def wait(self, source: str) -> None:
        """Wait until the grammar is compiled. Raises GrammarRefused, also where that takes longer than the limits."""
        if self.cached(source) is not None:
            return
        job = self.start(source)
        while not job.result.done():
            with contextlib.suppress(TimeoutError):
                job.result.exception(LOOK_S)
            if limit := job.limit_passed():
                self.give_up(job)
                raise GrammarRefused(limit)
        job.result.result()

    def give_up(self, job: Job) -> None:
        """Cancel a job that no request waits for any more. If a thread runs it already, that thread ends with the job."""
        with self._lock:
            if job.result.cancel() or job.result.done() or len(self._given_up) == MAX_GIVEN_UP:
                return
            self._given_up.add(job.result)
        self._spawn()

    def close(self) -> None:
        for _ in range(self._num_threads):
            self._jobs.put(None)
        self._num_threads = 0

    def check(self) -> None:
        with self._lock:
            assert self._kept_chars == sum(map(len, self._kept))
            assert len(self._refused) <= MAX_REFUSED
            assert len(self._kept) <= MAX_KEPT and (self._kept_chars <= MAX_KEPT_CHARS or len(self._kept) == 1)

    def _spawn(self) -> None:
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=self._work, name="grammars", daemon=True).start()
        finally:
            threading.stack_size(before)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.result.set_running_or_notify_cancel():
                continue
            try:
                self._load_once()
                job.began.set_result(Work())
                job.result.set_result(self.cached(job.source) or self._compile(job.source))
            except BaseException as error:  # the thread's top, also for a panic of the library: what waits is notified
                if not job.began.done():
                    job.began.set_result(Work())
                is_plain = isinstance(error, Exception)
                job.result.set_exception(error if is_plain else RuntimeError(f"{type(error).__name__}: {error}"))
            with self._lock:
                if job.result in self._given_up:
                    self._given_up.remove(job.result)
                    return

    def _load_once(self) -> GrammarVocabulary:
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = self._load()
            return self._vocabulary

    def _compile(self, source: str) -> Matcher:
        with self._lock:
            ends_at_s, why = self._refused.get(source, (0.0, ""))
        if time.monotonic() < ends_at_s:
            raise GrammarRefused(why)
        vocabulary = self._load_once()

        def compile() -> LLMatcher:
            return LLMatcher(vocabulary.backend, source, log_level=0, limits=LIMITS)

        began_s = time.monotonic()
        backend = compile()
        if not backend.is_error():
            backend.compute_bitmask()  # most of the lexer's states are found here, and copies inherit them
        if backend.is_error():
            error = shortened(backend.get_error())
            why = NOTHING_FITS if error in NO_WAY_ON else error
            self._refuse(source, why)
            raise GrammarRefused(why)
        lexer = Lexer(compile, time.monotonic() - began_s)
        fresh = backend.deep_copy()
        with self._lock:
            if source not in self._kept:
                self._kept[source] = backend, lexer
                self._kept_chars += len(source)
            while len(self._kept) > MAX_KEPT or (self._kept_chars > MAX_KEPT_CHARS and len(self._kept) > 1):
                self._drop(next(iter(self._kept)))
        return Matcher(fresh, vocabulary, lexer)

    def _refuse(self, source: str, why: str) -> None:
        with self._lock:
            self._refused.pop(source, None)  # the newest stands last
            self._refused[source] = time.monotonic() + REFUSED_S, why
            if len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)

    def _drop(self, source: str) -> None:
        del self._kept[source]
        self._kept_chars -= len(source)
