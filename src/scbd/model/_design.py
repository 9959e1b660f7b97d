"""What was done to cells, and where: controls, environments, and whether the two can be told apart in these data."""

from __future__ import annotations

import unicodedata
import warnings
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import pandas as pd
import torch
from scvi.data._constants import _FIELD_REGISTRIES_KEY, _SETUP_ARGS_KEY, _STATE_REGISTRY_KEY

from scbd._anndata import (
    CROSS,
    E_REGISTRY,
    MISSING_WORDS,
    as_columns,
    column_codes,
    control_texts,
    label_text,
    label_values,
    number_values,
)
from scbd._checks import check_choice, counted, head, inflect, missing_key
from scbd.data._inferred import INFERRED, infer_environments
from scbd.nn._variance import Numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from anndata import AnnData


EColumns = Literal["side_by_side", "crossed"]

# floating point with fewer cells a value is a quantity, and no name
_CELLS_A_VALUE = 8
# share of the contrasts that can be resolved, below which a design is confounded: the invariance loss has a fifth of
# its force; and share of the labels that may be seen with one label of the other kind only
_TOO_FEW, _MANY = 0.2, 0.1


class Design(NamedTuple):
    """Labels of a table as it is set up, each column read once."""

    y: pd.Series
    """Perturbation of each cell, categorical ``(N,)``."""
    environments: Mapping[str, pd.Series]
    """The environments that stand side by side, likewise, by the name of the column, or of those that are crossed."""
    numbers: Mapping[str, np.ndarray]
    """Numbers beside them by the name of the column, ``(N,)``."""

    @classmethod
    def of(
        cls,
        obs: pd.DataFrame,
        y_key: str | Sequence[str],
        e_key: str | Sequence[str],
        e_columns: EColumns | None,
        number_keys: Iterable[str] | None,
    ) -> Design:
        """Read the columns.

        Raises
        ------
        KeyError, TypeError, ValueError
            If one is missing, a cell has no value, or a number is none.
        """
        columns = as_columns(e_key)
        apart = [(column,) for column in columns] if e_columns == "side_by_side" else [columns]
        return cls(
            label_values(obs, y_key).rename(CROSS.join(map(str, as_columns(y_key)))),
            {name: label_values(obs, each).rename(name) for each in apart for name in [CROSS.join(map(str, each))]},
            {column: number_values(obs, column) for column in number_keys or ()},
        )


def check_design(design: Design, controls: Iterable[str] = ()) -> None:
    """Warn of a design that silently spoils what is learned.

    That is, if y or an environment is a quantity, if y and an environment, or a number, are confounded, if labels are
    written in several ways, or if one that is no control is called like a missing value.
    """
    y = _codes(design.y)
    _warn_if_quantity(design.y, f"y_key={design.y.name!r} makes a perturbation")
    _warn_if_spelt_alike(design.y, "perturbations")
    _warn_if_missing(design.y, "perturbation", controls)
    for labels in design.environments.values():
        _warn_if_spelt_alike(labels, "environments")
        _warn_if_missing(labels, "environment")
    for name, labels in design.environments.items():
        _warn_if_quantity(
            labels,
            f"e_key={name!r} makes an environment",
            "name it in continuous_covariate_keys if it is a quantity, or ",
        )
        _warn_if_confounded(design.y, labels, name, set(controls))
    for name, numbers in design.numbers.items():
        _warn_if_ordered_alike(y, numbers, name)


def resolvable_contrasts(y: np.ndarray, e: np.ndarray) -> float:
    """Share of what environments can differ in that is seen at equal perturbation, from 0 to 1.

    It is 1 where each perturbation is in all environments in equal proportions, and 0 where one label gives the other.
    If a share p of all cells follow a rule, such as one plate for each compound, about 1 - p² is left. Of a few cells a
    perturbation, n, it is (n - 1) / n at best.

    With R taking from cells the mean of their perturbation and K averaging over environments, it is the trace of R K R,
    in units of how many environments there are less one; or the same with the two exchanged, if perturbations are
    fewer. It is 1 less the square of Cramér's V. Labels are codes, non-negative integers ``(N,)``.
    """
    pairs, counts = np.unique(y.astype(np.int64) * (int(e.max()) + 1) + e, return_counts=True)
    of_y, of_e = np.divmod(pairs, int(e.max()) + 1)
    n_y, n_e = np.bincount(y), np.bincount(e)
    in_common = float((counts / n_y[of_y] * (counts / n_e[of_e])).sum())
    fewer = min(np.count_nonzero(n_y), np.count_nonzero(n_e))
    # rounding may leave less than nothing
    return max(0.0, (fewer - in_common) / (fewer - 1)) if fewer > 1 else 0.0


