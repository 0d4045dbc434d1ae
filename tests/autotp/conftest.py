"""Ends the ranks when the tests of this folder are over."""

from collections.abc import Iterator

import pytest

from tests.autotp import ranks


@pytest.fixture(scope="session", autouse=True)
def _end_ranks() -> Iterator[None]:
    yield
    ranks.close_all()
