"""Imports Ray once, ahead of the tests: its own use of pydantic warns, which would be an error here."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import ray.serve  # noqa: F401
