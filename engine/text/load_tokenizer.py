"""Loads the tokenizer of a model: a folder's tokenizer.json, a format that transformers can convert, or the vocabulary
in a .gguf file."""

from penstock.engine.model_files import ModelFiles
from penstock.engine.text.gguf_tokenizer import tokenizer_from_gguf
from penstock.engine.text.hf_tokenizer import tokenizer_from_folder
from penstock.engine.text.tokenizer import Tokenizer


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Load the tokenizer of a model; raise ModelNotFound or ModelRefused if there is no usable one."""
    if files.kind == "gguf":
        return tokenizer_from_gguf(files.path)
    return tokenizer_from_folder(files.path, files.config)
