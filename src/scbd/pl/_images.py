"""Pictures of cells: images of cells, and images predicted by the decoder of a model after changes of z_c or z_s."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scbd._shared.checks import missing_key_message
from scbd._shared.keys import IMAGE_KEY
from scbd.pl._style import wrap_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
    from matplotlib.axes import Axes

# _DARKEST, _BRIGHTEST: percentiles of the pixel values of a channel that are drawn as black and as full brightness
_DARKEST, _BRIGHTEST = 0.5, 99.5
# Default number of cells that are drawn. Six cells fit the width of a page, and are still large enough on a phone.
_N_CELLS_SHOWN = 6
# Maximum number of characters per line of the text that is written above an image or to the left of an image.
_TITLE_WIDTH = 12


def cells(
    adata: AnnData,
    *,
    label: str | None = None,
    rows: Sequence[int] | np.ndarray | None = None,
    image_key: str = IMAGE_KEY,
    seed: int = 0,
) -> np.ndarray:
    """Draw images of cells, one cell per column of panels.

    Images with three channels are drawn in colour, in one row of panels. Of images with another number of channels,
    each channel is drawn in grey, in a separate row. If ``var`` has one row per channel, the names of the channels are
    written to the left.

    The 99.5th percentile of a channel's pixel values is drawn at full brightness, so that a single bright pixel does
    not darken all others. A value of 0 is drawn in black. If there are negative values, as in standardised images, the
    0.5th percentile is drawn in black.

    Parameters
    ----------
    adata
        Cells with images in ``obsm``.
    label
        Column of ``obs`` whose values are written above the cells.
    rows
        Cells to draw, as row numbers or as a boolean mask. Default: six random cells.
    image_key
        Key of ``obsm`` with the images ``(N, C, H, W)``.
    seed
        Seed of the random choice of cells.

    Returns
    -------
    Array of axes, shape ``(n_rows, n_cells)``.

    Raises
    ------
    KeyError
        If ``obsm`` lacks the images, or ``obs`` lacks the column.
    ValueError
        If ``rows`` selects no cell.

    Examples
    --------
    >>> axes = scbd.pl.cells(adata, label="well")
    """
    import matplotlib.pyplot as plt

    if image_key not in adata.obsm:
        raise KeyError(missing_key_message("obsm", image_key, adata.obsm.keys()))
    if label is not None and label not in adata.obs:
        raise KeyError(missing_key_message("obs", label, adata.obs.keys()))
    if rows is None:
        rows = np.random.default_rng(seed).choice(adata.n_obs, min(_N_CELLS_SHOWN, adata.n_obs), replace=False)
    chosen = np.arange(adata.n_obs)[np.asarray(rows, dtype=None if len(rows) else int)]
    require_cells(chosen)
    images = np.asarray(adata.obsm[image_key][chosen], dtype=np.float32)
    n, c = images.shape[:2]
    low, high = np.percentile(images, [_DARKEST, _BRIGHTEST], axis=(0, 2, 3))
    low = np.minimum(low, 0)
    # If less than 0.5 % of the pixels of a channel are brighter than black, its 99.5th percentile is black. Its maximum
    # is then drawn at full brightness.
    high = np.where(high > low, high, images.max((0, 2, 3)))
    channels = [str(name) for name in adata.var_names]
    # channels of each row of panels
    lines = [slice(None)] if c == 3 else [slice(i, i + 1) for i in range(c)]
    titles = []
    if label is not None:
        values = adata.obs[label].iloc[chosen].astype(object)
        titles = [wrap_name(value, _TITLE_WIDTH) for value in values.where(values.notna(), "missing")]
    size = (1.0 * n + 0.4, 1.1 * len(lines) + 0.2 * max((title.count("\n") + 1 for title in titles), default=0))
    _, axes = plt.subplots(len(lines), n, figsize=size, squeeze=False, layout="constrained")
    for line, shown in zip(axes, lines, strict=True):
        for ax, image in zip(line, images[:, shown], strict=True):
            draw_image(ax, image, low[shown], high[shown])
        if adata.n_vars == c:
            line[0].set_ylabel(wrap_name(", ".join(channels[shown]), _TITLE_WIDTH), fontsize="small")
    for ax, title in zip(axes[0], titles, strict=False):
        ax.set_title(title, fontsize="small")
    return axes


def counterfactuals(
    model: Any,
    rows: Sequence[int] | np.ndarray,
    *,
    partners: Sequence[int] | np.ndarray | None = None,
    adata: AnnData | None = None,
    channels: Sequence[int] | int | None = None,
) -> np.ndarray:
    """Draw images that a decoder predicts for cells whose z_c or z_s is replaced by that of another cell.

    The other cell is called the partner. The images of both cells, and the reconstruction of the cell from its own z_c
    and z_s, are drawn for comparison.

    Parameters
    ----------
    model
        Model of images with a decoder: an SCBD model after ``model.train_decoder()``, an iVAE or an mcVAE.
    rows
        Cells to draw, one per column of panels, as row numbers or as a boolean mask.
    partners
        Partner of each cell, as row numbers or as a boolean mask. Default: the next cell of ``rows``, and for the last
        cell the first.
    adata
        Table of the cells. Default: the training data.
    channels
        Three channels to draw as red, green and blue, or one channel to draw in grey. Default: all channels of images
        with three channels, otherwise the first channel.

    Returns
    -------
    Array of axes, shape ``(5, n_cells)``. The rows show the original, the partner, the reconstruction, the
    reconstruction with z_c (content) of the partner, and the reconstruction with z_s (style) of the partner.

    Raises
    ------
    ValueError
        If the model has no decoder, has a single block, or takes features; if ``rows`` selects no cell; if the numbers
        of cells and partners differ; or if ``channels`` are not one or three existing channels.

    Examples
    --------
    >>> axes = scbd.pl.counterfactuals(model, rows=[3, 5, 8, 9], channels=[0, 1, 2])
    """
    import matplotlib.pyplot as plt

    originals = model.get_intensities(adata, rows)
    shown = check_channels(channels, originals)
    own = _cell_numbers(rows)
    others = np.roll(own, -1) if partners is None else partners
    if len(_cell_numbers(others)) != len(own):
        msg = f"There are {len(own)} cells and {len(_cell_numbers(others))} partners: each cell has one."
        raise ValueError(msg)
    # The predictions with z_c or z_s of the partner are computed before all other images, because swap_blocks raises an
    # error if the model has only one of the two embeddings.
    content, style = model.swap_blocks(others, own, adata), model.swap_blocks(own, others, adata)
    lines = {
        "original": originals,
        "partner": model.get_intensities(adata, others),
        "reconstruction": model.reconstruct(adata, own),
        "content of partner": content,
        "style of partner": style,
    }
    everything = np.concatenate([lines["original"], lines["reconstruction"]])[:, shown]
    low, high = everything.min((0, 2, 3)), everything.max((0, 2, 3))
    size = 0.85 * len(own) + 1.5, 0.9 * len(lines)
    _, axes = plt.subplots(len(lines), len(own), figsize=size, squeeze=False, layout="constrained")
    for line, (name, images) in zip(axes, lines.items(), strict=True):
        for ax, image in zip(line, images, strict=True):
            draw_image(ax, image[shown], low, high)
        line[0].set_ylabel(name.replace(" of ", "\nof "), rotation=0, ha="right", va="center", fontsize="small")
    return axes


def _cell_numbers(rows: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the row numbers of cells that are given as a boolean mask or as row numbers."""
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
    """Draw images that a decoder predicts for cells, such as controls, under a perturbation.

    The z_c of each cell is moved in steps to that of the perturbation, and its z_s is kept, so that the predicted cell
    stays in its own environment. The image is decoded at each step. See :meth:`scbd.SCBDModel.traverse`.

    Parameters
    ----------
    model
        SCBD model of images with a decoder (``model.train_decoder()``).
    rows
        Cells to draw, one per row of panels, as row numbers or as a boolean mask.
    to
        Perturbation whose effect is predicted, a label in the column ``y_key``.
    adata
        Table of the cells. Default: the training data.
    n_steps
        Number of decoded images per cell. The first one is the reconstruction of the cell, and the last one the
        prediction with the full effect.
    channels
        Three channels to draw as red, green and blue, or one channel to draw in grey. Default: all channels of images
        with three channels, otherwise the first channel.

    Returns
    -------
    Array of axes, shape ``(n_cells, n_steps + 2)``. From left to right, the columns show the original image, the
    decoded images, and the change: the last decoded image minus the first one, averaged over the drawn channels. Red
    pixels become brighter, and blue pixels darker.

    Raises
    ------
    KeyError
        If no cell has the perturbation ``to``.
    ValueError
        If the model has no decoder or takes features; if ``rows`` selects no cell; or if ``channels`` are not one or
        three existing channels.

    Examples
    --------
    >>> axes = scbd.pl.traverse(model, rows=[3, 5], to="g0_1", channels=[0, 1, 2])  # doctest: +SKIP
    """
    import matplotlib.pyplot as plt

    originals = model.get_intensities(adata, rows)
    shown = check_channels(channels, originals)
    paths = model.traverse(rows, to, adata, n_steps=n_steps)
    originals, paths = originals[:, shown], paths[:, :, shown]
    everything = np.concatenate([originals, paths.reshape(-1, *paths.shape[2:])])
    low, high = everything.min((0, 2, 3)), everything.max((0, 2, 3))
    change = (paths[:, -1] - paths[:, 0]).mean(1)
    most = np.abs(change).max() or 1.0
    n, width = paths.shape[0], n_steps + 2
    goal = wrap_name(to, _TITLE_WIDTH)
    above = 0.3 + 0.2 * goal.count("\n")
    _, axes = plt.subplots(n, width, figsize=(0.95 * width, 1.0 * n + above), squeeze=False, layout="constrained")
    for line, original, path, difference in zip(axes, originals, paths, change, strict=True):
        for ax, image in zip(line, [original, *path], strict=False):
            draw_image(ax, image, low, high)
        line[-1].imshow(difference, cmap="RdBu_r", vmin=-most, vmax=most)
        remove_frame(line[-1])
    for ax, name in zip(axes[0, [0, 1, -2, -1]], ("cell", "decoded", goal, "change"), strict=True):
        ax.set_title(name, fontsize="small")
    return axes


