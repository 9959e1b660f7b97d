"""Checks of the experimental design: for example, whether perturbations and environments are confounded.

The file also holds the functions that determine the controls, and the environments of a table of cells.
"""

from __future__ import annotations

import logging
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import pandas as pd
from scvi.data._constants import _FIELD_REGISTRIES_KEY, _SETUP_ARGS_KEY, _STATE_REGISTRY_KEY

from scbd._shared.checks import check_choice, format_count, inflect, join_first, missing_key_message
from scbd._shared.keys import E_REGISTRY
from scbd._shared.labels import (
    CROSS_SEPARATOR,
    MIN_CELLS_PER_VALUE,
    MISSING_WORDS,
    as_columns,
    check_control_labels,
    control_label_texts,
    encode_crossed_columns,
    find_likely_controls,
    label_text,
    label_values,
    normalise_name,
    warn_if_labels_are_similar,
)
from scbd._shared.messages import warn_user
from scbd.data._inferred import INFERRED, infer_environments

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from anndata import AnnData

logger = logging.getLogger(__name__)

EColumns = Literal["side_by_side", "crossed"]

# Thresholds of the warning that perturbation and environment are confounded. The first is the minimum fraction of
# contrasts between environments that can be resolved within perturbations; at 0.2, the invariance loss has a fifth of
# its strength. The second is the maximum fraction of perturbations that occur in a single environment, and of
# environments that hold a single perturbation.
_MIN_RESOLVABLE_FRACTION, _MAX_SINGLE_FRACTION = 0.2, 0.1


class ExperimentalDesign(NamedTuple):
    """Experimental design of a table of cells: perturbation and environments of each cell."""

    y: pd.Series
    """Perturbation of each cell, categorical ``(N,)``."""
    environments: Mapping[str, pd.Series]
    """Environments of the cells, categorical ``(N,)`` each, by name.

    Several columns are either treated as separate environments, one entry each, or crossed to a single entry.
    """
    controls: Sequence[str] = ()
    """Perturbation labels of the controls, as text; empty if no controls were named."""

    @classmethod
    def of(
        cls,
        obs: pd.DataFrame,
        y_key: str | Sequence[str],
        e_key: str | Sequence[str],
        e_columns: EColumns | None,
        control: Any = None,
    ) -> ExperimentalDesign:
        """Create the experimental design from the columns of a table of cells.

        Parameters
        ----------
        obs
            Table with one row per cell.
        y_key, e_key
            Column, or columns, of the perturbation and of the environment.
        e_columns
            ``"side_by_side"`` treats each column of ``e_key`` as a separate environment. Otherwise several columns are
            crossed: each combination of their values is one environment.
        control
            Perturbation label of the controls, or several labels; `None` if no controls were named.

        Raises
        ------
        KeyError
            If a column is missing.
        ValueError
            If a cell has no value in one of the columns, if a column is named twice or both in ``y_key`` and in
            ``e_key``, or if no cell has a label of ``control``.
        """
        y_columns, columns = as_columns(y_key), as_columns(e_key)
        for name, named in (("y_key", y_columns), ("e_key", columns)):
            if len(set(named)) < len(named):
                msg = f"{name}={list(named)} names a column twice: name each column once."
                raise ValueError(msg)
        both = [column for column in y_columns if column in columns]
        if both:
            msg = (
                f"{both[0]!r} is named as y_key and as e_key, and z_c cannot carry what it is to be blind to: name "
                "as e_key what cells were imaged in, such as the well or the plate."
            )
            raise ValueError(msg)
        y = label_values(obs, y_key).rename(CROSS_SEPARATOR.join(map(str, y_columns)))
        environments = {}
        for each in [(column,) for column in columns] if e_columns == "side_by_side" else [columns]:
            name = CROSS_SEPARATOR.join(map(str, each))
            environments[name] = label_values(obs, each).rename(name)
        if control is None:
            return cls(y, environments)
        of_y, *of_e = (list(map(label_text, labels.cat.categories)) for labels in (y, *environments.values()))
        return cls(y, environments, check_control_labels(control, of_y, y_key, chain(*of_e)))


