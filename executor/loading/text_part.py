"""The text model of a checkpoint that has more: images and sounds are other parts' business, which are not read."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from penstock.executor.kernels.codes import Coded
from penstock.executor.loading.checkpoint import Checkpoint

_LANGUAGE = "model.language_model."
_OTHERS = ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.")


class TextPart:
    """The Checkpoint protocol over another one: its `text_config`, and the tensors that are the language model's, as a
    model of text alone calls them. `is_left`: names (those) of tensors that the model has no use for."""

    def __init__(self, checkpoint: Checkpoint, is_left: Callable[[str], bool]) -> None:
        whole = checkpoint.config
        self.config: dict[str, Any] = {**whole, **(whole.get("text_config") or {})}
        self.config["architectures"] = whole.get("architectures")
        self._checkpoint, self.has_codes = checkpoint, checkpoint.has_codes
        names = ((_as_text(name), name) for name in checkpoint.names() if not name.startswith(_OTHERS))
        self._names = {name: stored for name, stored in names if not is_left(name)}

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.shape(self._names[name])

    def read(self, name: str) -> Tensor | Coded:
        return self._checkpoint.read(self._names[name])


def _as_text(name: str) -> str:
    return "model." + name.removeprefix(_LANGUAGE) if name.startswith(_LANGUAGE) else name
