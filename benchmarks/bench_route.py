"""What the router costs: requests and stream chunks per second of its CPU, beside an aiohttp proxy, and added latency.

    python benchmarks/bench_route.py --peer-python PATH        # an environment with aiohttp and uvloop

Backend and client are raw sockets (benchmarks/route_load.py). A proxy's figure is requests or chunks divided by
the CPU seconds of its own process, so it is per core whoever else is busy. The router runs as its users run it: the
default policy, probes, its placement; the aiohttp proxy does nothing but pass on. Latency is that of a client at half
of the router's own throughput, through the router and straight to the backend by turns.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from pairs import alternate, judge, record
from route_load import ANSWER, cpu_s, json_request, load, stream_request

HERE = Path(__file__).parent
ROOT = HERE.parent
END_OF_STREAM = b"0\r\n\r\n"
EVENTS = 200  # of a stream


@contextlib.contextmanager
def process(*command: str) -> Iterator[tuple[int, int]]:
    """A child that prints its port: (port, pid)."""
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        line = child.stdout.readline().decode()
        yield int(line.replace("/", ":").strip().rpartition(":")[2]), child.pid
    finally:
        child.stdin.close()
        child.terminate()
        child.wait(10)
        child.stdout.close()


def wait_ready(port: int) -> None:
    for _ in range(200):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=1):
                return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("the router did not become ready")


def per_cpu_second(port: int, pid: int, *, streams: bool, seconds: float) -> float:
    if streams:
        measured = load(port, pid, stream_request(EVENTS), END_OF_STREAM, connections=32, seconds=seconds)
        return len(measured.times_s) * EVENTS / measured.cpu_s
    measured = load(port, pid, json_request(), ANSWER[-16:], connections=32, seconds=seconds)
    return len(measured.times_s) / measured.cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", metavar="PATH", help="of an environment with aiohttp")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one measurement")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        backend, _ = stack.enter_context(process(sys.executable, str(HERE / "route_load.py")))
        route = ("-m", "penstock.cli", "route", "--backend", f"http://127.0.0.1:{backend}", "--port", "0")
        port, pid = stack.enter_context(process(sys.executable, *route, "--max-requests", "4096"))
        wait_ready(port)
        peer = None
        if options.peer_python is None:
            print("no --peer-python: only the router's own figures")
        else:
            command = (options.peer_python, str(HERE / "aiohttp_proxy.py"), str(backend))
            peer = stack.enter_context(process(*command))
        for what, streams in (("requests", False), ("chunks", True)):
            compare(what, streams, (port, pid), peer, options.pairs, options.seconds)
        latency(backend, port, pid, options.pairs, options.seconds)


def compare(
    what: str, streams: bool, ours: tuple[int, int], peer: tuple[int, int] | None, pairs: int, seconds: float
) -> None:
    per_cpu_second(*ours, streams=streams, seconds=0.5)
    if peer is None:
        figures = sorted(per_cpu_second(*ours, streams=streams, seconds=seconds) for _ in range(pairs))
        record(f"route_{what}", {"per_cpu_second": round(figures[len(figures) // 2])})
        return
    per_cpu_second(*peer, streams=streams, seconds=0.5)
    measured = alternate(
        lambda: per_cpu_second(*ours, streams=streams, seconds=seconds),
        lambda: per_cpu_second(*peer, streams=streams, seconds=seconds),
        pairs,
    )
    verdict = judge(measured, higher_is_better=True)
    ordered = sorted(pair.ours for pair in measured), sorted(pair.theirs for pair in measured)
    middle = [round(values[len(values) // 2]) for values in ordered]
    print(f"{what} per CPU second: router {middle[0]:,}, aiohttp proxy {middle[1]:,}: {verdict}")
    record(
        f"route_{what}",
        {"per_cpu_second": middle[0], "aiohttp_per_cpu_second": middle[1], "ratio": verdict._asdict()},
    )


def latency(backend: int, port: int, pid: int, pairs: int, seconds: float) -> None:
    """Added by the router at half of what it can do, measured with a steady rate of requests."""
    flat_out = load(port, pid, json_request(), ANSWER[-16:], connections=32, seconds=seconds)
    rate = len(flat_out.times_s) / flat_out.seconds / 2
    added = []
    for _ in range(pairs):
        begun_s = cpu_s(pid)
        through = load(port, pid, json_request(), ANSWER[-16:], connections=32, seconds=seconds, rate=rate)
        straight = load(backend, pid, json_request(), ANSWER[-16:], connections=32, seconds=seconds, rate=rate)
        added.append([through.quantile_ms(share) - straight.quantile_ms(share) for share in (0.5, 0.99)])
        assert cpu_s(pid) > begun_s, "the router did nothing"
    middle = [round(sorted(column)[len(column) // 2], 3) for column in zip(*added, strict=True)]
    print(f"added at {rate:,.0f} requests/s: p50 {middle[0]} ms, p99 {middle[1]} ms")
    record("route_latency", {"requests_per_s": round(rate), "added_p50_ms": middle[0], "added_p99_ms": middle[1]})


if __name__ == "__main__":
    main()
