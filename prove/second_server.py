"""A second server with the same weights, as a control: which findings does it share, and does it answer alike?

A finding that only one of two servers has is that server's, or of what is between it and the client; one that both have
may be a property of the model or of its numbers.
"""

from collections import Counter
from typing import Any

from .judge import compare
from .proof import Finding, Proof

MOST_COMPARED = 16


class SecondServer:
    """The proof of the second server, and how its answers compare."""

    def __init__(self, url: str, proof: Proof) -> None:
        self.url, self.proof = url, proof
        self.alike: Counter[str] = Counter()  # how its answers differ from those of the first server → answers

    async def ask_same_alone(self, first: Proof) -> None:
        """Ask questions of the first server, alone. A difference is no finding: rounding may differ, or the weights."""
        proof, error = self.proof, max(first.error, self.proof.error)
        for index in list(first.references)[:MOST_COMPARED]:
            question = first.questions[index]
            answer = await proof.asker.ask(proof.abilities.completion(question.body) | await proof.fresh())
            if answer.is_done and "model" not in question.body:  # an adapter has another name there
                outcome = compare(first.references[index], answer.first, error, True).outcome
                self.alike[{"wrong": "other tokens", "numbers": "same"}.get(outcome, outcome)] += 1

    def mark(self, findings: list[Finding]) -> None:
        """Add to each finding of the first server whether this one has it too."""
        for finding in findings:
            finding.description += f" (the second server {self._has(finding)})"

    def _has(self, finding: Finding) -> str:
        if any((each.kind, each.case) == (finding.kind, finding.case) for each in self.proof.findings):
            return "has it too"
        ended = self.proof.cases.get(finding.case, "left out") if finding.case else ""
        was_asked = ended.endswith("findings") if finding.case else self.proof.num_compared
        return "does not have it" if was_asked else "could not be asked"

    def result(self) -> dict[str, Any]:
        """Return what the result of the first server says of this one."""
        found = Counter(finding.kind for finding in self.proof.findings)
        model, cases = self.proof.abilities.model, self.proof.cases
        return {"url": self.url, "model": model, "findings": found, "cases": cases, "answers_alone": self.alike}
