"""Scripts written for vLLM, with the import changed: each call works, or is refused by name with its replacement.

The executor is the oracle and the tokenizer one of bytes; other tests check the answers."""

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from benchmarks.export import save_tokenizer
from tqdm import tqdm

import penstock
from penstock import LLM, SamplingParams, StructuredOutputsParams, TextPrompt, TokensPrompt
from penstock.engine.config import ConfigError
from penstock.engine.invalid_request import InvalidRequest
from tests.support.fake_engine import byte_tokenizer
from tests.support.oracle_engine import oracle_llm
from tests.support.refusals import cases

PROMPTS = ["Hello, my name is", "The president of the United States is", "The capital of France is"]
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
]
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    tokenizer = byte_tokenizer()
    tokenizer.chat_templates, tokenizer.special_tokens = {"default": TEMPLATE}, {"eos_token": "<eos>"}
    save_tokenizer(tokenizer, folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "max_new_tokens": 30, "eos_token_id": 256}')
    return folder


def loaded(folder: Path, **options: Any) -> LLM:
    defaults = {"hf_overrides": {"vocab_size": 257}, "max_model_len": 512, "skip_tokenizer": False}
    return oracle_llm(folder, **{**defaults, **options})


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with loaded(folder) as llm:
        yield llm


def test_a_script_of_texts_runs(llm: LLM) -> None:
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    outputs = llm.generate(PROMPTS, sampling_params)
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        assert output.prompt == prompt and isinstance(output.outputs[0].text, str)
        assert output.finished and output.request_id and output.outputs[0].finished()
        assert output.prompt_token_ids == list(prompt.encode())


def test_a_script_of_token_ids_runs(llm: LLM) -> None:
    ids: list[list[int]] = [llm.get_tokenizer().encode(prompt) for prompt in PROMPTS]
    one = llm.generate(ids[0], SamplingParams(temperature=0))
    many = llm.generate(
        prompts=[{"prompt_token_ids": each} for each in ids], sampling_params=SamplingParams(temperature=0)
    )
    assert one[0].outputs[0].token_ids == many[0].outputs[0].token_ids and len(many) == 3


def test_a_script_of_dictionaries_runs(llm: LLM) -> None:
    prompts: list[Any] = [{"prompt": PROMPTS[0]}, {"prompt_token_ids": [1, 2, 3]}, "plain"]
    outputs = llm.generate(prompts)
    assert [len(output.outputs) for output in outputs] == [1, 1, 1]
    assert len(llm.generate({"prompt": PROMPTS[0], "multi_modal_data": None})) == 1
    assert len(llm.generate(TokensPrompt(prompt_token_ids=[1, 2, 3]))) == 1
    assert len(llm.generate([TextPrompt(prompt="a"), TextPrompt(prompt="b")])) == 2


