"""Hypothesis draws the same examples in every run."""

from hypothesis import settings

settings.register_profile("unit", derandomize=True, deadline=None)
settings.load_profile("unit")
