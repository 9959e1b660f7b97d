"""Helpers that all packages share: checks of arguments, files, labels, numbers and linear maps."""
