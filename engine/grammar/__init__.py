"""Constrained answers: what a request asks for → a grammar (source.py) → compiled once (compiler.py) → a `Matcher`
for every sequence (matcher.py) → the masks of a step (masks.py). Over llguidance; knows no torch and no HTTP."""
