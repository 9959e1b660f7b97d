"""Which cells a run learns from, how it is known that they are the same as before, and what was saved of it."""

from __future__ import annotations

import logging
import pickle
import warnings
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from scvi.data._constants import _MODEL_NAME_KEY

from scbd._checks import head, inflect
from scbd.data._sources import digest_cells
from scbd.data._splits import Split, split_by_column, stratified_split
from scbd.model._contract import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from scbd.data._sources import ImageSource

logger = logging.getLogger(__name__)

TRAIN_SIZE = 0.9
# of a digest: more than enough to tell cells apart
_DIGITS = 16
# columns of labels, as pandas calls what is in them
_KINDS = ("categorical", "string", "boolean", "integer")
_CELLS_A_VALUE = 8
# enough cells for the statistics of channels to three digits, and for the covariance of features
_IMAGES, _ROWS, _CONTROLS = 4_096, 65_536, 16_384
_BLOCK = 512
# what torch raises at a file that it cannot read
_UNREADABLE = (
    OSError,
    RuntimeError,
    pickle.UnpicklingError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    ValueError,
)
_FRAME = "scbd.frame"
# beside tensors and plain values, what may be in a file: numbers and containers, nothing that could act
_SAFE: list[Any] = [
    bytes,
    np.ndarray,
    np.dtype,
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    np._core.multiarray.scalar,  # type: ignore[attr-defined]
    *(getattr(np.dtypes, name) for name in np.dtypes.__all__ if name not in ("ObjectDType", "VoidDType")),
]


def choose_split(
    obs: pd.DataFrame,
    strata: list[np.ndarray],
    *,
    split: str | Split | None = None,
    train_size: float | None = None,
    validation_size: float | None = None,
    default: float = TRAIN_SIZE,
    seed: int = 0,
    earlier: Split | None = None,
) -> Split:
    """The split that was asked for; else that of an earlier run on these cells; else one at random.

    Parameters
    ----------
    obs
        Table of the cells.
    strata
        Labels to stratify by.
    split, train_size, validation_size
        What was asked for, see :meth:`scbd.SCBDModel.train`.
    default
        Share to train on, or what validation leaves where that is less.
    seed
        Of a random split.
    earlier
        Of the model's last run, if that was on the same cells.

    Raises
    ------
    TypeError, ValueError
        If ``split`` is nothing that can be, or names cells that are not there.

    Warns
    -----
    UserWarning
        If cells are to be validated on that the model was trained on before.
    """
    if split is None and earlier is not None and train_size is None and validation_size is None:
        return earlier
    if split is None:
        if train_size is None:
            train_size = default if validation_size is None else min(default, 1 - validation_size)
        chosen = stratified_split(strata, train_size=train_size, validation_size=validation_size, seed=seed)
    elif isinstance(split, str):
        chosen = split_by_column(obs, split)
    elif isinstance(split, Split):
        chosen = split
    else:
        msg = f"split must be a scbd.data.Split or a column of obs, got {type(split).__name__}."
        raise TypeError(msg)
    last = max(rows.max(initial=-1) for rows in (chosen.train, chosen.validation, chosen.test))
    if last >= len(obs):
        msg = f"The split names row {last}, there are {len(obs)} cells."
        raise ValueError(msg)
    seen = 0 if earlier is None else np.isin(chosen.validation, earlier.train).sum()
    if seen:
        msg = (
            f"{seen:,} of {len(chosen.validation):,} validation cells were trained on in an earlier run of this model: "
            "their loss says nothing about new cells. Leave split and sizes out to keep the split of that run."
        )
        warnings.warn(msg, UserWarning, stacklevel=6)
    return chosen