def check_channels(channels: Sequence[int] | int | None, images: np.ndarray) -> list[int]:
    """Choose the channels of images to draw: three channels as red, green and blue, or one channel in grey.

    Parameters
    ----------
    channels
        Number of one channel, or numbers of three channels. Default: all channels of images with three channels,
        otherwise the first channel.
    images
        Images of the cells, ``(N, C, H, W)``.

    Raises
    ------
    ValueError
        If ``channels`` are not one or three existing channels; if ``images`` are in fact features, ``(N, F)``; or if
        there are no cells.
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
    """Raise ``ValueError`` if there are no cells to draw, that is, if ``rows`` (one entry per cell) is empty."""
    if not len(rows):
        msg = "rows names no cell: name one or more to draw."
        raise ValueError(msg)


def draw_image(ax: Axes, image: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    """Draw an image ``(1, H, W)`` in grey, or ``(3, H, W)`` in colour, without ticks and frame.

    ``low`` and ``high`` hold one pixel value per channel: those that are drawn in black and at full brightness.
    """
    picture = (image.transpose(1, 2, 0) - low) / np.where(high > low, high - low, 1)
    ax.imshow(np.clip(picture, 0, 1).squeeze(), cmap="gray", vmin=0, vmax=1)
    remove_frame(ax)


def remove_frame(ax: Axes) -> None:
    """Remove the ticks and the frame of matplotlib axes."""
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
