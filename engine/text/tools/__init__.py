"""Tool calls and reasoning in a model's output: the formats (formats.py, thinking.py) and the parsers of whole answers
(answer_reader.py, harmony.py). Uses neither HTTP nor torch. engine/grammar constrains a model to a format."""
