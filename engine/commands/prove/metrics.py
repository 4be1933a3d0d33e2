"""Reads the text that /metrics answers (Prometheus' exposition format) with the standard library alone."""

import re
from collections.abc import Mapping
from typing import NamedTuple

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")


class Metrics(NamedTuple):
    """The metrics of a server at one moment: for each name its samples, each with labels and a value."""

    samples: Mapping[str, list[tuple[Mapping[str, str], float]]]

    @classmethod
    def of(cls, text: str) -> "Metrics":
        """Parse the text; raise ValueError where it is not in the exposition format."""
        samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for line in text.splitlines():
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            found = _SAMPLE.fullmatch(line.strip())
            if found is None:
                raise ValueError(f"not a sample of a metric: {line[:100]!r}")
            labels = {name: _unescaped(value) for name, value in _LABEL.findall(found[2] or "")}
            samples.setdefault(found[1], []).append((labels, float(found[3])))
        return cls(samples)

    def total(self, name: str) -> float | None:
        """Return the sum over all labels; None where there is no metric of this name."""
        values = [value for _, value in self.samples.get(name, ())]
        return sum(values) if values else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return the sums for each value of one label."""
        found: dict[str, float] = {}
        for labels, value in self.samples.get(name, ()):
            key = labels.get(label, "")
            found[key] = found.get(key, 0.0) + value
        return found


def _unescaped(value: str) -> str:
    return _ESCAPE.sub(lambda found: "\n" if found[1] == "n" else found[1], value)
