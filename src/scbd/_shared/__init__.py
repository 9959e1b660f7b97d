"""Helpers for all parts of scbd: checks of arguments, file access, labels of cells, numeric tables and linear maps."""
