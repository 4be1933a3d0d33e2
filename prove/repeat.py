"""Reduces a failure to the fewest requests that repeat it, and writes a curl script that sends them.

A failure that a few tries do not repeat is written as it happened, and the script says so.
"""

import asyncio
import json
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .asker import PATH
from .proof import Finding, Proof
from .questions import Ask
from .report import bug_report
from .tables import load_table

TRIES, SLOW_TRIES = 10, 3  # each try of a hang takes a timeout
PER_KIND = 2  # failures of one kind that get a script
HEAD = "\n".join([*load_table("texts")["script"], ""])


async def write_scripts(proof: Proof, url: str, folder: Path) -> list[Path]:
    """Write a script for the first failures of every kind, preferring failures of clients that do not disconnect."""
    proof.asker.until(1.0)
    written: list[Path] = []
    seen: Counter[str] = Counter()
    for finding in sorted(proof.findings, key=lambda each: each.ask is not None and each.ask.leaves_s is not None):
        seen[finding.kind] += 1
        if seen[finding.kind] > PER_KIND:
            continue
        asks, note = await _fewest(proof, finding)
        path = folder / f"{len(written) + 1}-{finding.kind.replace(' ', '-')}.sh"
        folder.mkdir(exist_ok=True)
        head = HEAD.format(description=" ".join(finding.description.split()), note=note, name=path.name, url=url)
        path.write_text(head + "\n".join(_lines(proof, finding, asks)) + "\n")
        path.with_suffix(".md").write_text(bug_report(proof, finding, path.name))
        written.append(path)
    return written


async def _fewest(proof: Proof, finding: Finding) -> tuple[list[Ask], str]:
    """Return the requests to send, including the failing one, and a note whether they repeated the failure."""
    ask, run = finding.ask, f"the whole run was: penstock-prove URL --seed {proof.options.seed}"
    if finding.case:
        return [], f"the requests of: penstock-prove URL --case {finding.case} --seed {proof.options.seed}"
    if ask is None or ask.question < 0:
        return finding.beside, run
    left = SLOW_TRIES if finding.kind == "hang" else TRIES
    asks = window = finding.beside or [ask]
    for asks in ([ask], [ask._replace(at_s=ask.at_s - 1.0), ask], window):
        left -= 1
        if await _repeats(proof, finding, asks):
            break
    else:
        return window, f"not repeated by these requests; {run}"
    part = len(asks) // 2
    while part and left > 0 and len(asks) > 2:  # leave out halves, quarters … of the other requests
        others = [each for each in asks if each is not ask]
        for first in range(0, len(others), part):
            left -= 1
            fewer = [each for each in asks if each is ask or each not in others[first : first + part]]
            if left >= 0 and await _repeats(proof, finding, fewer):
                asks = fewer
                break
        else:
            part //= 2
    return asks, f"repeated by these {len(asks)}"


async def _repeats(proof: Proof, finding: Finding, asks: Sequence[Ask]) -> bool:
    """Send the requests with their original gaps; return whether the failing one fails in the same way."""
    assert finding.ask is not None
    if proof.asker.is_over:
        return False
    await proof.fresh()
    first_s = min(ask.at_s for ask in asks)

    async def one(ask: Ask) -> bool:
        await asyncio.sleep(ask.at_s - first_s)
        answer = await proof.send(ask)
        return ask is finding.ask and proof.verdict(ask, answer).outcome == finding.kind

    return any(await asyncio.gather(*map(one, asks)))


def _lines(proof: Proof, finding: Finding, asks: Sequence[Ask]) -> list[str]:
    if finding.case:
        return _case_lines(finding)
    if finding.ask is None or finding.ask.question < 0:
        return ['call "$URL/metrics" | grep -E "num_requests|blocks|resident|open_fds"']
    body = proof.body(finding.ask.question)
    reference = proof.references.get(finding.ask.question)
    lines = [f"# alone the answer was {json.dumps(reference.text)}"] if reference is not None else []
    lines += ["echo alone:", _line({**body, **proof.abilities.fresh("a-salt-of-its-own-$$")}, 60.0)]
    now_s = min(ask.at_s for ask in asks)
    for ask in asks:
        if ask.at_s - now_s >= 0.001:
            lines.append(f"sleep {ask.at_s - now_s:.3f}")
        now_s = ask.at_s
        if ask.question < 0:
            lines.append("""call "$URL/reset_prefix_cache" -d '{}'""")
            continue
        line = _line(proof.body(ask.question, ask.fields), 60.0 if ask.leaves_s is None else ask.leaves_s)
        lines.append(f"{{ echo this one:; {line}; }} &" if ask is finding.ask else f"{line} >/dev/null &")
    return [*lines, "wait"]


def _case_lines(finding: Finding) -> list[str]:
    lines = []
    for group in finding.sent:
        one = [_line(sent.body, 60.0 if sent.leaves_s is None else sent.leaves_s, sent.path) for sent in group]
        lines += one if len(one) == 1 else [*(f"{each} &" for each in one), "wait"]
    return lines


def _line(body: dict[str, Any], most_s: float, path: str = PATH) -> str:
    content = shlex.quote(json.dumps(body)).replace("$$", "'$$'")  # the shell replaces $$ by its process id
    return f"ask {max(most_s, 0.001):.3f} {path} {content}"
