"""Embeddings as mantispy reads them: profiles of wells, named and stamped by its schema."""

from __future__ import annotations

import importlib
import importlib.util
import re
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scbd._keys import CONTENT_KEY
from scbd._labels import control_names, label_text, label_values, obs_column
from scbd._matrices import dense
from scbd._messages import head, missing_key
from scbd._seen import seen_rows, warn_of_seen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anndata import AnnData

_PERTURBATION, _PLATE, _WELL = "Metadata_Perturbation", "Metadata_Plate", "Metadata_Well"
_CONTROL, _CONTROL_TYPE = "Metadata_Control", "Metadata_Control_Type"
_CELL_COUNT = "Metadata_CellCount"
_SEEN = "Metadata_scbd_seen"
_PREFIX = "Metadata_"
_WELL_NAME = re.compile(r"([A-Za-z]{1,2})[\s_-]?0*([1-9]\d?)")

# what mantispy's io.stamp writes, where mantispy itself is not there to write it
_SCHEMA_VERSION = "2.0"
_TEXTS = ("object", "feature_group", "feature", "channel", "radial_bin", "params")
_NUMBERS = ("scale", "angle", "gray_levels")


def to_mantispy(
    adata: AnnData,
    embedding_key: str = CONTENT_KEY,
    *,
    y_key: str | Sequence[str] = _PERTURBATION,
    plate_key: str | Sequence[str] = _PLATE,
    well_key: str = _WELL,
    control: object | Sequence[object] | None = None,
    columns: Mapping[str, str] | None = None,
) -> AnnData:
    """Make a table of wells that mantispy reads: the embedding in ``X``, names and stamp of its schema.

    Rows of the same plate, well and perturbation are averaged, so that cells become wells. Wells stay as they are, in
    their order and under their names. The result can be given to ``mantispy.tl.map`` and the other tools of mantispy,
    or be written with ``write_h5ad`` and read in another environment with ``mantispy.io.read``.

    Where mantispy is installed, its ``io.stamp`` marks and checks the table. Elsewhere the same fields are written
    here, as version 2.0 of its schema has them.

    Parameters
    ----------
    adata
        Cells or wells, with the embedding in ``obsm``, ``(N, D)``.
    embedding_key
        Key in ``obsm``.
    y_key
        Column of ``obs`` with the perturbation, or several for their cross; becomes ``Metadata_Perturbation``.
    plate_key
        Column of ``obs`` with the plate, or several for their cross; becomes ``Metadata_Plate``.
    well_key
        Column of ``obs`` with the well on the plate, such as ``B3``; becomes ``Metadata_Well``, as ``B03``.
    control
        Value or values of ``y_key`` for negative controls: ``Metadata_Control`` and ``Metadata_Control_Type`` say which
        rows these are. `None` leaves both as ``obs`` has them.
    columns
        Further columns of ``obs`` and their names in the result, which begin with ``Metadata_``, for example
        ``{"moa": "Metadata_MOA"}``. Columns that have such a name in ``obs`` are kept in any case, if the rows of each
        well agree.

    Returns
    -------
    AnnData ``(wells, D)`` float32. ``obs`` also has ``Metadata_Row`` and ``Metadata_Col``, from 0, and, if rows were
    averaged, ``Metadata_CellCount``; and ``Metadata_scbd_seen``, whether the perturbation was trained on, where
    ``obs["scbd_seen"]`` says so of an embedding that ``scbd run`` wrote. ``var`` says that features are an embedding;
    ``uns["mantispy"]`` is the stamp.

    Raises
    ------
    KeyError
        If a key or column is missing.
    ValueError
        If the embedding is not finite or no matrix, a label is missing, a well is no row letter and column number,
        there is no control, or a column of ``columns`` has a name without the prefix or two values in one well.

    Warns
    -----
    UserWarning
        If ``obs["scbd_seen"]`` says that perturbations were trained on: their hits mean nothing.

    References
    ----------
    https://github.com/scverse/mantispy

    Examples
    --------
    >>> from anndata import AnnData
    >>> obs = {"gene": ["TP53", "TP53", "ctrl"], "plate": ["P1", "P1", "P1"], "well": ["A1", "A1", "B12"]}
    >>> cells = AnnData(obs=pd.DataFrame(obs, index=["a", "b", "c"]), obsm={"X_scbd_c": np.eye(3)})
    >>> wells = scbd.data.to_mantispy(cells, y_key="gene", plate_key="plate", well_key="well", control="ctrl")
    >>> wells.obs[["Metadata_Well", "Metadata_Control_Type", "Metadata_CellCount"]].values.tolist()
    [['A01', 'treatment', 2], ['B12', 'negcon', 1]]
    >>> wells.uns["mantispy"]["resolution"]
    'well'
    """
    from anndata import AnnData

    x = _embedding(adata, embedding_key)
    names = {_PLATE: _texts(adata.obs, plate_key), _WELL: _well_names(_texts(adata.obs, well_key), well_key)}
    names[_PERTURBATION] = _texts(adata.obs, y_key)
    is_control = (
        None if control is None else np.isin(names[_PERTURBATION], control_names(control, names[_PERTURBATION], y_key))
    )
    profiles = pd.DataFrame(names)
    code = profiles.groupby(list(profiles), sort=False).ngroup().to_numpy()
    first = np.flatnonzero(~profiles.duplicated())
    counts = np.bincount(code)
    averaged = len(first) < len(code)

    obs = _kept(adata.obs, code, first, columns or {})
    for name, texts in names.items():
        obs[name] = pd.Categorical(texts[first])
    if is_control is not None:
        obs[_CONTROL] = is_control[first]
        obs[_CONTROL_TYPE] = pd.Categorical(np.where(is_control[first], "negcon", "treatment"))
    seen = seen_rows(adata.obs, x)
    if seen is not None:
        obs[_SEEN] = np.isin(names[_PERTURBATION], names[_PERTURBATION][seen])[first]
        perturbed = slice(None) if is_control is None else ~is_control
        warn_of_seen(names[_PERTURBATION], seen, names[_PERTURBATION][perturbed])
    if averaged:
        obs[_CELL_COUNT] = counts
        obs.index = pd.Index(["_".join(row) for row in profiles.iloc[first].to_numpy()])
    var = pd.DataFrame(index=[f"{embedding_key}_{i}" for i in range(x.shape[1])])
    wells = AnnData(X=_means(x, code, counts) if averaged else x.astype(np.float32), obs=obs, var=var)
    _stamp(wells, [_PLATE, _WELL] if not obs.duplicated([_PLATE, _WELL]).any() else [_PLATE, _WELL, _PERTURBATION])
    return wells