def resolvable_order(y: np.ndarray, numbers: np.ndarray) -> float:
    """Share of what changes slowly with numbers ``(N,)`` that is seen at equal perturbation, from 0 to 1.

    As :func:`resolvable_contrasts`, with smooth functions of the numbers in place of environments.
    """
    terms = Numbers(torch.from_numpy(numbers)).terms.numpy()
    counts = np.bincount(y)
    sums = np.stack([np.bincount(y, weights=term) for term in terms.T], axis=1)
    in_common = float((np.square(sums[counts > 0]).sum(1) / counts[counts > 0]).sum())
    fewer = min(np.square(terms).sum().round(), np.count_nonzero(counts) - 1)
    return max(0.0, (fewer - in_common) / fewer) if fewer else 0.0


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
            "e_key=None: name the column of obs that says where cells were measured, or give infer_environments=2, for "
            "example."
        )
        raise ValueError(msg)
    return e_key


def check_inferred_there(obs: pd.DataFrame, columns: Sequence[str]) -> None:
    """Raise ``KeyError`` if one of these columns was inferred, and a table lacks it: names are those of one call."""
    if INFERRED in columns and INFERRED not in obs:
        msg = (
            f"{missing_key('obs', INFERRED, obs.columns)} It was inferred from other cells: put both tables together, "
            "and infer once (scbd.data.infer_environments)."
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
    check_choice("e_columns", asked, (*get_args(EColumns), None))
    if asked == "side_by_side" and not takes_several:
        msg = f"{system} takes one environment per cell: use e_columns='crossed', or a single column as e_key."
        raise ValueError(msg)
    if isinstance(e_key, str):
        return None
    return asked or ("side_by_side" if takes_several else "crossed")


def known_number_keys(
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
    if twice := [column for column in columns if column in as_columns(e_key)]:
        msg = f"{twice[0]!r} is in both e_key and continuous_covariate_keys: keep it in one of them."
        raise ValueError(msg)
    return columns


def is_side_by_side(registry: dict[str, Any]) -> bool:
    """Whether a model has several environments a cell."""
    return registry[_SETUP_ARGS_KEY].get("e_columns") == "side_by_side"


def covariates(registry: dict[str, Any]) -> np.ndarray | None:
    """Codes of the single columns of each registered environment, int64 ``(E, C)``, if they are side by side."""
    if not is_side_by_side(registry):
        return None
    return column_codes(registry[_FIELD_REGISTRIES_KEY][E_REGISTRY][_STATE_REGISTRY_KEY]["categories"])


def control_labels(control: Any, categories: Iterable[Any]) -> list[Any]:
    """Those of the categories that are meant by a name or several; a number has one name, as text, too."""
    names = control_texts(control)
    return [label for label in categories if label_text(label) in names]


def controls_of(obs: pd.DataFrame, y_columns: Sequence[str], control: Any) -> np.ndarray | None:
    """Mask of the controls, boolean ``(N,)``; `None` without a control, or without the columns to tell by."""
    if control is None or any(column not in obs for column in y_columns):
        return None
    labels = label_values(obs, y_columns, allow_missing=True)
    mask: np.ndarray = labels.isin(control_labels(control, labels.cat.categories)).to_numpy()
    return mask


def _warn_if_spelt_alike(labels: pd.Series, what: str) -> None:
    """Of labels that differ in blanks or in small and capital letters; single letters may be classes."""
    names = [label for label in labels.cat.categories if isinstance(label, str)]
    plain = pd.Series(
        [
            "".join(unicodedata.normalize("NFKC", name if len(name.strip()) == 1 else name.casefold()).split())
            for name in names
        ],
        dtype=object,
    )
    if (twice := plain.duplicated(keep=False)).any():
        alike = sorted(zip(plain[twice], np.array(names, dtype=object)[twice.to_numpy()], strict=True))
        _warn(
            f"{len(alike)} labels of {labels.name!r} differ from others only in blanks or case "
            f"({head(repr(name) for _, name in alike)}), and count as {what} of their own: write them alike."
        )


def _warn_if_missing(labels: pd.Series, what: str, controls: Iterable[str] = ()) -> None:
    named = set(controls)
    for word in labels.cat.categories:
        if isinstance(word, str) and word not in named and word.strip().lower() in MISSING_WORDS:
            _warn(
                f"The label {word!r} of {labels.name!r} counts as {what} like any other, of {(labels == word).sum():,} "
                "cells: if it says that a value is missing, leave them out; if these are controls, name it (control=…)."
            )


def _warn_if_quantity(labels: pd.Series, what: str, instead: str = "put a quantity into classes, or ") -> None:
    values = labels.cat.categories
    if pd.api.types.is_float_dtype(values.dtype) and len(values) > len(labels) / _CELLS_A_VALUE:
        _warn(
            f"{what} of each of {len(values):,} numbers in {len(labels):,} cells: {instead}make it text if these are "
            "labels."
        )


def _warn_if_confounded(y: pd.Series, e: pd.Series, name: str, controls: set[str]) -> None:
    """What is not resolved is the same thing to any method: taking e out of z_c takes y out too, or leaves both in."""
    n_y, n_e = len(y.cat.categories), len(e.cat.categories)
    of_y, of_e = np.divmod(np.unique(_codes(y) * n_e + _codes(e)), n_e)
    alone_y, alone_e = (np.count_nonzero(np.bincount(codes) == 1) for codes in (of_y, of_e))
    share = resolvable_contrasts(_codes(y), _codes(e))
    if share >= _TOO_FEW and alone_y < _MANY * n_y and alone_e < _MANY * n_e:
        return
    if 2 * alone_e >= n_e:
        remedy = (
            "A perturbation that fills its environment cannot be distinguished from it, by any method: use a coarser "
            "e_key, such as the plate in place of the well, or several columns side by side; or put controls, or the "
            "same perturbations, in all environments."
        )
    elif alone_y >= _MANY * n_y:
        remedy = _across_environments(y, e, controls, np.bincount(of_y) > 1)
    else:
        remedy = "Removing e from z_c may remove y with it: repeat perturbations, or use a coarser e_key."
    were = inflect(alone_y, "was", "were")
    _warn(
        f"y and e are confounded ({name}): {alone_y:,} of {n_y:,} perturbations {were} seen in one environment only, "
        f"{alone_e:,} of {n_e:,} environments with one perturbation only, and {share:.0%} of their contrasts are "
        f"resolvable. {remedy}"
    )


def _across_environments(y: pd.Series, e: pd.Series, controls: set[str], shared: np.ndarray) -> str:
    """Return what links the environments, and so allows comparisons of perturbations between them.

    Parameters
    ----------
    y, e
        Perturbation and environment of each cell.
    controls
        Labels of the controls.
    shared
        Which perturbations lie in several environments, boolean.
    """
    labels = y.cat.categories
    is_control = np.array([label_text(label) in controls for label in labels])
    n_controls = e[is_control[_codes(y)]].value_counts(sort=False)
    if n_controls.all():
        fewest = f"{n_controls.idxmin()} has the fewest, {counted(n_controls.min(), 'row')}"
        return (
            f"Only controls link the environments ({fewest}): effects of an environment that its controls do not show "
            "are taken for effects of its perturbations. Scores of how well an embedding predicts "
            f"{e.name} can be high because of this design alone."
        )
    if n_controls.any():
        lacking = head(n_controls.index[n_controls == 0])
        return f"Put controls, or the same perturbations, in all environments (without controls: {lacking})."
    if not shared.any():
        return (
            "Perturbations of different environments cannot be compared, by any method: put controls, or the same "
            "perturbations, in all environments."
        )
    return (
        f"Only what lies in several environments links them ({head(labels[shared])}): if these are controls, name them "
        "(control=…)."
    )


def _warn_if_ordered_alike(y: np.ndarray, numbers: np.ndarray, name: str) -> None:
    share = resolvable_order(y, numbers)
    if share < _TOO_FEW:
        _warn(
            f"y and {name!r} are confounded: {share:.0%} of what can change with it is seen at equal perturbation, "
            "and the rest stays in z_c. Leave it out of continuous_covariate_keys."
        )


def _codes(labels: pd.Series) -> np.ndarray:
    return labels.cat.codes.to_numpy().astype(np.int64)


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=6)
