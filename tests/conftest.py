"""Settings that all tests share."""

import pytest
from hypothesis import HealthCheck, settings

# The machine that runs these is shared, so wall-clock limits on a single example say nothing.
settings.register_profile(
    "repository", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("repository")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tests of one xdist_group must share a worker: else each worker does their costly set-up."""
    if not session.config.getoption("loadgroup", default=False):
        return
    for item in session.items:
        mark = item.get_closest_marker("xdist_group")
        if mark and not item.nodeid.endswith(f"@{mark.args[0]}"):
            raise pytest.UsageError(
                f"{item.nodeid} is not run as part of the group {mark.args[0]}: this pytest and"
                " this pytest-xdist do not fit together; run bash tests/run.sh, which installs"
                " two that do"
            )