def check_design(design: ExperimentalDesign) -> None:
    """Warn of problems of the experimental design that would spoil training without raising an error.

    If a perturbation that is not a control has a usual name of controls, a warning is logged.

    Parameters
    ----------
    design
        Perturbation and environments of each cell, and labels of the controls.

    Warns
    -----
    UserWarning
        If the column of the perturbation or of an environment holds a quantity, such as a concentration, in place of
        labels; if the perturbation is confounded with an environment; if a column of environments has a single value;
        if labels differ only in spaces or in upper and lower case, or from a control only in punctuation; or if a label
        that is not a control is spelt like a missing value, such as ``"NA"``.
    """
    _warn_if_quantity(design.y, f"y_key={design.y.name!r} makes a perturbation")
    warn_if_labels_are_similar(design.y.cat.categories, str(design.y.name), "perturbations", design.controls)
    _warn_if_missing(design.y, "perturbation", design.controls)
    for labels in design.environments.values():
        warn_if_labels_are_similar(labels.cat.categories, str(labels.name), "environments")
        _warn_if_missing(labels, "environment")
    for name, labels in design.environments.items():
        _warn_if_quantity(
            labels,
            f"e_key={name!r} makes an environment",
            "divide a quantity into about five levels (pandas.qcut), or ",
        )
        _warn_if_confounded(design.y, labels, name, design.controls)
    # other spellings of the named controls are reported by warn_if_labels_are_similar
    named = set(map(normalise_name, design.controls))
    unnamed = [name for name in find_likely_controls(design.y.cat.categories) if normalise_name(name) not in named]
    if unnamed:
        message = "Labels look like controls, but are not named as controls: %s. If they are, set up with control=%r."
        control = [*design.controls, *unnamed]
        logger.warning(message, ", ".join(unnamed), control[0] if len(control) == 1 else control)


def resolvable_fraction(y: np.ndarray, e: np.ndarray) -> float:
    """Compute the fraction of contrasts between environments that can be resolved within perturbations.

    A contrast is a difference between environments, for example between the means of two plates. It can be resolved if
    it can be estimated from cells of the same perturbation.

    The fraction is 1 if all environments hold each perturbation in equal proportions. It is 0 if the perturbation
    determines the environment, or the environment determines the perturbation. If a fraction p of the cells follows a
    fixed rule, such as one plate per compound, the fraction of resolvable contrasts is about 1 - p². With n cells per
    perturbation and many more than n environments, it is at most about (n - 1) / n.

    The fraction equals 1 - V², where V is Cramér's V. In terms of matrices: let R subtract from each cell the mean of
    its perturbation, and let K average the cells of each environment. Then the fraction is the trace of R K R, divided
    by the number of environments minus one. If there are fewer perturbations than environments, perturbations and
    environments exchange their roles.

    Parameters
    ----------
    y, e
        Codes of perturbation and environment of each cell, non-negative integers ``(N,)``.

    Returns
    -------
    A number from 0 to 1.
    """
    pairs, counts = np.unique(y.astype(np.int64) * (int(e.max()) + 1) + e, return_counts=True)
    of_y, of_e = np.divmod(pairs, int(e.max()) + 1)
    n_y, n_e = np.bincount(y), np.bincount(e)
    in_common = float((counts / n_y[of_y] * (counts / n_e[of_e])).sum())
    fewer = min(np.count_nonzero(n_y), np.count_nonzero(n_e))
    # rounding errors may make the computed fraction slightly negative
    return max(0.0, (fewer - in_common) / (fewer - 1)) if fewer > 1 else 0.0


def add_inferred_environments(
    adata: AnnData,
    y_key: str | Sequence[str],
    e_key: str | Sequence[str] | None,
    n_inferred: int | None,
    where: dict[str, Any],
) -> str | Sequence[str]:
    """Infer environments if requested, and return the names of all columns of environments.

    Inferred environments are unrecorded batches, such as imaging days, that are estimated from the inputs.

    Parameters
    ----------
    adata
        Table of cells. Inferred environments are written to its column ``obs["inferred_environment"]``.
    y_key, e_key
        Column, or columns, of the perturbation and of the recorded environments; ``e_key`` may be `None`.
    n_inferred
        Number of environments to infer; with `None`, no environments are inferred.
    where
        Arguments of :func:`scbd.data.infer_environments` that state where the table holds images or features.

    Raises
    ------
    ValueError
        If neither ``e_key`` nor ``n_inferred`` is given; see also :func:`scbd.data.infer_environments`.
    """
    if n_inferred is not None:
        # environments inferred by an earlier call are replaced, and not used as recorded environments
        known = [] if e_key is None else [column for column in as_columns(e_key) if column != INFERRED]
        found = infer_environments(adata, y_key, n_inferred, e_key=known or None, **where)
        adata.obs[INFERRED] = found.labels
        return [*known, INFERRED]
    if e_key is None:
        msg = (
            "e_key=None: name the column of obs with the environment of each cell, such as the well or plate, or infer "
            "environments, for example with infer_environments=2."
        )
        raise ValueError(msg)
    return e_key


