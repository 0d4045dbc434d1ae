"""Skips this folder without DeepSpeed, and ends the ranks when its tests are over."""

import importlib.util
from collections.abc import Iterator

import pytest

from tests.autotp import ranks

collect_ignore_glob = [] if importlib.util.find_spec("deepspeed") else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _end_ranks() -> Iterator[None]:
    yield
    ranks.close_all()
