"""A model's tokenizer with the interface of transformers' tokenizers, which `LLM.get_tokenizer()` returns, and the messages
that Python callers give it: dictionaries in OpenAI's form.

Templates are also given the entries that messages do not have. Errors name the field.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.options import refused_part
from penstock.engine.text.chat_messages import Message, OpenMessage, TextPart, plain
from penstock.engine.text.prompt import chat_prompt
from penstock.engine.text.template import ChatTemplate
from penstock.engine.text.tokenizer import Tokenizer

FIELDS = frozenset(Message.__struct_fields__)
# Parameters of transformers' apply_chat_template that would silently become variables of the template.
_NOT_APPLIED = ("chat_template", "max_length", "padding", "return_dict", "return_tensors", "truncation")


class Encoded(dict[str, Any]):
    """A dictionary whose entries can be read as attributes, like transformers' BatchEncoding."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class FamiliarTokenizer:
    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer, self._template = tokenizer, template
        self.vocab_size = tokenizer.vocab_size
        self.bos_token, self.eos_token = map(tokenizer.special_tokens.get, ("bos_token", "eos_token"))
        # The tokenizer's own end token, as in transformers. Generation may stop at other ids as well.
        self.bos_token_id, self.eos_token_id, self.pad_token_id = map(
            tokenizer.special_id, ("bos_token", "eos_token", "pad_token")
        )

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(self, text: str | list[str], add_special_tokens: bool = True) -> Encoded:
        many = self._tokenizer.encode_batch([text] if isinstance(text, str) else text, add_special_tokens)
        masks = [[1] * len(ids) for ids in many]
        if isinstance(text, str):
            return Encoded(input_ids=many[0], attention_mask=masks[0])
        return Encoded(input_ids=many, attention_mask=masks)

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False) -> str:
        ids: Any = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids  # numpy's and torch's arrays
        return self._tokenizer.decode([ids] if isinstance(ids, int) else ids, skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str | list[int]:
        """Return the conversation's prompt as text, or as token ids; the same prompt as `LLM.chat` makes.

        `template_kwargs` are variables of the template.
        """
        for name in _NOT_APPLIED:
            if template_kwargs.pop(name, None):
                raise InvalidRequest(name, "is not supported here; encode the text, or use transformers' tokenizer")
        text = self.prompt(
            conversation,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=template_kwargs,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def prompt(self, conversation: list[dict[str, Any]], **options: Any) -> str:
        """Render a conversation. The options are those of `chat_prompt`."""
        if self._template is None:
            raise InvalidRequest("messages", "this model has no chat template; use generate() with a prompt")
        return chat_prompt(self._template, messages_of(conversation), **options)


def messages_of(values: object) -> list[Message]:
    if not isinstance(values, list) or not values:
        raise InvalidRequest("messages", "a list of at least one message is expected")
    return [_message(value, f"messages[{place}]") for place, value in enumerate(values)]


def _message(value: object, field: str) -> Message:
    if not isinstance(value, dict):
        raise InvalidRequest(field, f"{type(value).__name__} given; an object with role and content is expected")
    content = value.get("content")
    if isinstance(content, list):
        content = [TextPart("text", part) if isinstance(part, str) else part for part in content]
    fields: dict[str, Any] = {"content": content}  # checked when it has become one text
    others: dict[str, Any] = {}  # what only templates know
    for key, item in value.items():
        if key != "content" and item is not None:
            (fields if key in FIELDS else others)[key] = plain(item, f"{field}.{key}")
    if "thinking" in others:
        fields.setdefault("reasoning_content", others.pop("thinking"))
    fields["others"] = others
    try:
        return msgspec.convert(fields, OpenMessage)
    except msgspec.ValidationError as error:
        path, _, reason = refused_part(fields, OpenMessage, error)
        raise InvalidRequest(field + path, reason) from None
