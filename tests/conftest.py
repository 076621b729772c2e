"""Set time limits, and skip the tests that take too long for every day."""

import os

import pytest

SLOW_SECONDS = 1200  # a test of seconds can take minutes while another process is busy


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give slow tests more time than pyproject.toml does, and skip those that only `make test-all` runs."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))
        if item.get_closest_marker("exhaustive") and not os.environ.get("HF_SLT_ALL_TESTS"):
            item.add_marker(pytest.mark.skip(reason="takes minutes; make test-all runs it"))
