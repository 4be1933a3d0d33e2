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


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("uvicorn", "engine/http/connection.py derives from its httptools protocol"),
    ],
)
def test_a_package_whose_insides_matter_has_an_upper_bound_and_its_reason(name: str, why: str) -> None:
    """A newer version may change what no interface promises: try it, then raise the bound."""
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    (wanted,) = (each for each in tomllib.loads(text)["project"]["dependencies"] if re.match(rf"{name}\b", each))
    found = re.fullmatch(rf"{name}>=([\d.]+),<([\d.]+)", wanted)
    assert found is not None, wanted
    lowest, installed, bound = ([int(part) for part in each.split(".")] for each in (found[1], version(name), found[2]))
    assert lowest <= installed < bound
    assert why in text


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        penstock.Llm  # noqa: B018
