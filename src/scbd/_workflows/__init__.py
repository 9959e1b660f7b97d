"""Whole analyses in one call, as the command line offers them: run, compare, select alpha, cross-fit, inspect, demo."""
