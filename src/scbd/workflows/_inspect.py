"""What lies at a path, and what would be read of it: for a person, before anything is converted or trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from anndata import AnnData

from scbd._keys import IMAGE_KEY
from scbd._labels import as_columns, label_values
from scbd._messages import head
from scbd.data import Crops, image_columns, image_keys, kind_of, open_screen, read_crops
from scbd.data.profiles import Missing, is_about, odd_names, read_features
from scbd.model import contrasts_told
from scbd.workflows._inspect_fields import FIELDS, channel_line, of_fields
from scbd.workflows._opening import LABELS, TABLES, conversion, key_option, typed

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    import pandas as pd

# cells whose pixels are looked at, and of these such that are drawn
_SAMPLED, _DRAWN = 64, 10
# how the reason begins, where there is one
UNREADABLE = "It cannot be read as it is: "


def inspect(
    path: str | os.PathLike[str],
    *,
    image_key: str | None = None,
    y_key: str | Sequence[str] | None = None,
    e_key: str | Sequence[str] | None = None,
    missing: Missing = "drop",
    sheet: str | os.PathLike[str] | None = None,
) -> str:
    """Say what a file or folder is, what would be read of it, and what to type next. Nothing is written but the sheet.

    Parameters
    ----------
    path
        Anything; see :func:`scbd.data.read_crops` and :func:`scbd.data.read_profiles` for what can be read.
    image_key
        Where in ``obsm`` of an AnnData, or in an ``.npz``, images are. By default ``"single_cell_images"``; without
        these, the first array of four dimensions in ``obsm``, which the next command then names.
    y_key, e_key
        Columns of perturbation and environment, where they are known: says how much of the one can be told from the
        other.
    missing
        Of a table of features: what becomes of missing and infinite values, see :func:`scbd.data.read_profiles`.
    sheet
        PNG to draw ten random cells to.

    Returns
    -------
    Lines: kind, number of cells, channels with the range of their pixels in 64 cells (or number of features, the first
    few, and such as are none by their names, may be none, are left out in training, or refused), columns that could be
    labels with how many cells each value has, and the next command. Of fields of view and plates: their number, size,
    and channels with the range in the middle of the first. If it cannot be read, why.

    Raises
    ------
    FileNotFoundError
        If there is nothing.
    KeyError, ValueError
        If a key is no column, or ``sheet`` is asked for of what has no images.

    Examples
    --------
    >>> adata.write_h5ad("screen.h5ad")
    >>> print(scbd.workflows.inspect("screen.h5ad", y_key="gene", e_key="well"))  # doctest: +ELLIPSIS
    screen.h5ad is an AnnData.
    240 cells of 4 × 32 × 32 uint8
    ...
    Next: scbd run screen.h5ad --y-key gene --e-key well --out results
    """
    path = Path(path)
    kind = kind_of(path)
    lines = [f"{path} is {kind.about}."]
    columns = image_columns(path) if kind.name == "image_table" else []
    labels = [column for key in (y_key, e_key) if key is not None for column in as_columns(key)]
    reader = _reader(kind.name, columns, labels, missing)
    if kind.name == "unknown":
        return f"{lines[0]}\n{UNREADABLE}{kind.remedy}."
    if sheet is not None and reader is None:
        msg = f"{lines[0]} There are no cells in it yet to draw: leave the sheet out."
        raise ValueError(msg)
    try:
        if reader is None:
            lines += of_fields(path, kind.name) if kind.name in FIELDS else []
            return "\n".join([*lines, f"Next: {kind.remedy}."])
        if kind.name == "anndata" and image_key is None:
            image_key, told = _found_key(path)
            lines += told
        cells = reader(path, image_key)
        sample = _Sample.of(cells) if isinstance(cells, Crops) else None
    except (OSError, KeyError, TypeError, ValueError, ImportError) as error:
        return "\n".join([*lines, f"{UNREADABLE}{error.args[-1] if error.args else error}"])
    lines += _of_features(cells, sheet, kind.name in TABLES) if sample is None else _of_images(sample, sheet)
    lines += _of_labels(cells.obs)
    if y_key is not None and e_key is not None:
        lines.append(_of_design(cells.obs, as_columns(y_key), as_columns(e_key)))
    return "\n".join([*lines, f"Next: {_next(path, kind.name, cells, y_key, e_key, image_key, missing)}"])


def _reader(
    kind: str, columns: list[str], labels: list[str], missing: Missing
) -> Callable[[Path, str | None], Crops | AnnData] | None:
    if kind in LABELS:
        return lambda path, key: read_crops(path, image_key=key or IMAGE_KEY, file_columns=columns or "path")
    if kind in TABLES:
        return lambda path, _: read_features(path, labels=labels, missing=missing)
    return _of_anndata if kind == "anndata" else None


def _found_key(path: Path) -> tuple[str | None, list[str]]:
    """Where images are if nobody says so, and what is told of it; nowhere, if no array has the dimensions of images."""
    keys = image_keys(path)
    if not keys or IMAGE_KEY in keys:
        return (IMAGE_KEY if keys else None), []
    others = f" (others may be at {head(keys[1:])})" if keys[1:] else ""
    return keys[0], [f"Its images are at obsm[{keys[0]!r}]{others}."]


def _of_anndata(path: Path, image_key: str | None) -> Crops | AnnData:
    """Images where it has them, else features."""
    try:
        return read_crops(path, image_key=image_key or IMAGE_KEY)
    except KeyError as error:
        if image_key is not None or "layer='X'" not in str(error):
            raise
        return open_screen(path, layer="X")


class _Sample(NamedTuple):
    """Some cells of all."""

    crops: Crops
    rows: np.ndarray
    images: np.ndarray

    @classmethod
    def of(cls, crops: Crops) -> _Sample:
        n = crops.images.shape[0]
        rows = np.sort(np.random.default_rng(0).choice(n, min(n, _SAMPLED), replace=False))
        return cls(crops, rows, crops.images.read(rows))


def _of_images(sample: _Sample, sheet: str | os.PathLike[str] | None) -> list[str]:
    crops, rows, images = sample
    n, *shape = crops.images.shape
    lines = [f"{n:,} cells of {' × '.join(map(str, shape))} {crops.images.dtype}"]
    lines += map(channel_line, crops.channels, np.moveaxis(images, 1, 0))
    if sheet is not None:
        import matplotlib.pyplot as plt

        from scbd import pl

        drawn = np.sort(np.random.default_rng(0).permutation(len(rows))[:_DRAWN])
        some = AnnData(obs=crops.obs.iloc[rows[drawn]], obsm={IMAGE_KEY: images[drawn]})
        figure = pl.cells(some, rows=range(len(drawn)))[0, 0].figure
        figure.savefig(sheet, dpi=150)
        plt.close(figure)
        lines.append(f"Ten of them: {sheet}")
    return lines


def _of_features(cells: AnnData, sheet: str | os.PathLike[str] | None, is_table: bool) -> list[str]:
    if sheet is not None:
        msg = "There are no images to draw: leave the sheet out."
        raise ValueError(msg)
    values = np.asarray(cells.X)
    absent = ~np.isfinite(values)
    # numbers in obs of a table are there by their names, or because they are used as labels
    numbers = [column for column in cells.obs if cells.obs[column].dtype.kind in "fiu" and is_about(column)]
    sets = {
        "numbers that are no features, by their names": numbers if is_table else [],
        "left out in training, of one value": cells.var_names[(values == values[:1]).all(axis=0)],
        "perhaps no measurements": odd_names(cells.var_names),
        f"refused, with missing or infinite values in {absent.any(1).sum():,} rows": cells.var_names[absent.any(0)],
    }
    lines = [
        f"{cells.n_obs:,} cells or wells of {cells.n_vars:,} features",
        f"  features: {head(cells.var_names)}",
    ]
    return lines + [f"  {what}: {len(names)} ({head(names, 10)})" for what, names in sets.items() if len(names)]


def _of_labels(obs: pd.DataFrame) -> list[str]:
    """Columns that some cells share a value of, with the most frequent."""
    lines = []
    for column in obs:
        counts = obs[column].value_counts()
        if 1 < len(counts) <= len(obs) / 2 and obs[column].dtype.kind != "f":
            most = head(f"{value} {count:,}" for value, count in counts.items())
            lines.append(f"  column {column}: {len(counts):,} values ({most})")
    return lines or ["No column has values that several cells share: labels are missing, give a table."]


def _of_design(obs: pd.DataFrame, y_columns: Sequence[str], e_columns: Sequence[str]) -> str:
    y, e = (label_values(obs, columns).cat.codes.to_numpy() for columns in (y_columns, e_columns))
    return (
        f"{contrasts_told(y, e):.0%} of what {' × '.join(e_columns)} can differ in is seen at equal "
        f"{' × '.join(y_columns)}; the rest is confounded"
    )


def _next(
    path: Path, kind: str, cells: Crops | AnnData, y_key: Any, e_key: Any, image_key: str | None, missing: Missing
) -> str:
    known = LABELS.get(kind)
    if y_key is None and known in cells.obs:
        y_key = known
    y, e = (typed(as_columns(key) if key is not None else ()) for key in (y_key, e_key))
    if isinstance(cells, Crops) and not _is_screen(path, kind, cells):
        no_labels = not len(cells.obs.columns)  # arrays alone
        return conversion(path, kind, y=y, table=no_labels, image_key=image_key)
    layer = "--layer X " if kind == "anndata" else ""
    where = key_option(image_key) if isinstance(cells, Crops) else layer
    odd = odd_names(cells.var_names) if kind in TABLES and isinstance(cells, AnnData) else []
    kept_out = f"--obs-columns {typed(odd)} " if odd else ""
    if kind in TABLES and missing != "drop":
        kept_out += f"--missing {missing} "
    return f"scbd run {typed([path])} {where}--y-key {y} --e-key {e} {kept_out}--out results"


def _is_screen(path: Path, kind: str, cells: Crops) -> bool:
    """Whether models read these images as they lie: an ``.h5ad``, or chunks that hold whole images."""
    return kind == "anndata" and (path.suffix == ".h5ad" or not hasattr(cells.images, "glimpse"))
