"""Text in and out: tokenizers, streaming detokenizers, chat templates, stop strings. No torch, no transformers."""
