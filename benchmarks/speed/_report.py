"""Benchmark rows as text, and as the tables of the pages beside it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pandas as pd
from _compare import Row

_COLUMNS = {
    "claim": "what",
    "naive_s": "naive",
    "ours_s": "scbd",
    "ratio": "ratio",
    "difference": "difference",
    "difference_float64": "difference in float64",
    "naive_mib": "naive, peak MiB",
    "ours_mib": "scbd, peak MiB",
    "bytes_a_cell": "peak memory, bytes per cell",
    "note": "remark",
}


def as_text(rows: list[Row]) -> str:
    return pd.DataFrame(cells(rows)).to_string(index=False)


def cells(rows: list[Row]) -> list[dict[str, str]]:
    """Rows as they are shown: only columns that some row has."""
    used = [key for key in _COLUMNS if any(key in row for row in rows)]
    return [{_COLUMNS[key]: _cell(row, key) for key in used} for row in rows]


def as_markdown(table: list[dict[str, str]]) -> str:
    lines = [list(table[0]), ["---"] * len(table[0]), *(list(row.values()) for row in table)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_docs(results: dict[str, Any], path: Path) -> None:
    """Put each table between its pair of markers, and leave the prose alone."""
    text = path.read_text()
    for name, result in results.items():
        table = result["table"] if "table" in result else cells(result["rows"])
        block = f"{as_markdown(table)}\n\nMeasured {result['date']}: {result['machine']}."
        text = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)",
            lambda match: f"{match[1]}{block}\n{match[2]}",
            text,
            flags=re.DOTALL,
        )
    path.write_text(text)


def _cell(row: Row, key: str) -> str:
    value = row.get(key)
    if value is None:
        return ""
    if key == "ratio":
        spread = row.get("ratio_sd", math.nan)
        return f"{value:.2f}×" + ("" if math.isnan(spread) else f" ± {spread:.2f}")
    if key in ("naive_s", "ours_s"):
        return _seconds(value)
    if key.endswith("_mib") or key == "bytes_a_cell":
        return f"{value:,.0f}"
    return f"{value:.1e}" if key.startswith("difference") else str(value)


def _seconds(value: float) -> str:
    scale, unit = next(((s, u) for s, u in ((1, "s"), (1e-3, "ms")) if value >= s), (1e-6, "µs"))
    return f"{value / scale:.3g} {unit}"
