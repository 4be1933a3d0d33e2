"""The harness of the benchmarks: measures two sides in turn in one run, computes the ratio and its confidence interval,
and writes the result as a line of JSON. It also parses arguments and starts worker processes and servers.

A busy machine, a warm CPU or a slow hour meets both sides when they alternate, so the ratio stands where the figures
drift. It is reported as the median over the pairs with its interval, never as the best of them. This module needs
nothing but Python's own library: the other side's interpreter imports it as well.
"""

import argparse
import contextlib
import datetime
import inspect
import json
import math
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results"
CONFIDENCE = 0.95
MARK = "=> "  # begins an answer of a process; all else that it prints is passed over
_LOAD_BEFORE = os.getloadavg()[0]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # scripts here use tests/support

Found = TypeVar("Found")


# -- pairs -------------------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """How many times as good our side is; above 1 is better, whatever the unit."""

    ratio: float  # the median over the pairs
    low: float | None  # the interval of that median; None with fewer than six pairs
    high: float | None
    least: float
    most: float

    def __str__(self) -> str:
        inside = "" if self.low is None else f", {CONFIDENCE:.0%} interval {self.low:.3f} to {self.high:.3f}"
        return f"{self.ratio:.3f}× ({self.least:.3f} to {self.most:.3f}{inside})"


def rounds(sides: Mapping[str, Callable[[], Found]], count: int) -> dict[str, list[Found]]:
    """Measure every side `count` times; in each round the sides take turns, and another one begins."""
    names = list(sides)
    found: dict[str, list[Found]] = {name: [] for name in names}
    for number in range(count):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].append(sides[name]())
    return found


def judge(ours: Sequence[float], theirs: Sequence[float], *, higher_is_better: bool) -> Verdict:
    pairs = list(zip(ours, theirs, strict=True))
    ratios = sorted(a / b if higher_is_better else b / a for a, b in pairs)
    rank = _interval_rank(len(ratios))
    low, high = (None, None) if rank is None else (ratios[rank], ratios[-1 - rank])
    return Verdict(statistics.median(ratios), low, high, ratios[0], ratios[-1])


def compare(name: str, sides: Mapping[str, Callable[[], float]], count: int, unit: str) -> dict[str, Any]:
    """Run `rounds` of two sides and return their `summary`."""
    return summary(name, rounds(sides, count), unit)


def summary(
    name: str, samples: Mapping[str, Sequence[float]], unit: str, higher_is_better: bool | None = None
) -> dict[str, Any]:
    """Print a line of the table (medians of both sides and the verdict) and return the same figures. More is better if
    the unit is a rate, unless said otherwise."""
    ours, theirs = samples.values()
    is_rate = "/s" in unit or "per " in unit
    verdict = judge(ours, theirs, higher_is_better=is_rate if higher_is_better is None else higher_is_better)
    medians = {side: statistics.median(values) for side, values in samples.items()}
    both = ", ".join(f"{side} {value:,.4g}" for side, value in medians.items())
    print(f"{name}: {both} {unit}; {verdict}", flush=True)
    return {key: rounded(value) for key, value in (medians | verdict._asdict()).items()}


def _interval_rank(count: int) -> int | None:
    """Return the rank of the values, from either end, that enclose the median with the requested confidence.

    By the sign test: how many values fall below a median is a binomial of ½. Nothing is assumed about the
    distribution, so one stalled run does not move it.
    """
    outside, rank = 0.0, None
    for below in range(count // 2):
        outside += 2 * math.comb(count, below) / 2**count
        if outside > 1 - CONFIDENCE:
            break
        rank = below
    return rank


def quantile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def rounded(value: float | None) -> float | None:
    """Round to four digits, and whole numbers to whole numbers."""
    if value is None or value == 0 or not math.isfinite(value):
        return value
    return round(value, max(0, 3 - math.floor(math.log10(abs(value)))))


# -- arguments, tables, results ----------------------------------------------------------------------------------


def main(doc: str | None, name: str, *modes: Callable[..., Mapping[str, Any] | None]) -> None:
    """Run a script: parse its arguments, call a mode and record its figures. Modes are functions, their parameters are
    options, and the first mode is the default. A mode that returns None records nothing."""
    named = {mode.__name__.replace("_", "-"): mode for mode in modes}
    mode, options = parse(doc, named)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # context managers end all that was started, stopped or not
    found = named[mode](**options)
    if found is not None:
        record(f"{name}-{mode}" if len(modes) > 1 else name, found)


def parse(
    doc: str | None, modes: Mapping[str, Callable[..., Any]], argv: Sequence[str] | None = None
) -> tuple[str, dict[str, Any]]:
    """Return the mode and the given parameters. A parameter with a default becomes an option of that type."""
    words = list(sys.argv[1:] if argv is None else argv)
    mode = words.pop(0) if words and words[0] in modes else next(iter(modes))
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS
    )
    for name, each in inspect.signature(modes[mode]).parameters.items():
        flag, default = f"--{name.replace('_', '-')}", each.default
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, list):
            parser.add_argument(flag, nargs="+", type=type(default[0]), help=str(default))
        elif default is not each.empty:
            parser.add_argument(flag, type=str if default is None else type(default), help=str(default))
    return mode, vars(parser.parse_args(words))


