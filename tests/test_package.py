"""The names that `import penstock` offers."""

import pytest

import penstock


def test_every_public_name_is_there_and_listed() -> None:
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
        assert name in dir(penstock)


def test_a_public_name_is_the_one_of_its_module() -> None:
    from penstock.engine.sampling_params import SamplingParams

    assert penstock.SamplingParams is SamplingParams


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        penstock.Llm  # noqa: B018
