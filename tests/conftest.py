"""Settings that all tests share."""

import gc

import pytest
from hypothesis import HealthCheck, settings

# The machine that runs these is shared, so wall-clock limits on a single example say nothing.
settings.register_profile(
    "repository", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("repository")


def pytest_configure() -> None:
    """Look for cycles less often: with LibCST's large trees that is a quarter of the time."""
    gc.set_threshold(20_000, 20, 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups first, those of a vLLM ahead: a long one that begins late leaves the others idle.

    So do single tests of many kills or steps: they come before the many short ones.
    """

    def place(item: pytest.Item) -> int:
        mark = item.get_closest_marker("xdist_group")
        if mark is not None:
            return int(not str(mark.args[0]).startswith("vllm-"))
        return 2 if item.path.parent.name == "writing" else 3

    items.sort(key=place)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of one xdist_group must share a worker: else each worker does their costly set-up."""
    mark = item.get_closest_marker("xdist_group")
    if mark is None or not item.config.getoption("loadgroup", default=False):
        return
    if not item.nodeid.endswith(f"@{mark.args[0]}"):
        pytest.fail(
            f"not run as one of the group {mark.args[0]}: this pytest and this pytest-xdist do not"
            " fit together; bash tests/run.sh installs two that do",
            pytrace=False,
        )