def _embedding(adata: AnnData, key: str) -> np.ndarray:
    if key not in adata.obsm:
        raise KeyError(missing_key("obsm", key, adata.obsm, "embedding_key"))
    x = np.asarray(dense(adata.obsm[key], f"obsm[{key!r}]"))
    if x.ndim != 2 or x.dtype.kind not in "fiu":
        msg = f"obsm[{key!r}] is {x.dtype.name} of shape {x.shape}: give a dense matrix of numbers, one row a cell."
        raise ValueError(msg)
    n_bad = int((~np.isfinite(x).all(axis=1)).sum())
    if n_bad:
        msg = f"obsm[{key!r}] has NaN or infinite values in {n_bad} of {len(x)} rows: drop them."
        raise ValueError(msg)
    return x


def _texts(obs: pd.DataFrame, key: str | Sequence[str]) -> np.ndarray:
    labels = label_values(obs, key)
    return np.array([label_text(label) for label in labels.cat.categories], dtype=object)[labels.cat.codes]


def _well_names(wells: np.ndarray, well_key: str) -> np.ndarray:
    """``A1``, ``a01`` and ``A_1`` as ``A01``."""
    names = {}
    for well in pd.unique(wells):
        found = _WELL_NAME.fullmatch(well.strip())
        names[well] = f"{found[1].upper()}{int(found[2]):02d}" if found else None
    strange = [well for well, name in names.items() if name is None]
    if strange:
        msg = (
            f"obs[{well_key!r}] holds {head(strange)}: mantispy knows wells by the letter of their row and the number "
            "of their column, such as A01. Name a column of such wells with well_key."
        )
        raise ValueError(msg)
    return np.array([names[well] for well in wells], dtype=object)


def _places(wells: pd.Series) -> tuple[list[int], list[int]]:
    """Rows and columns from 0: ``A01`` is (0, 0), ``AB12`` is (27, 11)."""
    rows = []
    for letters in wells.str[:-2]:
        row = 0
        for letter in letters:
            row = 26 * row + ord(letter) - ord("A") + 1
        rows.append(row - 1)
    return rows, [int(well[-2:]) - 1 for well in wells]


def _means(x: np.ndarray, code: np.ndarray, counts: np.ndarray) -> np.ndarray:
    order = np.argsort(code, kind="stable")
    starts = np.concatenate([[0], counts.cumsum()[:-1]])
    return (np.add.reduceat(x[order], starts, axis=0, dtype=np.float64) / counts[:, None]).astype(np.float32)


def _kept(obs: pd.DataFrame, code: np.ndarray, first: np.ndarray, columns: Mapping[str, str]) -> pd.DataFrame:
    """Columns that mantispy sees, one row a well."""
    kept = {
        name: obs[name].iloc[first]
        for name in obs
        if str(name).startswith(_PREFIX) and _is_alike(obs[name], code, len(first))
    }
    for name, new in columns.items():
        values = obs_column(obs, name)
        if not new.startswith(_PREFIX):
            msg = f"columns names {name!r} {new!r}: mantispy sees names that begin with {_PREFIX!r} only."
            raise ValueError(msg)
        if not _is_alike(values, code, len(first)):
            msg = f"obs[{name!r}] has several values in one well: columns takes what is the same for all of its rows."
            raise ValueError(msg)
        kept[new] = values.iloc[first]
    return pd.DataFrame(kept, index=obs.index[first])


def _is_alike(values: pd.Series, code: np.ndarray, n: int) -> bool:
    places = pd.factorize(values)[0]
    return len(pd.DataFrame({"well": code, "value": places}).drop_duplicates()) == n


def _stamp(wells: AnnData, grouped_by: list[str]) -> None:
    """By mantispy itself where it is installed, and as it does elsewhere."""
    record = {"column": _PERTURBATION}
    if importlib.util.find_spec("mantispy"):
        stamp = importlib.import_module("mantispy.io").stamp
        stamp(wells, resolution="well", feature_kind="embedding", grouped_by=grouped_by, perturbation=record)
        return
    if _CONTROL_TYPE in wells.obs:
        record["control_column"] = _CONTROL_TYPE
    wells.uns["mantispy"] = {
        "schema_version": _SCHEMA_VERSION,
        "resolution": "well",
        "grouped_by": grouped_by,
        "perturbation": record,
    }
    for name, places in zip(("Metadata_Row", "Metadata_Col"), _places(wells.obs[_WELL]), strict=True):
        if name not in wells.obs:
            wells.obs[name] = places
    blank = pd.Categorical.from_codes([-1] * wells.n_vars, categories=pd.Index([], dtype=object))
    for name in _TEXTS:
        wells.var[name] = blank
    for name in _NUMBERS:
        wells.var[name] = np.nan
    wells.var["is_feature"] = True
    wells.var["feature_kind"] = "embedding"
