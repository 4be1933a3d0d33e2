"""`penstock prove URL`: tests whether a server gives the same answers under load as alone, and leaks nothing.

Without a URL it starts servers of its own with caches that are far too small, and can inject faults into them. The
package works with any OpenAI-compatible server and needs only the standard library; `own/`, which starts Penstock
servers, is the exception. The wheel `penstock-prove` has everything else, and the reference server of --self-test.

Read session.py first: it runs the phases. abilities.py detects what the server can do, questions.py draws requests,
asker.py sends them, answers.py reads the answers, judge.py compares them, cases.py runs small experiments, report.py and
repeat.py write reports and scripts.
"""

import argparse
import asyncio
from importlib import import_module
from types import ModuleType

from .journal import cancelled_by_signals
from .options import FILES, ProveError, ProveOptions, add_arguments, chosen
from .report import exit_code
from .session import CASES, list_cases, prove

__all__ = ["ProveError", "add_arguments", "run"]

USER_ERRORS = (ProveError,)


def run(args: argparse.Namespace) -> int:
    """Prove the server or start servers to prove. Print a table and a line of JSON for each run; return 0 without
    findings, 1 with findings, 3 if too few answers arrived in time to tell, and 4 if a signal ended the run early."""
    options = ProveOptions.of(args)
    chosen("case", options.cases, CASES)  # refuses unknown names before a server is started
    if options.lists_cases:
        print(list_cases())
        return 0
    has_own = options.worlds or options.faults or options.model or options.serve_options
    if options.self_test:
        if args.url or has_own or any(getattr(options, name) for name in (*FILES, "scripts")):
            raise ProveError("self-test: given; it starts the servers that it proves, and has no report in a file")
        # In the sources the reference server is in tests/support.
        server = _part("reference_server", "self-test: the reference server is part of the wheel penstock-prove")
        return int(server.self_test(prove, options))
    if (options.restart or options.start) and args.url is None:
        raise ProveError("restart: given; it restarts the server at a URL")
    if args.url and has_own:
        raise ProveError(f"url: {args.url} given; --world, --fault, --model and --serve-options start a server here")

    async def prove_until_signal() -> int:
        with cancelled_by_signals():
            return exit_code(await prove(args.url, args.url, options))

    try:
        if args.url is None:
            return int(
                _part("own.run", "url: none given; only `penstock prove` starts servers of its own").run_own(options)
            )
        return asyncio.run(prove_until_signal())
    except asyncio.CancelledError:  # before anything was known
        return 130


def _part(name: str, otherwise: str) -> ModuleType:
    """Import a part that not every installation has."""
    try:
        return import_module(f"{__package__}.{name}")
    except ModuleNotFoundError:
        raise ProveError(otherwise) from None
