"""What constraining costs: throughput with 80 % of the requests after a JSON schema, beside none, at the same length.

One server on the default model, loaded by `penstock bench serve` by turns; the median ratio of the output tokens
per second, and one JSON line.

    python benchmarks/bench_structured.py [--pairs 6] [--concurrency 16] [--output-len 128] [--executor uniproc]
"""

import argparse
import asyncio
import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator

from pairs import alternate, judge, record

from penstock.engine.commands.bench import serving as serve


@contextlib.contextmanager
def server(executor: str) -> Iterator[str]:
    command = [sys.executable, "-m", "penstock.cli", "serve", "--port", "0", "--executor", executor]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if (found := re.search(r"Ready .*(http://\S+)", line)) is not None:
                yield found[1]
                return
        raise RuntimeError("the server ended before it was ready")
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--ratio", type=float, default=0.8)
    parser.add_argument("--executor", default="uniproc")
    args = parser.parse_args()
    bench = argparse.ArgumentParser()
    serve.add_arguments(bench)

    def run(url: str, ratio: float) -> float:
        options = {
            "base-url": url,
            "num-prompts": args.num_prompts,
            "num-warmups": args.concurrency,
            "max-concurrency": args.concurrency,
            "random-input-len": args.input_len,
            "random-output-len": args.output_len,
            "structured-ratio": ratio,
            "temperature": 1.0,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        result = asyncio.run(serve.measure(bench.parse_args([*words, "--disable-tqdm"])))
        assert result["failed"] == 0 and result["total_output_tokens"] == args.num_prompts * args.output_len
        print(f"  {ratio:.0%} structured: {result['output_throughput']:.1f} tok/s", flush=True)
        return float(result["output_throughput"])

    with server(args.executor) as url:
        pairs = alternate(lambda: run(url, args.ratio), lambda: run(url, 0.0), args.pairs)
    verdict = judge(pairs, higher_is_better=True)
    print(f"{args.ratio:.0%} structured beside none: {verdict}")
    record(
        "structured",
        {
            "ratio": round(verdict.ratio, 3),
            "interval": [verdict.low, verdict.high],
            "structured_tok_s": [round(pair.ours, 1) for pair in pairs],
            "free_tok_s": [round(pair.theirs, 1) for pair in pairs],
        },
    )


if __name__ == "__main__":
    main()
