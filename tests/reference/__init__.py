"""Naive implementations that are easy to verify, for comparison with those of the package."""
