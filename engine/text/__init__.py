"""Text processing: tokenizers, streaming detokenizers, chat templates, stop strings. Uses no torch or transformers."""
