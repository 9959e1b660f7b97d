"""Pictures of cells: as they are, with one block of another cell, and on the way to another perturbation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scbd._anndata import IMAGE_KEY
from scbd._checks import missing_key
from scbd.pl._looks import wrapped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
    from matplotlib.axes import Axes

# in per cent of pixels
_DARKEST, _BRIGHTEST = 0.5, 99.5
# so many fit the width of a page, and can still be seen on a phone
_SHOWN = 6
# characters of a line above or beside a picture
_TITLE = 12


def cells(
    adata: AnnData,
    *,
    label: str | None = None,
    rows: Sequence[int] | np.ndarray | None = None,
    image_key: str = IMAGE_KEY,
    seed: int = 0,
) -> np.ndarray:
    """Draw some cells: three channels as colour, others one line a channel in grey.

    Each channel is as bright as its brightest pixels but one in 200: a single hot one would leave all else black. Black
    is 0; where there are negative values, as in standardised images, the darkest pixels but one in 200. Where
    ``var`` has a row a channel, their names stand at the left.

    Parameters
    ----------
    adata
        Cells with images in ``obsm``.
    label
        Column of ``obs`` to write above each cell.
    rows
        Which cells, by number or as a boolean mask; six random ones by default.
    image_key
        Key of the images.
    seed
        Seed of the choice.

    Returns
    -------
    Axes, ``(lines, cells)``.

    Raises
    ------
    KeyError
        If there are no such images, or no such column.
    ValueError
        If there are no cells.

    Examples
    --------
    >>> axes = scbd.pl.cells(adata, label="well")
    """
    import matplotlib.pyplot as plt

    if image_key not in adata.obsm:
        raise KeyError(missing_key("obsm", image_key, adata.obsm.keys()))
    if label is not None and label not in adata.obs:
        raise KeyError(missing_key("obs", label, adata.obs.keys()))
    if rows is None:
        rows = np.random.default_rng(seed).choice(adata.n_obs, min(_SHOWN, adata.n_obs), replace=False)
    asked = np.asarray(rows)
    chosen = np.arange(adata.n_obs)[asked if len(asked) else np.zeros(0, int)]
    require_cells(chosen)
    images = np.asarray(adata.obsm[image_key][chosen], dtype=np.float32)
    n, c = images.shape[:2]
    low, top = np.percentile(images, [_DARKEST, _BRIGHTEST], axis=(0, 2, 3), keepdims=True)
    low = np.minimum(low, 0)
    top = np.where(top > low, top, images.max((0, 2, 3), keepdims=True))  # a channel of few spots
    images = ((images - low) / np.where(top > low, top - low, 1)).clip(0, 1)
    lines = [images.transpose(0, 2, 3, 1)] if c == 3 else list(images.transpose(1, 0, 2, 3))
    channels = [", ".join(map(str, adata.var_names))] if c == 3 else list(map(str, adata.var_names))
    titles = [wrapped(name, _TITLE) for name in _texts(adata, label, chosen)]
    size = (1.0 * n + 0.4, 1.1 * len(lines) + 0.2 * max((title.count("\n") + 1 for title in titles), default=0))
    _, axes = plt.subplots(len(lines), n, figsize=size, squeeze=False, layout="constrained")
    for line, drawn in zip(axes, lines, strict=True):
        for ax, image in zip(line, drawn, strict=True):
            ax.imshow(image, cmap="gray", vmin=0, vmax=1)
            bare(ax)
    if adata.n_vars == c:
        for ax, name in zip(axes[:, 0], channels, strict=True):
            ax.set_ylabel(wrapped(name, _TITLE), fontsize="small")
    for ax, title in zip(axes[0], titles, strict=False):
        ax.set_title(title, fontsize="small")
    return axes


def _texts(adata: AnnData, label: str | None, rows: np.ndarray) -> list[str]:
    """What to write above each cell, if anything."""
    if label is None:
        return []
    values = adata.obs[label].iloc[rows]
    return [str(value) if known else "missing" for value, known in zip(values, values.notna(), strict=True)]


def counterfactuals(
    model: Any,
    rows: Sequence[int] | np.ndarray,
    *,
    partners: Sequence[int] | np.ndarray | None = None,
    adata: AnnData | None = None,
    channels: Sequence[int] | int | None = None,
) -> np.ndarray:
    """Draw cells, their reconstructions, and what they become with the content, or the style, of their partners.

    Parameters
    ----------
    model
        With a decoder: ``model.train_decoder()``; an iVAE or mcVAE has one.
    rows
        Cells, one a column: row numbers, or a boolean mask.
    partners
        Whose block each gets, as many; by default the next one's.
    adata
        The cells; the training data by default.
    channels
        Three channels to show as red, green and blue, or one to show in grey. By default all of three, or the first.

    Returns
    -------
    Axes ``(5, len(rows))``: original, partner, reconstruction, content of the partner, style of the partner.

    Raises
    ------
    ValueError
        If the model has no decoder or a single block or is one of features, there are no cells, partners are not as
        many, or channels not one or three of its own.

    Examples
    --------
    >>> axes = scbd.pl.counterfactuals(model, rows=[3, 5, 8, 9], channels=[0, 1, 2])
    """
    import matplotlib.pyplot as plt

    originals = model.get_intensities(adata, rows)
    shown = channels_shown(channels, originals)
    own = _numbers(rows)
    others = np.roll(own, -1) if partners is None else partners
    if len(_numbers(others)) != len(own):
        msg = f"There are {len(own)} cells and {len(_numbers(others))} partners: each cell has one."
        raise ValueError(msg)
    # first, as it refuses a model of a single block
    swapped = {
        "content of partner": model.swap_blocks(others, own, adata),
        "style of partner": model.swap_blocks(own, others, adata),
    }
    lines = {
        "original": originals,
        "partner": model.get_intensities(adata, others),
        "reconstruction": model.reconstruct(adata, own),
        **swapped,
    }
    everything = np.concatenate([lines["original"], lines["reconstruction"]])[:, shown]
    low, high = (everything.min((0, 2, 3)), everything.max((0, 2, 3)))
    figure, axes = plt.subplots(
        len(lines), len(own), figsize=(0.85 * len(own) + 1.5, 0.9 * len(lines)), squeeze=False, layout="constrained"
    )
    for line, (name, images) in zip(axes, lines.items(), strict=True):
        for ax, image in zip(line, images, strict=True):
            draw_picture(ax, image[shown], low, high)
        line[0].set_ylabel(name.replace(" of ", "\nof "), rotation=0, ha="right", va="center", fontsize="small")
    return axes


def _numbers(rows: Sequence[int] | np.ndarray) -> np.ndarray:
    """Row numbers of a mask; others as they are."""
    rows = np.asarray(rows)
    return np.flatnonzero(rows) if rows.dtype == bool else rows


def traverse(
    model: Any,
    rows: Sequence[int] | np.ndarray,
    to: str | float,
    *,
    adata: AnnData | None = None,
    n_steps: int = 5,
    channels: Sequence[int] | int | None = None,
) -> np.ndarray:
    """Draw what a perturbation does to cells, such as controls, each in its own well.

    Parameters
    ----------
    model
        With a decoder: ``model.train_decoder()``.
    rows
        Cells, one a line: row numbers, or a boolean mask.
    to
        The perturbation, a label of ``y_key``.
    adata
        The cells; the training data by default.
    n_steps
        Pictures on the way, see :meth:`scbd.SCBDModel.traverse`.
    channels
        Three channels to show as red, green and blue, or one to show in grey. By default all of three, or the first.

    Returns
    -------
    Axes ``(len(rows), n_steps + 2)``: the cell; the pictures on the way, the first of which is its reconstruction; and
    what has changed in the end, the mean of the channels shown: brighter is red, darker is blue.

    Raises
    ------
    KeyError
        If no cell has the perturbation.
    ValueError
        If the model has no decoder or is one of features, there are no cells, or channels are not one or
        three of its own.

    Examples
    --------
    >>> axes = scbd.pl.traverse(model, rows=[3, 5], to="g0_1", channels=[0, 1, 2])  # doctest: +SKIP
    """
    import matplotlib.pyplot as plt

    originals = model.get_intensities(adata, rows)
    shown = channels_shown(channels, originals)
    paths = model.traverse(rows, to, adata, n_steps=n_steps)
    originals, paths = originals[:, shown], paths[:, :, shown]
    everything = np.concatenate([originals, paths.reshape(-1, *paths.shape[2:])])
    low, high = everything.min((0, 2, 3)), everything.max((0, 2, 3))
    change = (paths[:, -1] - paths[:, 0]).mean(1)
    most = np.abs(change).max() or 1.0
    n, width = paths.shape[0], n_steps + 2
    goal = wrapped(to, _TITLE)
    above = 0.3 + 0.2 * goal.count("\n")
    figure, axes = plt.subplots(n, width, figsize=(0.95 * width, 1.0 * n + above), squeeze=False, layout="constrained")
    for line, original, path, difference in zip(axes, originals, paths, change, strict=True):
        for ax, image in zip(line, [original, *path], strict=False):
            draw_picture(ax, image, low, high)
        line[-1].imshow(difference, cmap="RdBu_r", vmin=-most, vmax=most)
        bare(line[-1])
    for ax, name in zip(axes[0, [0, 1, -2, -1]], ("cell", "decoded", goal, "change"), strict=True):
        ax.set_title(name, fontsize="small")
    return axes


def channels_shown(channels: Sequence[int] | int | None, images: np.ndarray) -> list[int]:
    """Three channels of images ``(N, C, H, W)`` for colours or one for grey: as asked, else all of three, or the first.

    Raises
    ------
    ValueError
        If others than one or three are asked for, or such that are not there; if these are features, or of no cell.
    """
    if images.ndim != 4:
        msg = "The model is one of features, which make no pictures: take the numbers from the model's own methods."
        raise ValueError(msg)
    require_cells(images)
    n = images.shape[1]
    if channels is None:
        return list(range(3)) if n == 3 else [0]
    shown = np.atleast_1d(channels)
    if shown.shape not in ((1,), (3,)) or shown.dtype.kind not in "iu" or not ((-n <= shown) & (shown < n)).all():
        msg = (
            f"channels={channels!r}: name one channel to show in grey, or three as red, green and blue, by their "
            f"numbers from 0 to {n - 1}."
        )
        raise ValueError(msg)
    return shown.tolist()


def require_cells(rows: np.ndarray) -> None:
    """Raise a ``ValueError`` if these are of no cell."""
    if not len(rows):
        msg = "rows names no cell: name one or more to draw."
        raise ValueError(msg)


def draw_picture(ax: Axes, image: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    """An image ``(1 or 3, H, W)``, black at ``low`` and full at ``high``, one number a channel."""
    picture = (image.transpose(1, 2, 0) - low) / np.where(high > low, high - low, 1)
    ax.imshow(np.clip(picture, 0, 1).squeeze(), cmap="gray", vmin=0, vmax=1)
    bare(ax)


def bare(ax: Axes) -> None:
    """No ticks and no frame."""
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
