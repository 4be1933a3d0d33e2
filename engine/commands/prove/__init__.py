"""`penstock prove URL`: tests whether a server gives the same answers under load as alone, and leaks nothing.

Without a URL it starts servers of its own with caches that are far too small, and can inject faults into them. The
package works with any OpenAI-compatible server and needs only the standard library; `own/`, which starts Penstock
servers, is the exception.

Read session.py first: it runs the phases. abilities.py detects what the server can do, questions.py draws requests,
asker.py sends them, answers.py reads the answers, judge.py compares them, repeat.py writes scripts.
"""

import argparse
import asyncio

from .options import ProveError, ProveOptions, add_arguments
from .session import exit_code, prove

__all__ = ["ProveError", "add_arguments", "run"]

USER_ERRORS = (ProveError,)


def run(args: argparse.Namespace) -> int:
    """Prove the server or start servers to prove. Print a table and a line of JSON for each run; return 0 without
    findings, 1 with findings, and 3 if too few answers arrived in time to tell."""
    options = ProveOptions.of(args)
    if args.url is None:
        from .own.run import run_own  # imports the engine, which is not needed to prove another server

        return run_own(options)
    if options.worlds or options.faults or options.model or options.serve_options:
        raise ProveError(f"url: {args.url} given; --world, --fault, --model and --serve-options start a server here")
    return exit_code(asyncio.run(prove(args.url, args.url, options)))
