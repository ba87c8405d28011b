"""Imports Ray once, ahead of the tests: its own use of pydantic warns, which would be an error here."""

import os
import warnings

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# On cores that are shared a dozen processes start slowly. Ray would end a proxy that is not ready after 5 s and start
# another, which is no faster.
os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "60"
os.environ["RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S"] = "60"

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import ray.serve  # noqa: F401
