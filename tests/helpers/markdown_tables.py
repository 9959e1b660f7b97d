"""Read the Markdown tables of reports."""

from __future__ import annotations


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def rows_of(text: str) -> list[dict[str, str]]:
    """Return the rows of a text's only table as dictionaries by column name."""
    head, _, *lines = map(cells, text.splitlines())
    return [dict(zip(head, line, strict=True)) for line in lines]
