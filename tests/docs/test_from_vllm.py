"""The page for those who come from vLLM says what the command line and the classes do, and no name is left without a word."""

import argparse
import contextlib
from typing import Any

import pytest

from penstock.engine.commands import serve
from penstock.engine.config import ConfigError, engine_config, option_names
from penstock.engine.sampling_params import UNSERVED, UNSERVED_HERE, InvalidRequest, SamplingParams
from penstock.engine.vllm_options import FATES, OF_A_SERVER, SHORT
from tests.docs import vllm_names
from tests.docs.from_vllm import OF_THE_CLASS, PAGE, page


def test_the_page_is_what_the_tables_say() -> None:
    text = PAGE.read_text()
    assert page(text) == text, "run: python -m tests.docs.from_vllm"


def test_every_flag_is_known_by_all_its_names() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    by_word = {word: action.dest for action in parser._actions for word in action.option_strings}
    assert [name for name in vllm_names.FLAGS if f"--{name}" not in by_word] == []
    for short, name in vllm_names.SHORT.items():
        assert by_word[short] == by_word[f"--{name}"], short
    assert {*SHORT.values()} <= {*vllm_names.SHORT, "-O"}


def test_every_keyword_of_the_class_is_known() -> None:
    known = {*option_names(), *OF_THE_CLASS}
    for name in vllm_names.KEYWORDS:
        if name in known:
            continue
        assert name in FATES or name in OF_A_SERVER, name
        with (
            contextlib.suppress(UserWarning),
            pytest.raises(ConfigError, match=f"^{name}: (?!there is no such option)"),
        ):
            engine_config("model", {name: "something else"})


@pytest.mark.parametrize("name", vllm_names.SAMPLING)
def test_every_sampling_parameter_is_served_or_refused_by_name(name: str) -> None:
    if name in SamplingParams.__struct_fields__:
        return
    found = UNSERVED.get(name) or UNSERVED_HERE[name]
    for value in (None, *found.neutral):
        assert SamplingParams(**{name: value}) == SamplingParams()
    with pytest.raises(InvalidRequest, match=f"^{name}: ") as caught:
        SamplingParams(temperature=0.5, **dict[str, Any]({name: "something else"}))
    assert found.reason in str(caught.value)


def test_a_misspelt_sampling_parameter_is_an_error_and_so_is_one_without_a_name() -> None:
    with pytest.raises(TypeError, match="tempature"):
        SamplingParams(tempature=1.0, bad_words=[])  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        SamplingParams(*[3])
