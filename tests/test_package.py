"""The names that `import penstock` offers."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import penstock


def test_every_public_name_is_there_and_listed() -> None:
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
        assert name in dir(penstock)


def test_a_public_name_is_the_one_of_its_module() -> None:
    from penstock.engine.sampling_params import SamplingParams

    assert penstock.SamplingParams is SamplingParams


def test_uvicorn_has_an_upper_bound_because_its_insides_matter() -> None:
    """A newer version may change what no interface promises: try it, then raise the bound."""
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    (required,) = (each for each in tomllib.loads(text)["project"]["dependencies"] if each.startswith("uvicorn"))
    match = re.fullmatch(r"uvicorn>=([\d.]+),<([\d.]+)", required)
    assert match is not None, required
    lowest, installed, bound = ([*map(int, each.split("."))] for each in (match[1], version("uvicorn"), match[2]))
    assert lowest <= installed < bound


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        penstock.Llm  # noqa: B018
