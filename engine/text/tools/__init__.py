"""Tool calls and reasoning in a model's output: the formats (formats.py, thinking.py) and their incremental parsers
(answer_reader.py, reader.py). Uses neither HTTP nor torch. engine/grammar constrains models to these formats."""
