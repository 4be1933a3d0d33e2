"""`penstock prove URL`: whether a server gives the answers under load that it gives alone, and what it leaves behind.

Without a URL it starts servers of its own with caches that are far too small, and can inject faults into them. The
package works with any OpenAI-compatible server and imports nothing of the engine; `own.py`, which starts servers, is the
exception.
"""

import argparse
import asyncio

from .options import ProveError, ProveOptions, add_arguments
from .session import exit_code, prove

__all__ = ["ProveError", "add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Return 0 without findings, 1 with some, and 3 where too few answers came in the time to tell. Every run prints a
    table and a line of JSON."""
    options = ProveOptions.of(args)
    if args.url is None:
        from .own import run_own  # imports the engine, which a proof of another server does without

        return run_own(options)
    if options.worlds or options.faults or options.model or options.serve_options:
        raise ProveError(f"url: {args.url} given; --world, --fault, --model and --serve-options start a server here")
    return exit_code(asyncio.run(prove(args.url, args.url, options)))
