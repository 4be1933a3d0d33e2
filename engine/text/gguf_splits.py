"""Pre-tokenization schemes of byte-level vocabularies in GGUF files, by the name in `tokenizer.ggml.pre`.

A GGUF file only names its scheme; the regular expressions are those of the models' tokenizer.json files. A wrong
scheme raises no error but silently degrades the model, so a name that is not in this table is refused.
"""

import msgspec
from tokenizers import Regex, normalizers, pre_tokenizers

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{TAIL}"
QWEN2 = rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{TAIL}"
QWEN35 = rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{TAIL}"
# Words that end in lower case, and words that end in upper case.
LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
TEKKEN = rf"{LOWER}|{UPPER}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{TAIL}"
GPT4O = rf"{LOWER}{CONTRACTION}?|{UPPER}{CONTRACTION}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{TAIL}"
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{TAIL}",
)


class Split(msgspec.Struct, frozen=True):
    """One pre-tokenization scheme. Each expression splits the pieces that the previous expressions produced."""

    expressions: tuple[str, ...]
    nfc: bool = False  # normalize to Unicode NFC first
    whole_words: bool = False  # a word that is a token is used without applying merges
    add_bos: bool = False  # default if the file does not specify it

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        cuts = [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in self.expressions]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_LLAMA3 = Split((LLAMA3,), whole_words=True, add_bos=True)
_QWEN2 = Split((QWEN2,), nfc=True)
_GPT4O = Split((GPT4O,))
_DIGITS = Split((r"\p{N}", GPT2))  # every digit is a separate word
_GPT2 = Split((GPT2,))

SPLITS: dict[str, Split] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Split((LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "qwen35": Split((QWEN35,), nfc=True),
    "tekken": Split((TEKKEN,), whole_words=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _GPT4O),
    "deepseek-v3": Split(DEEPSEEK3),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), _DIGITS),
    "command-r": Split((r"\p{N}", GPT2), nfc=True),
    **dict.fromkeys(("gpt-2", "phi-2"), _GPT2),
    "default": Split((r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9]{3}")),  # the scheme of llama.cpp under this name
    **dict.fromkeys(("mpt", "olmo"), Split((GPT2,), nfc=True)),
}
