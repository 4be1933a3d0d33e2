"""Compiles grammars in its own threads and caches the most recent ones, so that reusing a schema costs microseconds.

llguidance compiles most schemas in milliseconds and releases the GIL meanwhile. A thread cannot be stopped, so while one
compiles a grammar that every caller has given up, another thread replaces it.
"""

import contextlib
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from penstock.engine.core.grammars import CompileJob, FillMasks, GrammarRefused, GrammarState
from penstock.engine.grammar.library import LIMITS, shortened, start_thread
from penstock.engine.grammar.masks import MaskFiller
from penstock.engine.grammar.matcher import Lexer, Matcher
from penstock.engine.grammar.vocabulary import GrammarVocabulary

NUM_THREADS = 2  # so that one slow grammar does not delay the others
MAX_GIVEN_UP = 6  # additional threads, compiling grammars that no request waits for any more
# A cached grammar is compiled anew after this many tokens: up to 11 new lexer states per token were measured.
RECYCLE_TOKENS = 16_384
MAX_KEPT = 256
MAX_KEPT_CHARS = 4 << 20  # total length of the cached sources; a compiled grammar grows with its source
NO_WAY_ON = ("NoExtension", "NoExtensionBias")  # llguidance's whole message if no token can follow
NOTHING_FITS = "no text at all can keep to it"


class Compiler:
    """Compiles and caches grammars. `load` builds the vocabulary, once, in the first thread that needs it."""

    def __init__(self, load: Callable[[], GrammarVocabulary]) -> None:
        self._load = load
        self._vocabulary: GrammarVocabulary | None = None
        self._loading = threading.Lock()
        self._kept: OrderedDict[str, Matcher] = OrderedDict()  # in initial state; each use copies it
        self._lock = threading.Lock()  # guards the cached grammars and the abandoned jobs
        self._jobs: queue.SimpleQueue[CompileJob | None] = queue.SimpleQueue()
        self._num_threads = 0
        # Abandoned jobs that still run; their threads have been replaced.
        self._given_up: set[Future[GrammarState]] = set()

    def cached(self, source: str) -> Matcher | None:
        """Return a fresh matcher if the grammar is cached, else None. Takes 10 µs."""
        with self._lock:
            kept = self._kept.get(source)
            if kept is None:
                return None
            if kept.is_worn_after(RECYCLE_TOKENS):
                del self._kept[source]
                return None
            self._kept.move_to_end(source)
            return kept.copy()

    def warm(self) -> None:
        """Build the vocabulary in the background, unless a job has been started before. Completion is not reported.

        Part of the work holds the GIL, for up to a second with 152k tokens: call it while nothing else runs.
        """
        if self._num_threads == 0:
            with contextlib.suppress(RuntimeError):  # no thread starts: constrained requests will report it
                self.start('start: "warm"')

    def start(self, source: str) -> CompileJob:
        """Queue a grammar for compilation; raise RuntimeError if no thread starts. Callbacks run in that thread."""
        job = CompileJob(source)
        if self._num_threads < NUM_THREADS:
            start_thread(self._work)
            self._num_threads += 1
        self._jobs.put(job)
        return job

    def give_up(self, job: CompileJob) -> None:
        """Cancel a job that no request waits for any more. A thread that already runs it is replaced, and exits after
        the job."""
        with self._lock:
            if job.result.cancel() or job.result.done() or len(self._given_up) == MAX_GIVEN_UP:
                return
            with contextlib.suppress(RuntimeError):  # no other thread starts, so this one stays
                start_thread(self._work)
                self._given_up.add(job.result)

    def mask_filler(self, max_rows: int) -> FillMasks:
        return MaskFiller(max_rows).fill

    def close(self) -> None:
        for _ in range(self._num_threads):
            self._jobs.put(None)
        self._num_threads = 0

    def check(self) -> None:
        with self._lock:
            assert not self._kept or self._fits()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.result.set_running_or_notify_cancel():
                continue
            try:
                self._load_once()
                job.began_s = time.monotonic()
                job.result.set_result(self.cached(job.source) or self._compile(job.source))
            except BaseException as error:  # top of the thread; callers also learn of a panic in the library
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
        from llguidance import LLMatcher, LLParserLimits

        vocabulary, limits = self._load_once(), LLParserLimits(**LIMITS)

        def compile() -> LLMatcher:
            return LLMatcher(vocabulary.backend, source, log_level=0, limits=limits)

        began_s = time.monotonic()
        backend = compile()
        if not backend.is_error():
            backend.compute_bitmask()  # builds most lexer states now, so that all copies share them
        if backend.is_error():
            error = shortened(backend.get_error())
            raise GrammarRefused(NOTHING_FITS if error in NO_WAY_ON else error)
        matcher = Matcher(backend, vocabulary, Lexer(compile, time.monotonic() - began_s))
        fresh = matcher.copy()
        with self._lock:
            self._kept.setdefault(source, matcher)
            while not self._fits():
                self._kept.popitem(last=False)
        return fresh

    def _fits(self) -> bool:
        return len(self._kept) == 1 or (len(self._kept) <= MAX_KEPT and sum(map(len, self._kept)) <= MAX_KEPT_CHARS)
