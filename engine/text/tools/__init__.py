"""Tool calls and reasoning in a model's text: what models write (formats.py, thinking.py), and how it is read piece by
piece (answer_reader.py, reader.py). Knows no HTTP and no torch; engine/grammar makes models write nothing else."""