def table(rows: Sequence[Mapping[str, Any]], width: int = 12) -> None:
    """Print rows below their column names; the first column is as wide as necessary."""
    first, *others = rows[0]
    left = max(len(str(row[first])) for row in [*rows, {first: first}])
    print(f"{first:<{left}}" + "".join(f"{name:>{max(width, len(name) + 2)}}" for name in others))
    for row in rows:
        cells = (f"{row[name]:,.4g}" if isinstance(row[name], float) else str(row[name]) for name in others)
        widths = (max(width, len(name) + 2) for name in others)
        print(f"{row[first]!s:<{left}}" + "".join(f"{cell:>{wide}}" for cell, wide in zip(cells, widths, strict=True)))


def record(name: str, figures: Mapping[str, Any]) -> None:
    """Print one JSON line and add it to results/<name>.jsonl."""
    line = {
        "bench": name,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),  # noqa: UP017 (vLLM's Python)
        "command": _command(),
        "commit": commit(),
        "machine": machine(),
        **figures,
    }
    text = json.dumps(line, ensure_ascii=False)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{name}.jsonl").open("a") as file:
        file.write(text + "\n")


def machine() -> dict[str, Any]:
    """Return the conditions of a measurement. Do not trust figures if the machine was busy before the benchmark."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.processor())
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_before": round(_LOAD_BEFORE, 2),
        "python": platform.python_version(),
    }


def _command() -> str:
    """Return the command as typed, with paths cut to their last part, because a user's folders are not a result."""
    words = [f"…/{Path(word).name}" if word.startswith(("/", "~", "..")) else word for word in sys.argv[1:]]
    script = Path(sys.argv[0]).parts
    inside = script[-1:] if "benchmarks" not in script[:-1] else script[-script[::-1].index("benchmarks") :]
    return " ".join(["python", "/".join(("benchmarks", *inside)), *words])


def commit(tree: Path = ROOT) -> str:
    """Return the measured commit of a checkout, with a + if it had changes."""
    asked = ["git", "-C", str(tree), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git here
        return "unknown"
    return answer.stdout.strip() or "unknown"


# -- processes ---------------------------------------------------------------------------------------------------


class Asked(contextlib.AbstractContextManager["Asked"]):
    """A side in its own process, often with another interpreter: it answers each question with a line of JSON
    (`answer_questions`) and is stopped by SIGSTOP between questions. `started` is its first answer."""

    def __init__(self, *command: str, env: Mapping[str, str] | None = None) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=env,
            start_new_session=True,  # a group, so that the processes it starts are stopped and ended with it
        )
        try:
            self.started = self._answer()
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def ask(self, question: Any) -> Any:
        self._signal(signal.SIGCONT)
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            return self._answer()
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        with self._process:  # waits, and closes its pipes
            self._log.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        self._log.seek(0)
        last = "\n".join(self._log.read().decode(errors="replace").splitlines()[-25:])
        raise SystemExit(f"the process that was asked ended with {self._process.wait()}:\n{last}")

    def _signal(self, kind: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, kind)


def answer_questions(answer: Callable[[Any], Any], started: Any = None) -> None:
    """Answer the questions of `Asked` until it closes the input; then all processes of the group end."""
    print(f"\n{MARK}{json.dumps(started)}", flush=True)
    for line in sys.stdin:
        print(f"\n{MARK}{json.dumps(answer(json.loads(line)))}", flush=True)
    os.killpg(0, signal.SIGKILL)


class Server(NamedTuple):
    url: str
    process: "subprocess.Popen[bytes]"


@contextlib.contextmanager
def serving(
    name: str,
    command: Sequence[str],
    is_up: Callable[[str], bool],
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    port: int | None = None,
) -> Iterator[Server]:
    """Run a server, whose command may have {port} in it; yield it when `is_up(url)`. Afterwards its process group is
    ended. Without `port` it gets a free one."""
    port = free_port() if port is None else port
    words, url = [word.replace("{port}", str(port)) for word in command], f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
        )
        try:
            end_s = time.monotonic() + timeout_s
            while not is_up(url):
                if process.poll() is not None or time.monotonic() > end_s:
                    log.seek(0)
                    last = log.read()[-2000:].decode(errors="replace")
                    what = "is not up" if process.returncode is None else f"ended with {process.returncode}"
                    raise SystemExit(f"{name}: it {what}\n{last}")
                time.sleep(0.05)
            yield Server(url, process)
        finally:
            for kind in (signal.SIGCONT, signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, kind)
                    process.wait(10 if kind is signal.SIGTERM else 0.001)
            process.wait()


def environment(root: Path = ROOT) -> dict[str, str]:
    """Return the environment of a process that runs a checkout."""
    return os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def fetch(url: str, body: Any = None, headers: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """GET, or POST a body as JSON; return the body of the answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return bytes(answer.read())


def answers(url: str, body: Any = None, headers: Mapping[str, str] = MappingProxyType({})) -> bool:
    """Tell whether `fetch` succeeds. A server that listens may still be loading."""
    with contextlib.suppress(OSError):
        fetch(url, body, headers)
        return True
    return False


def is_ready(url: str) -> bool:
    return answers(f"{url}/ready")
