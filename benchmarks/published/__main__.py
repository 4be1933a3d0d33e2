"""The published results that this project set out to reproduce: each before and after, in one run.

    python -m benchmarks.published [keys broadcast disk hasher eplb] [--full]

The short form of all of them takes under ten minutes on two cores; --full runs the real sizes. Every result ends in a
JSON line, a plot in docs/img and, when all are run, the figures in docs/benchmarks.md.
"""

import argparse
import time

from benchmarks.published import broadcast, disk, eplb, hasher, keys
from benchmarks.published.report import show, write_page

RESULTS = {"keys": keys, "broadcast": broadcast, "disk": disk, "hasher": hasher, "eplb": eplb}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RESULTS)} (default: all)")
    parser.add_argument("--full", action="store_true", help="the real sizes")
    args = parser.parse_args()
    for name in args.names:
        if name not in RESULTS:
            parser.error(f"{name!r} given; known are {', '.join(RESULTS)}")
    started_s = time.monotonic()
    reports = []
    for name in args.names or RESULTS:
        print(f"== {name}, {time.monotonic() - started_s:.0f} s after the start", flush=True)
        reports.append(RESULTS[name].make(args.full))
        show(reports[-1])
    if len(reports) == len(RESULTS):
        write_page(reports, args.full)
    print(f"{time.monotonic() - started_s:.0f} s in all")


if __name__ == "__main__":
    main()