def draw_sample(
    source: ImageSource,
    rows: np.ndarray,
    y: np.ndarray,
    e: np.ndarray,
    controls: np.ndarray | None,
    positions: np.ndarray | None,
    *,
    seed: int,
) -> Sample:
    """Some of the training cells, drawn at random.

    Parameters
    ----------
    source
        Inputs of all cells.
    rows
        The training cells among them.
    y, e, controls, positions
        Of all cells, see :class:`Sample`. Of features, controls are drawn beside the others: they may be few among all,
        and features are scaled by them.
    seed
        Of the draw.
    """
    rng, of_features = np.random.default_rng(seed), len(source.shape) == 2
    drawn = rng.choice(rows, min(len(rows), _ROWS if of_features else _IMAGES), replace=False)
    if of_features and controls is not None:
        drawn = np.union1d(drawn, rng.permutation(rows[controls[rows]])[:_CONTROLS])
    drawn = np.sort(drawn)
    blocks = np.array_split(drawn, -(-len(drawn) // _BLOCK))
    return Sample(
        lambda: (torch.from_numpy(source.read(block)) for block in blocks),
        y[drawn],
        e[drawn],
        None if controls is None else controls[drawn],
        None if positions is None else positions[drawn],
    )


def warn_of_singletons(y: np.ndarray, names: Sequence[str]) -> None:
    """Name the perturbations of a single training cell; ``y`` are the codes of all training cells."""
    codes, counts = np.unique(y, return_counts=True)
    alone = codes[counts == 1]
    if len(alone):
        message = "%d of %d perturbations %s a single training cell (%s), which has no partner to learn from."
        have = inflect(len(alone), "has", "have")
        logger.warning(message, len(alone), len(codes), have, head(np.asarray(names)[alone]))


def check_other_environments(y: np.ndarray, e: np.ndarray, names: Sequence[str]) -> None:
    """Name the perturbations whose training cells, with codes ``y`` and ``e``, lie in one environment.

    Raises
    ------
    ValueError
        If all do: where positives are of other environments, there are none.
    """
    codes, n_environments = np.unique(np.unique(np.stack([y, e], 1), axis=0)[:, 0], return_counts=True)
    alone = codes[n_environments == 1]
    if len(alone) == len(codes):
        msg = (
            "positives='other_environments': the training cells of each perturbation lie in one environment. Use "
            "positives='all', or a coarser e_key."
        )
        raise ValueError(msg)
    if len(alone):
        message = (
            "%d of %d perturbations %s training cells in one environment only (%s), and therefore no partners to learn "
            "from with positives='other_environments'."
        )
        have = inflect(len(alone), "has", "have")
        logger.warning(message, len(alone), len(codes), have, head(np.asarray(names)[alone]))


def cell_digests(source: ImageSource, labels: pd.DataFrame) -> dict[str, str]:
    """What images and labels are, apart, so that it can be said which of them are others."""
    return {
        "images": digest_cells(source, pd.DataFrame(index=range(source.shape[0])))[:_DIGITS],
        "labels": digest_cells(None, labels)[:_DIGITS],
    }


def split_digest(split: Split, n_cells: int) -> str:
    """Which cells are trained on and validated on."""
    part = np.zeros(n_cells, dtype=np.int8)
    part[split.train], part[split.validation] = 1, 2
    return digest_cells(None, pd.DataFrame({"part": part}))[:_DIGITS]


def codes_of_few(obs: pd.DataFrame) -> Iterator[np.ndarray]:
    """Codes of all columns with fewer values than an eighth of the cells: guide, plate, donor; int64 ``(N,)`` each.

    Any of them may be what cells that lie together have in common. Fractions, dates and objects are not looked at; a
    missing value is a value.
    """
    for place in range(obs.shape[1]):
        column = obs.iloc[:, place]
        if pd.api.types.infer_dtype(column) in _KINDS:
            codes, values = pd.factorize(column)
            if len(values) <= len(obs) / _CELLS_A_VALUE:
                yield codes + 1


def read_header(path: Path, wanted: Callable[[Any], Any], what: str, *, allow_pickle: bool = False) -> Any:
    """Part of a file that :func:`torch.save` wrote, of which nothing is run; tensors stay on disk.

    Parameters
    ----------
    path
        An existing file.
    wanted
        Takes the part out of the whole.
    what
        How an error calls such a file.
    allow_pickle
        Make Python objects of any kind, which can run any code.

    Raises
    ------
    ValueError
        If the file is damaged, truncated or foreign, holds no such part, or holds Python objects that are not allowed.
    """
    try:
        with zipfile.ZipFile(path) as parts:
            broken = parts.testzip()  # compares each part with its checksum
    except zipfile.BadZipFile:
        msg = f"{path} is no {what}, or is truncated: use another copy of it."
        raise ValueError(msg) from None
    if broken:
        msg = f"{path} is damaged (its part {broken} is not what was written): use another copy of it."
        raise ValueError(msg)
    with torch.serialization.safe_globals(_SAFE):
        try:
            objects = [] if allow_pickle else torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
            content = None
            if not objects:
                content = wanted(torch.load(path, map_location="cpu", weights_only=not allow_pickle, mmap=True))
        except _UNREADABLE as error:
            msg = f"{path} is no {what}, or is truncated ({type(error).__name__}): use another copy of it."
            raise ValueError(msg) from error
    if objects:
        msg = (
            f"{path} holds Python objects ({', '.join(sorted(objects)[:3])}), and making them could run any code. If "
            f"you know where this {what} comes from, load a model with allow_pickle=True."
        )
        raise ValueError(msg)
    return content


def check_saved_model(path: Path, class_name: str, newest: int, *, allow_pickle: bool) -> None:
    """Say what is wrong with a saved model before anything is built from it.

    Parameters
    ----------
    path
        Of the file.
    class_name
        Of the model that is to be loaded.
    newest
        Format that this version reads, and all before.
    allow_pickle
        See :func:`read_header`.

    Raises
    ------
    FileNotFoundError
        If nothing is saved there.
    ValueError
        If the file is damaged, truncated, foreign, of another class, or written by a newer scbd.
    """
    if not path.is_file():
        msg = f"There is no saved model at {path}."
        raise FileNotFoundError(msg)
    attributes = read_header(path, lambda saved: saved["attr_dict"], "saved scbd model", allow_pickle=allow_pickle)
    name = attributes.get("registry_", {}).get(_MODEL_NAME_KEY, "model of another package")
    if name != class_name:
        msg = f"{path} holds a {name}, not a {class_name}: load it with {name}.load."
        raise ValueError(msg)
    theirs = attributes.get("format_", 0)
    if theirs > newest:
        msg = f"{path} was saved by a newer scbd (format {theirs}, this one reads {newest}): upgrade scbd."
        raise ValueError(msg)


def plain(value: Any) -> Any:
    """Dictionaries of any kind as plain ones, frames as their columns: saved without pickling an object."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, pd.DataFrame):
        columns = {str(name): _values(value[name]) for name in value}
        return {_FRAME: {"index": _values(value.index), "name": value.index.name, "columns": columns}}
    return value


def restored(value: Any) -> Any:
    """What :func:`plain` was made of."""
    if not isinstance(value, dict):
        return value
    if set(value) == {_FRAME}:
        saved = value[_FRAME]
        return pd.DataFrame(saved["columns"], index=pd.Index(saved["index"], name=saved["name"]))
    return {key: restored(part) for key, part in value.items()}


def _values(column: pd.Series | pd.Index) -> Any:
    return column.to_numpy() if column.dtype.kind in "biuf" else column.astype(str).tolist()
