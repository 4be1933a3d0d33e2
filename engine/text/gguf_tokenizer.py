"""Rebuilds the tokenizer stored in a .gguf file for the `tokenizers` library.

Two kinds cover the supported models: `gpt2`, byte-level BPE whose merges are in the file, and `llama`, SentencePiece
BPE with a score per token and no merges. Key names and token types are those of the GGUF specification.

A file only names its way of splitting text before byte-level BPE; the regular expressions in gguf_tokenizer.json are
those of the models' tokenizer.json files. A wrong one raises no error but silently degrades the model, so unknown names
are refused.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from penstock.engine.model_error import ModelError
from penstock.engine.text.tokenizer import Tokenizer, refusing
from penstock.executor.gguf_header import GgufHeader
from penstock.executor.protocol import ExecutorError


class Split(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One pre-tokenization scheme. Each expression splits the pieces that the previous expressions produced."""

    names: tuple[str, ...]  # in files
    expressions: tuple[str, ...]  # names of entries in `expressions` of the table
    nfc: bool = False  # normalize to Unicode NFC first
    whole_words: bool = False  # a word that is a token is used without applying merges
    add_bos: bool = False  # default if the file does not specify it

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        alternatives = [TABLE.expressions[name] for name in self.expressions]
        cuts = [pre_tokenizers.Split(Regex("|".join(each)), behavior="isolated") for each in alternatives]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


class TokenizerTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of gguf_tokenizer.json."""

    expressions: dict[str, tuple[str, ...]]  # the alternatives of a regular expression, in order
    splits: tuple[Split, ...]  # "default" is the scheme of llama.cpp under this name
    special_tokens: dict[str, str]  # name of a special token → its key in the file ("seperator": sic)
    # Control tokens that end a turn or a text in every vocabulary that has them. GGUF files name one or two of them (eos,
    # eot); the generation_config.json of the same models lists the others.
    end_tokens: frozenset[str]


TABLE = msgspec.json.decode(Path(__file__).with_suffix(".json").read_bytes(), type=TokenizerTable)
SPLITS = {name: split for split in TABLE.splits for name in split.names}

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"  # SentencePiece's character for a space
MAX_TOKEN_CHARS = 1024  # finding a token's merges is quadratic in its length; the longest known have 128 spaces


def tokenizer_from_gguf(path: Path) -> Tokenizer:
    try:
        metadata = GgufHeader(path).metadata
        vocabulary = _Vocabulary(metadata)
        backend = vocabulary.backend()
    except ExecutorError as error:
        raise ModelError(f"model: {error}") from None
    except ModelError as error:
        raise ModelError(f"tokenizer: {path}: {error}") from None
    return Tokenizer(
        backend,
        vocab_size=len(vocabulary.tokens),
        eos_ids=vocabulary.eos_ids(),
        special_tokens=vocabulary.special_tokens(),
        chat_templates=_chat_templates(metadata),
    )


class _Vocabulary:
    """The tokens, token types and scores from the metadata, validated to be lists of equal length."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.metadata = metadata
        self.tokens: list[str] = self.listed("tokens", str)
        count = len(self.tokens)
        if not count:
            raise ModelError("tokenizer.ggml.tokens is missing or empty: the file carries no vocabulary")
        longest = max(map(len, self.tokens))
        if longest > MAX_TOKEN_CHARS:
            raise ModelError(f"tokenizer.ggml.tokens has one of {longest} characters; at most {MAX_TOKEN_CHARS}")
        self.types: list[int] = self.listed("token_type", int) or [NORMAL] * count
        self.scores: list[float] = self.listed("scores", float) or [0.0] * count
        if len(self.types) != count or len(self.scores) != count:
            raise ModelError(
                f"tokenizer.ggml lists {count} tokens, {len(self.types)} types and {len(self.scores)} scores; "
                "the three must be equally many"
            )

    def get(self, key: str) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}")

    def listed(self, key: str, kind: type) -> list[Any]:
        values = self.get(key)
        if values is None:
            return []
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise ModelError(f"tokenizer.ggml.{key} is not a list of {kind.__name__}")
        return values

    def token_id(self, name: str) -> int | None:
        token_id = self.get(f"{name}_token_id")
        return token_id if isinstance(token_id, int) and 0 <= token_id < len(self.tokens) else None

    def ids_of(self, *types: int) -> Iterable[int]:
        return (token_id for token_id, kind in enumerate(self.types) if kind in types)

    def special_tokens(self) -> dict[str, str]:
        ids = {name: self.token_id(key) for name, key in TABLE.special_tokens.items()}
        return {name: self.tokens[token_id] for name, token_id in ids.items() if token_id is not None}

    def eos_ids(self) -> frozenset[int]:
        named = {token_id for key in ("eos", "eot", "eom") if (token_id := self.token_id(key)) is not None}
        control = {self.tokens[token_id]: token_id for token_id in self.ids_of(CONTROL)}
        harmony = {"<|return|>", "<|call|>"}  # of gpt-oss, where <|end|> only ends a message within an answer
        texts = TABLE.end_tokens | (harmony if harmony <= control.keys() else {"<|end|>"})
        return frozenset(named - {control.get("<|end|>")} | {control[text] for text in texts & control.keys()})

    def backend(self) -> Backend:
        kind = self.get("model")
        if kind == "gpt2":
            backend, add_bos = _byte_level(self)
        elif kind in ("llama", "gemma4"):
            backend, add_bos = _sentencepiece(self), kind == "llama"
        else:
            raise ModelError(f"tokenizer.ggml.model is {kind!r}; supported are 'gpt2', 'llama' and 'gemma4'")
        _add_whole_tokens(backend, self)
        add_bos = add_bos if self.get("add_bos_token") is None else bool(self.get("add_bos_token"))
        _add_ends(backend, self, add_bos and kind != "gemma4", bool(self.get("add_eos_token")))
        return backend