def check_inferred_column(obs: pd.DataFrame, columns: Sequence[str]) -> None:
    """Raise a ``KeyError`` if a model uses inferred environments and a table of cells lacks their column.

    The column cannot be inferred for new cells alone, because the names of inferred environments differ between calls.
    ``columns`` are the names of the columns of environments that the model uses.
    """
    if INFERRED in columns and INFERRED not in obs:
        msg = (
            f"{missing_key_message('obs', INFERRED, obs.columns)} It was inferred from other cells: put both tables "
            "together, and infer once (scbd.data.infer_environments)."
        )
        raise KeyError(msg)


def check_e_columns(
    asked: EColumns | None, e_key: str | list[str], system: str, *, takes_several: bool
) -> EColumns | None:
    """Check the argument ``e_columns``, and return how several environment columns are combined.

    ``"side_by_side"`` treats the columns as separate environments. ``"crossed"`` makes each combination of their values
    one environment. `None` is returned if there is a single column.

    Parameters
    ----------
    asked
        Argument ``e_columns`` of the user: ``"side_by_side"``, ``"crossed"`` or `None` for the default.
    e_key
        Column, or columns, of the environments.
    system
        Name of the model class, for error messages.
    takes_several
        Whether the model can treat several columns as separate environments. If so, the default is ``"side_by_side"``,
        otherwise ``"crossed"``.

    Raises
    ------
    ValueError
        If ``e_columns`` has another value, or is ``"side_by_side"`` for a model that requires a single environment per
        cell.
    """
    check_choice("e_columns", asked, (*get_args(EColumns), None))
    if asked == "side_by_side" and not takes_several:
        msg = f"{system} takes one environment per cell: use e_columns='crossed', or a single column as e_key."
        raise ValueError(msg)
    if isinstance(e_key, str):
        return None
    return asked or ("side_by_side" if takes_several else "crossed")


def has_separate_environments(registry: dict[str, Any]) -> bool:
    """Return whether a model was set up with separate environment columns (``e_columns="side_by_side"``)."""
    return registry[_SETUP_ARGS_KEY].get("e_columns") == "side_by_side"


def environment_column_codes(registry: dict[str, Any]) -> np.ndarray | None:
    """Return the codes of the single columns for each combination of environment columns, int64 ``(E, C)``.

    A model that treats C columns as separate environments registers the E combinations of their values as its
    environments. Row k of the result holds the code of combination k in each column. For other models, `None` is
    returned.
    """
    if not has_separate_environments(registry):
        return None
    return encode_crossed_columns(registry[_FIELD_REGISTRIES_KEY][E_REGISTRY][_STATE_REGISTRY_KEY]["categories"])


def match_control_labels(control: Any, categories: Iterable[Any]) -> list[Any]:
    """Return those perturbation labels of a table that are controls.

    Labels are compared as text. A whole number is written in one way, so that 1, 1.0 and ``"1"`` are the same label.

    Parameters
    ----------
    control
        Label of the controls as given by the user, or several labels.
    categories
        All perturbation labels of the table.
    """
    names = control_label_texts(control)
    return [label for label in categories if label_text(label) in names]


def control_mask(obs: pd.DataFrame, y_columns: Sequence[str], control: Any) -> np.ndarray | None:
    """Return a mask of the cells that are controls, boolean ``(N,)``.

    `None` is returned if no control was named, or if the table lacks a column of the perturbation.
    """
    if control is None or any(column not in obs for column in y_columns):
        return None
    labels = label_values(obs, y_columns, allow_missing=True)
    mask: np.ndarray = labels.isin(match_control_labels(control, labels.cat.categories)).to_numpy()
    return mask


def _warn_if_missing(labels: pd.Series, what: str, controls: Sequence[str] = ()) -> None:
    for word in labels.cat.categories:
        if isinstance(word, str) and word not in controls and word.strip().lower() in MISSING_WORDS:
            warn_user(
                f"The label {word!r} of {labels.name!r} counts as {what} like any other, of {(labels == word).sum():,} "
                "cells: if it marks missing values, drop these cells; if it marks controls, name it (control=…)."
            )


