"""Reading the tables that reports write."""

from __future__ import annotations


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def rows_of(text: str) -> list[dict[str, str]]:
    """The rows of the only table, each by its columns' names."""
    head, _, *lines = map(cells, text.splitlines())
    return [dict(zip(head, line, strict=True)) for line in lines]