def _byte_level(vocabulary: _Vocabulary) -> tuple[Backend, bool]:
    pre = vocabulary.get("pre")
    if pre not in SPLITS:
        known = ", ".join(sorted(SPLITS))
        said = "is missing (a file from before 2024-05)" if pre is None else f"is {pre!r}"
        raise ModelError(
            f"tokenizer.ggml.pre {said}, so it is not known how this vocabulary splits text; supported are {known}. "
            "Convert the model again with a current llama.cpp, or use its Hugging Face folder"
        )
    split = SPLITS[pre]
    # Unused ids only pad the embedding table; they have no text.
    vocab = {
        token: token_id for token_id, token in enumerate(vocabulary.tokens) if vocabulary.types[token_id] != UNUSED
    }
    merges = _merges(vocabulary)
    backend = Backend(_bpe(vocab, merges, ignore_merges=split.whole_words))
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = split.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, split.add_bos


def _sentencepiece(vocabulary: _Vocabulary) -> Backend:
    tokens = vocabulary.tokens
    if vocabulary.get("model") == "gemma4" or str(vocabulary.metadata.get("general.architecture")).startswith("gemma"):
        # For Gemma, the file stores runs of spaces as plain spaces, and the merge order is that of the token ids.
        tokens = [SPACE * len(token) if token.strip(" ") == "" else token for token in tokens]
        ranks: list[float] = [-float(token_id) for token_id in range(len(tokens))]
    else:
        ranks = vocabulary.scores
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = _merges(vocabulary) if vocabulary.get("merges") else _merges_of_scores(vocabulary, tokens, vocab, ranks)
    unknown = vocabulary.token_id("unknown")
    unk_token = None if unknown is None else tokens[unknown]
    backend = Backend(_bpe(vocab, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True))
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    spaces = normalizers.Replace(" ", SPACE)
    said = vocabulary.get("add_space_prefix")
    if vocabulary.get("model") == "llama" if said is None else said:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(steps)
    return backend


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    with refusing("the vocabulary and the merges do not belong together"):
        return models.BPE(vocab=vocab, merges=merges, **options)


def _merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    merges = []
    for line in vocabulary.listed("merges", str):
        left, found, right = line.partition(" ")
        if not found or not left or not right:
            raise ModelError(f"tokenizer.ggml.merges has {line[:40]!r}; two tokens with a space between are expected")
        merges.append((left, right))
    return merges


def _merges_of_scores(
    vocabulary: _Vocabulary, tokens: list[str], vocab: dict[str, int], ranks: list[float]
) -> list[tuple[str, str]]:
    """Return merges that reproduce SentencePiece's scores: every split of a token into two tokens, best token first.

    Ties are ordered by the longer left part, then by the longer right part, as in the converted tokenizer.json files.
    """
    found = []
    for token_id in vocabulary.ids_of(NORMAL, USER_DEFINED):
        token = tokens[token_id]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((ranks[token_id], cut, len(right), left, right))
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _add_whole_tokens(backend: Backend, vocabulary: _Vocabulary) -> None:
    """Add control and user-defined tokens, which are matched in the text as a whole before it is split."""
    for add, types in ((backend.add_special_tokens, (UNKNOWN, CONTROL)), (backend.add_tokens, (USER_DEFINED,))):
        is_special = CONTROL in types
        texts = [(token_id, vocabulary.tokens[token_id]) for token_id in vocabulary.ids_of(*types)]
        # A token whose text is not in the vocabulary would get a new id beyond the model's, so it is skipped.
        known = [text for token_id, text in texts if text and backend.token_to_id(text) == token_id]
        add([AddedToken(text, normalized=False, special=is_special) for text in known])


def _add_ends(backend: Backend, vocabulary: _Vocabulary, add_bos: bool, add_eos: bool) -> None:
    bos = vocabulary.token_id("bos") if add_bos else None
    eos = vocabulary.token_id("eos") if add_eos else None
    ends = {vocabulary.tokens[token_id]: token_id for token_id in (bos, eos) if token_id is not None}
    if ends:
        parts = [each for each in (bos, "$A", eos) if each is not None]
        whole = [each if isinstance(each, str) else vocabulary.tokens[each] for each in parts]
        backend.post_processor = processors.TemplateProcessing(single=whole, special_tokens=list(ends.items()))


def _chat_templates(metadata: dict[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    named = {key.removeprefix(f"{prefix}."): value for key, value in metadata.items() if key.startswith(f"{prefix}.")}
    found = {"default": metadata.get(prefix), **named}
    return {name: source for name, source in found.items() if isinstance(source, str)}
