"""How long a test may take."""

import pytest

from tests.conftest import LIMITS_S, pytest_collection_modifyitems


@pytest.mark.parametrize("marker", LIMITS_S)
def test_a_marker_gives_its_time_where_fast_cases_have_less(marker: str, request: pytest.FixtureRequest) -> None:
    item = pytest.Function.from_parent(request.node.parent, name="long", callobj=lambda: None)
    item.add_marker(pytest.mark.timeout(1))
    item.add_marker(marker)
    pytest_collection_modifyitems([item])
    assert next(item.iter_markers("timeout")).args == (LIMITS_S[marker],)
