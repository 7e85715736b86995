"""Settings that all tests share."""

from hypothesis import HealthCheck, settings

# The machine that runs these is shared, so wall-clock limits on a single example say nothing.
settings.register_profile(
    "repository", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("repository")