def _warn_if_quantity(labels: pd.Series, what: str, instead: str = "put a quantity into classes, or ") -> None:
    values = labels.cat.categories
    if pd.api.types.is_float_dtype(values.dtype) and len(values) > len(labels) / MIN_CELLS_PER_VALUE:
        warn_user(
            f"{what} of each of {len(values):,} numbers in {len(labels):,} cells: {instead}make it text if these are "
            "labels."
        )


def _warn_if_confounded(y: pd.Series, e: pd.Series, name: str, controls: Sequence[str]) -> None:
    """Warn if perturbation y and environment e are confounded, or if all cells have the same environment.

    If a difference between environments cannot be estimated within perturbations, no method can separate it from the
    differences between perturbations: either removing e from z_c removes y as well, or both remain in z_c.
    """
    n_y, n_e = len(y.cat.categories), len(e.cat.categories)
    if n_e == 1:
        warn_user(f"The column {name!r} of e_key has a single value, so it has no effect: remove it from e_key.")
        return
    of_y, of_e = np.divmod(np.unique(_codes(y) * n_e + _codes(e)), n_e)
    alone_y, alone_e = (np.count_nonzero(np.bincount(codes) == 1) for codes in (of_y, of_e))
    share = resolvable_fraction(_codes(y), _codes(e))
    if (
        share >= _MIN_RESOLVABLE_FRACTION
        and alone_y < _MAX_SINGLE_FRACTION * n_y
        and alone_e < _MAX_SINGLE_FRACTION * n_e
    ):
        return
    if 2 * alone_e >= n_e:
        remedy = (
            "A perturbation that fills its environment cannot be distinguished from it, by any method: use a coarser "
            "e_key, such as the plate in place of the well, or several columns side by side; or put controls, or the "
            "same perturbations, in all environments."
        )
    elif alone_y >= _MAX_SINGLE_FRACTION * n_y:
        remedy = _advice_on_links(y, e, controls, np.bincount(of_y) > 1)
    else:
        remedy = "Removing e from z_c may remove y with it: repeat perturbations, or use a coarser e_key."
    were = inflect(alone_y, "was", "were")
    warn_user(
        f"y and e are confounded ({name}): {alone_y:,} of {n_y:,} perturbations {were} seen in one environment only, "
        f"{alone_e:,} of {n_e:,} environments with one perturbation only, and {share:.0%} of their contrasts are "
        f"resolvable. {remedy}"
    )


def _advice_on_links(y: pd.Series, e: pd.Series, controls: Sequence[str], shared: np.ndarray) -> str:
    """Return advice, as text for a warning, on a design in which many perturbations occur in a single environment.

    The advice depends on the labels that occur in several environments and thereby link them: controls in all
    environments, controls in some environments, other perturbations, or no label.

    Parameters
    ----------
    y, e
        Perturbation and environment of each cell, categorical ``(N,)``.
    controls
        Labels of the controls.
    shared
        Mask of the perturbations that occur in several environments, boolean, one value per perturbation.
    """
    labels = y.cat.categories
    is_control = np.array([label_text(label) in controls for label in labels])
    n_controls = e[is_control[_codes(y)]].value_counts(sort=False)
    if n_controls.all():
        fewest = f"{n_controls.idxmin()} has the fewest, {format_count(n_controls.min(), 'row')}"
        links = " and ".join(["controls", *map(label_text, labels[shared & ~is_control][:3])])
        return (
            f"Only {links} link the environments ({fewest}): effects of an environment that its controls do not show "
            "are taken for effects of its perturbations. Scores of how well an embedding predicts "
            f"{e.name} can be high because of this design alone."
        )
    if n_controls.any():
        lacking = join_first(n_controls.index[n_controls == 0])
        return f"Put controls, or the same perturbations, in all environments (without controls: {lacking})."
    if not shared.any():
        return (
            "Perturbations of different environments cannot be compared, by any method: put controls, or the same "
            "perturbations, in all environments."
        )
    return (
        f"Only what lies in several environments links them ({join_first(labels[shared])}): if these are controls, "
        "name them (control=…)."
    )


def _codes(labels: pd.Series) -> np.ndarray:
    return labels.cat.codes.to_numpy().astype(np.int64)
