"""Finds the tokenizer of a model: tokenizer.json of a folder, another format that transformers can convert, or the vocabulary
inside a .gguf file."""

from penstock.engine.model_files import ModelFiles
from penstock.engine.text.gguf_tokenizer import tokenizer_from_gguf
from penstock.engine.text.hf_tokenizer import tokenizer_from_folder
from penstock.engine.text.tokenizer import Tokenizer


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Load the tokenizer of a model. Raise ModelNotFound or ModelRefused if there is none that can be trusted."""
    if files.kind == "gguf":
        return tokenizer_from_gguf(files.path)
    return tokenizer_from_folder(files.path, files.config)
