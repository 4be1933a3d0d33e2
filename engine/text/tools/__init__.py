"""Tool calls and reasoning in a model's text: what models write (formats.py), how it is read piece by piece (reader.py,
thinking.py), and the grammar that makes them write nothing else (lark.py). Knows no HTTP and no torch."""
