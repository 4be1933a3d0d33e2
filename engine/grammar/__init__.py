"""Constrained decoding with llguidance: the request's constraint → a grammar (rules.py) → compiled once (compiler.py)
→ one `Matcher` per sequence (matcher.py) → the token masks of a step (masks.py). Uses neither torch nor HTTP."""