def test_a_script_reads_log_probabilities(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (output,) = llm.generate(PROMPTS[0], params)
    choice = output.outputs[0]
    assert choice.logprobs is not None and choice.cumulative_logprob is not None and output.prompt_logprobs is not None
    for place, token_id in enumerate(choice.token_ids):
        found = choice.logprobs[place][token_id]
        assert found.logprob < 0 and found.rank == 1 and found.decoded_token is not None
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(output.prompt_token_ids)
    scored = llm.generate(PROMPTS[0], SamplingParams(max_tokens=0, prompt_logprobs=1))[0]
    assert scored.prompt_logprobs == output.prompt_logprobs and scored.outputs[0].token_ids == []
    for count, expected in ((0, [None]), (None, None)):
        (one,) = llm.generate([[1]], SamplingParams(max_tokens=1, prompt_logprobs=count))
        assert one.prompt_logprobs == expected


def test_a_script_chats(llm: LLM) -> None:
    outputs = llm.chat(CHAT, sampling_params=SamplingParams(max_tokens=4), use_tqdm=False)
    assert bytes(outputs[0].prompt_token_ids).decode() == "system: You are a helpful assistant\nuser: Hello\n"
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    several = llm.chat([CHAT, parts], SamplingParams(max_tokens=4), use_tqdm=True, lora_request=None)
    assert len(several) == 2
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    (shown,) = llm.chat(CHAT, SamplingParams(max_tokens=4), tools=[tool])
    assert b'"name": "weather"' in bytes(shown.prompt_token_ids), "the template knows no tools"


def test_a_script_changes_the_defaults_of_the_models_authors(llm: LLM) -> None:
    sampling_params = llm.get_default_sampling_params()
    assert (sampling_params.temperature, sampling_params.max_tokens) == (0.6, 30)
    sampling_params.max_tokens, sampling_params.top_k = 3, 5
    sampling_params.structured_outputs = {"choice": ["aa", "bb"]}  # type: ignore[assignment]
    assert llm.generate(PROMPTS[0], sampling_params)[0].outputs[0].text in ("aa", "bb")
    other = sampling_params.clone()
    other.seed = 4
    assert sampling_params.seed is None


def test_a_script_renders_its_template_itself(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert llm.generate([text], SamplingParams(max_tokens=3))[0].prompt == text
    assert tokenizer.eos_token == "<eos>" and len(tokenizer) == tokenizer.vocab_size
    assert tokenizer("ab").input_ids == tokenizer("ab")["input_ids"] == [97, 98]
    assert tokenizer(["ab", "c"]).input_ids == [[97, 98], [99]]
    assert not hasattr(tokenizer("ab"), "token_type_ids")
    assert tokenizer.batch_decode([[97, 98], [99]], skip_special_tokens=True) == ["ab", "c"]


def test_a_script_asks_for_structured_outputs(llm: LLM) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"]))
    assert llm.generate("Is it?", sampling_params=params)[0].outputs[0].text in ("Positive", "Negative")
    params = SamplingParams(structured_outputs={"regex": "[0-9]{4}"}, max_tokens=10)  # type: ignore[arg-type]
    assert llm.generate("A year:", params)[0].outputs[0].text.isdigit()


def test_a_script_has_a_progress_bar_of_its_own(llm: LLM) -> None:
    bars: list[Any] = []

    def make(**settings: Any) -> Any:
        bars.append(tqdm(**settings))
        return bars[-1]

    llm.generate(PROMPTS, SamplingParams(max_tokens=2), use_tqdm=partial(make, leave=False))
    assert bars[0].n == len(PROMPTS)


def test_a_script_sets_penalties(llm: LLM) -> None:
    params = SamplingParams(**dict(cases(__file__, "penalties and limits of a script")))
    assert set(llm.generate(PROMPTS[0], params)[0].outputs[0].text) <= set("ABC")


@pytest.mark.parametrize(("name", "call", "kind", "word"), cases(__file__, "calls that do not exist here", **globals()))
def test_what_is_not_served_is_refused_by_name(
    llm: LLM, name: str, call: Callable[[LLM], Any], kind: type[Exception], word: str
) -> None:
    with pytest.raises(kind, match=word):
        call(llm)


def test_options_of_a_script_are_taken_or_refused_by_name(folder: Path) -> None:
    with pytest.warns(UserWarning, match="trust_remote_code: without effect: code of a model"):
        loaded(folder, trust_remote_code=True).shutdown()
    with pytest.raises(ConfigError, match="pooler_config"):
        loaded(folder, pooler_config={})
    with loaded(folder, max_logprobs=30) as llm:
        assert llm.generate("a", SamplingParams(logprobs=30, max_tokens=1))[0].outputs[0].logprobs is not None
        with pytest.raises(InvalidRequest, match="30"):
            llm.generate("a", SamplingParams(logprobs=31, max_tokens=1))
    for wrong in (-1, "x"):
        with pytest.raises(ValueError, match="max_logprobs: .* given; a whole number from 0 is expected"):
            loaded(folder, max_logprobs=wrong)


def test_a_deleted_model_is_gone(folder: Path) -> None:
    llm = loaded(folder)
    llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
    core = weakref.ref(llm._core)
    del llm
    gc.collect()
    assert core() is None


def test_parameters_changed_later_do_not_reach_requests_that_ran(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    first = llm.generate("a", params, use_tqdm=False)
    params.max_tokens = 3
    assert [len(each[0].outputs[0].token_ids) for each in (first, llm.generate("a", params, use_tqdm=False))] == [2, 3]
    assert {"LLM", "SamplingParams", "StructuredOutputsParams", "RequestOutput"} <= set(penstock.__all__)
