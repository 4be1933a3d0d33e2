"""Reads the text that /metrics answers (Prometheus' exposition format) with the standard library alone."""

import re
from typing import NamedTuple

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")


class Metrics(NamedTuple):
    """The samples of a server at one moment: the name, the text of the labels, the value."""

    samples: list[tuple[str, str, float]]

    @classmethod
    def of(cls, text: str) -> "Metrics":
        """Parse the text; raise ValueError where it is not in the exposition format."""
        samples = []
        for line in filter(None, map(str.strip, text.splitlines())):
            found = _SAMPLE.fullmatch(line)
            if found is not None:
                samples.append((found[1], found[2] or "", float(found[3])))
            elif not line.startswith("#"):
                raise ValueError(f"not a sample of a metric: {line[:100]!r}")
        return cls(samples)

    def total(self, name: str, label: str = "") -> float | None:
        """Return the sum over the samples that have the label (`name="value"`); None if there are none."""
        values = [value for each, labels, value in self.samples if each == name and label in labels]
        return sum(values) if values else None
