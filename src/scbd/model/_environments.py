"""Several columns as environment: each by itself, or their cross; and numbers beside them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal, get_args

import pandas as pd
from scvi.data._constants import _FIELD_REGISTRIES_KEY, _SETUP_ARGS_KEY, _STATE_REGISTRY_KEY

from scbd._keys import E_REGISTRY
from scbd._labels import as_columns, column_codes
from scbd._messages import missing_key
from scbd.data import INFERRED, infer_environments

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from anndata import AnnData

EColumns = Literal["side_by_side", "crossed"]

# floating point with fewer cells a value is a quantity, and no name
_CELLS_A_VALUE = 8


def with_inferred(
    adata: AnnData,
    y_key: str | Sequence[str],
    e_key: str | Sequence[str] | None,
    n_inferred: int | None,
    where: dict[str, Any],
) -> str | Sequence[str]:
    """Columns of the environments, those that were asked to be inferred behind those that are known.

    Raises
    ------
    ValueError
        If there are neither; and see :func:`scbd.data.infer_environments`.
    """
    if n_inferred is not None:
        # of an earlier set-up: inferred anew
        known = [] if e_key is None else [column for column in as_columns(e_key) if column != INFERRED]
        found = infer_environments(adata, y_key, n_inferred, e_key=known or None, **where)
        adata.obs[INFERRED] = found.labels
        return [*known, INFERRED]
    if e_key is None:
        msg = (
            "e_key=None: name the column of obs that says where cells were measured; or give infer_environments=2, for "
            "example, to find environments that were not recorded."
        )
        raise ValueError(msg)
    return e_key


def check_inferred_there(obs: pd.DataFrame, columns: Sequence[str]) -> None:
    """Raise ``KeyError`` if one of these columns was inferred, and a table lacks it: names are those of one call."""
    if INFERRED in columns and INFERRED not in obs:
        msg = (
            f"{missing_key('obs', INFERRED, obs.columns)} It was inferred from the cells that the model was set up "
            "with, and groups of another table share no names with these: put both tables together, and infer once "
            "(scbd.data.infer_environments)."
        )
        raise KeyError(msg)


def known_e_columns(
    asked: EColumns | None, e_key: str | list[str], system: str, *, takes_several: bool
) -> EColumns | None:
    """What several columns are to be, by default what suits the system; of one column there is nothing to say.

    Raises
    ------
    ValueError
        If there is no such choice, or the system has no other.
    """
    if asked not in (None, *get_args(EColumns)):
        msg = f"e_columns={asked!r} is not known: use 'side_by_side', or 'crossed'."
        raise ValueError(msg)
    if asked == "side_by_side" and not takes_several:
        msg = f"{system} takes one environment per cell: use e_columns='crossed', or a single column as e_key."
        raise ValueError(msg)
    if isinstance(e_key, str):
        return None
    return asked or ("side_by_side" if takes_several else "crossed")


def is_side_by_side(registry: dict[str, Any]) -> bool:
    """Whether a model has several environments a cell; one that was saved before there was a choice crossed them."""
    return registry[_SETUP_ARGS_KEY].get("e_columns") == "side_by_side"


def covariates(registry: dict[str, Any]) -> np.ndarray | None:
    """Codes of the single columns of each registered environment, int64 ``(E, C)``, if they are side by side."""
    if not is_side_by_side(registry):
        return None
    return column_codes(registry[_FIELD_REGISTRIES_KEY][E_REGISTRY][_STATE_REGISTRY_KEY]["categories"])


def known_covariate_keys(
    asked: str | Sequence[str] | None, e_key: str | list[str], system: str, *, takes_several: bool
) -> list[str] | None:
    """Columns of numbers beside the environment, each once; `None` for none.

    Raises
    ------
    TypeError, ValueError
        If they are no columns, the system takes none, or one of them is an environment already.
    """
    if asked is None:
        return None
    columns = list(dict.fromkeys(as_columns(asked)))
    if not takes_several:
        msg = f"{system} takes one environment per cell, which is a label: leave continuous_covariate_keys out."
        raise ValueError(msg)
    twice = [column for column in columns if column in as_columns(e_key)]
    if twice:
        msg = (
            f"{twice[0]!r} is in both e_key and continuous_covariate_keys: keep it in continuous_covariate_keys if it "
            "is a quantity, in e_key if its values are labels."
        )
        raise ValueError(msg)
    return columns


def warn_of_quantities(obs: pd.DataFrame, e_columns: Sequence[str]) -> None:
    """Warn of environments that are numbers of which nearly each cell has its own."""
    for column in e_columns:
        values = obs[column]
        if pd.api.types.is_float_dtype(values) and values.nunique() > len(values) / _CELLS_A_VALUE:
            msg = (
                f"e_key={column!r} makes an environment of each of {values.nunique():,} numbers in {len(values):,} "
                "cells. If it is a quantity, such as a time or a count, name it in continuous_covariate_keys (of "
                "SCBDModel) instead of e_key; if these are labels, make them text."
            )
            warnings.warn(msg, UserWarning, stacklevel=3)


def check_numbers_known(columns: Sequence[str], invariance: str) -> None:
    """Raise ``ValueError`` if there are columns of numbers, and a form of invariance that knows labels only."""
    if columns and invariance != "variance":
        msg = (
            f"invariance={invariance!r} takes labels as environments, not numbers ({', '.join(columns)}): use "
            "invariance='variance', or set up without continuous_covariate_keys."
        )
        raise ValueError(msg)
