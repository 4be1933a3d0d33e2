"""Reads the text that /metrics answers (Prometheus' exposition format) with the standard library alone."""

import re
from typing import NamedTuple

_NUMBER = r"[+-]?(?:Inf|NaN|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)"
_SAMPLE = re.compile(rf"\s*([a-zA-Z_:][\w:]*)(?:\{{(.*)\}})?\s+({_NUMBER})(?:\s+-?\d+)?\s*")


class Metrics(NamedTuple):
    """The samples of a server at one moment: the name, the text of the labels, the value."""

    samples: list[tuple[str, str, float]]

    @classmethod
    def of(cls, text: str) -> "Metrics":
        """Parse the text; skip lines that are no samples."""
        found = filter(None, map(_SAMPLE.fullmatch, text.splitlines()))
        return cls([(each[1], each[2] or "", float(each[3])) for each in found])

    def total(self, name: str, label: str = "") -> float | None:
        """Return the sum over the samples that have the label (`name="value"`); None if there are none."""
        values = [value for each, labels, value in self.samples if each == name and label in labels]
        return sum(values) if values else None
