"""Write the report of ``scbd.run``: a single HTML page with embedded pictures.

The page can be opened without any other file and without a network.
"""

from __future__ import annotations

import base64
import io
import json
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from scbd import pl
from scbd._shared.files import write_text
from scbd.pl._style import escape_dollars, wrap_name
from scbd.pl._umap import compute_umap

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from anndata import AnnData
    from matplotlib.figure import Figure

# _MIN_UMAP_CELLS: minimum number of cells for which a UMAP is drawn, because UMAP needs a few neighbours of each cell.
# _MAX_UMAP_CELLS: maximum number of cells drawn in a UMAP.
_MIN_UMAP_CELLS, _MAX_UMAP_CELLS = 5, 5_000
# _MAX_LEGEND_LABELS: maximum number of environments for which every environment is coloured in a UMAP. With more
# environments, the legend would have two columns and leave no room for the cells. _N_COLOURED_LABELS: number of
# environments that are coloured then.
_MAX_LEGEND_LABELS, _N_COLOURED_LABELS = 14, 10
# Settings of the pictures of cells. MAX_CROP_PERTURBATIONS: maximum number of perturbations, each drawn as one row.
# CROPS_PER_ROW: number of cells per row. _MAX_CHANNELS: maximum number of channels drawn.
MAX_CROP_PERTURBATIONS, CROPS_PER_ROW, _MAX_CHANNELS = 5, 4, 6
# maximum number of perturbations in the heat map of profiles
_MAX_PROFILES = 40
# Maximum number of perturbations for which the columns of the heat map are labelled. With more perturbations, only the
# rows are labelled.
_MAX_COLUMN_LABELS = 20
# maximum number of letters of a label in the heat map; longer labels are shortened
_MAX_LABEL_LETTERS = 24
# _WIDTH: width of all pictures in inches. A phone displays a picture of this width on 360 pixels, so that letters of 8
# points are 10 pixels high. _DPI: resolution of all pictures in dots per inch.
_WIDTH, _DPI = 4.2, 200
# Two percentiles of the pixel values of a channel, for pictures of cells. Pixels at the lower percentile are drawn in
# black, and pixels at the upper percentile at full brightness.
_PERCENTILES = 0.5, 99.5


@dataclass(frozen=True, kw_only=True)
class Report:
    """Contents of the report of ``scbd.run``, from which the HTML page is made.

    Parameters
    ----------
    verdict
        Text that states which embedding is best (:attr:`scbd._workflows.verdict.Verdict.text`), usually two sentences.
    next_step
        One sentence that advises the user what to do next.
    best
        Name of the best embedding, as in ``scores``; `None` if no embedding is called best.
    best_rule
        The rule by which the best embedding was chosen, such as "the highest score".
    scores
        One row per embedding and measure, with the columns ``embedding``, ``measure``, ``value``, ``low`` and ``high``
        (95 % interval, may be NaN), ``chance`` (may be NaN), ``better`` (``"higher"`` or ``"lower"``), ``n`` and
        ``unit`` (such as 12 and ``"perturbations"``: the score is a mean over 12 perturbations).
    terms
        Mapping from each term in the names of embeddings, such as ``"sphered"``, to its explanation.
    cells
        Held-out cells: labels as categorical texts in ``obs``, and embeddings in ``obsm``.
    embeddings
        Embeddings to draw as UMAPs: mapping from the title of each embedding to its key in ``cells.obsm``. The inputs
        are first, then z_c, then the best embedding if it is not z_c.
    y_key, e_keys
        Columns of ``cells.obs`` with the perturbation and with the environments.
    controls
        Perturbation labels of the controls; may be empty.
    strongest
        Perturbations with the strongest effects, in decreasing order, without controls. They are coloured in UMAPs.
    history
        Training curves, ``model.history``: losses by training step.
    ceiling
        Supervised loss of a collapsed embedding, which is drawn as a line in the training curves, see
        :func:`scbd.pl.history`; `None` to draw no line.
    crops
        Images of held-out cells ``(N, C, H, W)``, the perturbation of each cell, and the names of the channels; `None`
        for features.
    profiles
        Profiles of perturbations, one row each: mean embedding of the held-out cells, minus that of controls.
        ``profiles.columns.name`` is the name of the embedding.
    decisions
        Table of the settings that were chosen automatically, one row each: ``decision`` (the setting), ``value``,
        ``n_cells`` (number of cells on which the choice is based, may be missing) and ``why``.
    warnings
        Texts of the warnings of the run and of the notes on the verdict.
    settings, versions
        Settings of the run, and versions of packages, by name.
    code
        Lines of Python with which the user can continue the analysis.
    files
        Mapping from the name of each file that the run writes to a description of its content.
    """

    verdict: str
    next_step: str
    best: str | None
    best_rule: str
    scores: pd.DataFrame
    terms: Mapping[str, str]
    cells: AnnData
    embeddings: Mapping[str, str]
    y_key: str
    e_keys: Sequence[str]
    controls: Sequence[str]
    strongest: Sequence[str]
    history: Mapping[str, pd.DataFrame]
    ceiling: float | None
    crops: tuple[np.ndarray, Sequence[str], Sequence[str]] | None
    profiles: pd.DataFrame
    decisions: pd.DataFrame
    warnings: Sequence[str]
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    code: str
    files: Mapping[str, str]


class _Picture(NamedTuple):
    """Picture with caption, in the form in which the template of the HTML page takes it."""

    source: str
    """Data URI: the bytes of the PNG file as text, which is embedded in the page."""
    width: int
    """Width of the picture in pixels."""
    height: int
    """Height of the picture in pixels."""
    alt: str
    """Alternative text: a description for readers who cannot see the picture."""
    caption: Sequence[str]
    """Caption of the picture, one text per paragraph."""


def write_report(report: Report, path: Path) -> None:
    """Draw the pictures of a report, fill the HTML template, and write the page to a file.

    The file appears at ``path`` only when it is complete.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    how: dict[str, Any] = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    template = Environment(loader=PackageLoader("scbd._workflows", "."), **how).get_template("report.html.jinja")
    labels = report.cells.obs[[report.y_key, *report.e_keys]]
    decisions = report.decisions.reindex(columns=["decision", "value", "n_cells", "why"])
    n_cells = decisions["n_cells"].map(lambda n: "–" if pd.isna(n) else f"{int(n):,}")
    with _isolated_plotting():
        page = template.render(
            report=report,
            counts=[f"{len(labels):,} held-out cells", *(f"{key}: {labels[key].nunique():,} values" for key in labels)],
            umaps=_draw_umaps(report, labels),
            n_cells=len(labels),
            max_umap_cells=_MAX_UMAP_CELLS,
            measures=[_describe_measure(scores) for _, scores in report.scores.groupby("measure", sort=False)],
            training=_draw_training(report),
            crops=_draw_crops(report),
            heat_map=_draw_heat_map(report),
            decisions=decisions.assign(n_cells=n_cells).astype(str).to_dict("records"),
            settings=_flatten_settings(report.settings),
        )
    write_text(page, path)


@contextmanager
def _isolated_plotting() -> Iterator[None]:
    """Restore matplotlib's settings at the end of the ``with`` block, and close the figures opened in the block.

    In the block, warnings of letters missing from a font are hidden.
    """
    import matplotlib.pyplot as plt

    before = set(plt.get_fignums())
    try:
        with plt.rc_context(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from font")
            yield
    finally:
        for number in set(plt.get_fignums()) - before:
            plt.close(number)


def _encode_figure(figure: Figure, alt: str, *caption: str) -> _Picture:
    """Convert a matplotlib figure to a picture for the page, a PNG as wide as a phone's screen; close the figure."""
    import matplotlib.pyplot as plt

    figure.set_figwidth(_WIDTH)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=_DPI, facecolor="w")
    plt.close(figure)
    width, pixels = (round(inches * _DPI) for inches in figure.get_size_inches())
    return _Picture("data:image/png;base64," + base64.b64encode(file.getvalue()).decode(), width, pixels, alt, caption)


def _draw_umaps(report: Report, labels: pd.DataFrame) -> list[tuple[str, list[_Picture]]]:
    """Draw UMAPs of each embedding of the report, one coloured by the perturbation and one by each environment label.

    Up to 5,000 held-out cells are drawn, chosen at random. An embedding is skipped if fewer than five of its cells have
    finite values.

    Returns
    -------
    One pair per embedding: its title, and its pictures.
    """
    from anndata import AnnData

    rows = np.sort(np.random.default_rng(0).permutation(len(labels))[:_MAX_UMAP_CELLS])
    drawn = []
    for title, key in report.embeddings.items():
        values = np.asarray(report.cells.obsm[key])[rows]
        finite = np.isfinite(values).all(1)
        if finite.sum() < _MIN_UMAP_CELLS:
            continue
        places = compute_umap(values[finite])
        cells = AnnData(obs=labels.iloc[rows[finite]].copy(), obsm={"X": places, "X_umap": places})
        missing = f" {(~finite).sum():,} cells without finite values are missing." if not finite.all() else ""
        pictures = [_draw_umap(report, cells, title, column, missing) for column in labels]
        drawn.append((title, pictures))
    return drawn


def _draw_umap(report: Report, cells: AnnData, title: str, column: str, missing: str) -> _Picture:
    """Draw the UMAP of one embedding, coloured by one label, and explain the colours in the caption.

    Parameters
    ----------
    report
        Contents of the report, with the controls and the strongest perturbations.
    cells
        Cells to draw, with UMAP coordinates in ``obsm["X"]``.
    title
        Name of the embedding.
    column
        Column of ``cells.obs`` with the label by which cells are coloured.
    missing
        Sentence for the caption about cells that are not drawn, because their embedding is not finite; may be empty.
    """
    cells.obs[column] = cells.obs[column].cat.remove_unused_categories()
    counts = cells.obs[column].value_counts()
    controls: list[str] = []
    if column == report.y_key:
        controls = [name for name in report.controls if name in counts]
        colored = [name for name in report.strongest if name in counts]
        kind, choice = "perturbations", "with the strongest effects"
        meaning = "If cells of one colour lie together, the embedding carries the perturbation."
    else:
        is_long = len(counts) > _MAX_LEGEND_LABELS
        colored = list(counts.index[:_N_COLOURED_LABELS] if is_long else counts.index.sort_values())
        kind, choice = f"labels of {column}", "with the most cells"
        meaning = f"If colours are mixed, the embedding does not carry the environment ({column})."
    n_others = len(counts) - len(colored) - len(controls)
    seen = f"Coloured: the {len(colored)} {kind} {choice}." if n_others else f"Coloured: all {kind}."
    seen += " Grey: controls." if controls else ""
    seen += f" Light grey: {n_others:,} others." if n_others else ""
    axes = pl.umap_blocks(cells, [column], blocks={title: "X"}, highlight=colored, control=controls)
    alt = f"UMAP of {title}, held-out cells coloured by {column}."
    return _encode_figure(axes[0, 0].figure, alt, f"{seen} {meaning}{missing}")


def _describe_measure(scores: pd.DataFrame) -> dict[str, Any]:
    """Collect what the HTML template needs for the table and the bars of one measure, from the scores by this measure.

    Returns
    -------
    Dictionary with these items: ``rows``, the scores of each embedding; ``n``, the number of perturbations or cells
    over which the scores are averaged, as text; ``digits``, the number of decimal places of the scores; and ``end``,
    the score at the right end of the bars, which begin at 0.
    """
    largest = np.nan_to_num(scores[["value", "low", "high", "chance"]].to_numpy(float)).max()
    fewest, most = scores["n"].min(), scores["n"].max()
    return {
        "rows": scores.to_dict("records"),
        "n": f"{most:,}" if fewest == most else f"{fewest:,} to {most:,}",
        "digits": 2 if largest >= 0.2 else 3,
        "end": largest or 1.0,
    }


def _draw_training(report: Report) -> _Picture | None:
    """Draw the training curves of the model, and explain them in the caption.

    Returns
    -------
    The picture; `None` if the history of the model contains no training loss.
    """
    if "train_loss" not in report.history:
        return None
    figure = pl.history(report.history, ceiling=report.ceiling)[0].figure
    sentences = []
    names = {"validation": "validation_learned_c", "training": "train_learned_c"}
    ends = {part: f"{report.history[name].iloc[-1, 0]:.2f}" for part, name in names.items() if name in report.history}
    if ends:
        values = " and ".join(f"{value} on {part} cells" for part, value in ends.items())
        sentences.append(
            f"At the end, the supervised information of z_c is {values}. 0 is as good as a collapsed embedding (all "
            "cells in one point), 1 means that every cell shows its perturbation. "
            "Values far below 1 are usual if single cells do not show their perturbation clearly."
        )
    if len(ends) == 2:
        sentences.append(
            "Validation and training can be compared: if validation has less than half of the information of training, "
            "the model has overfitted."
        )
    if "train_environment_c" in report.history:
        sentences.append(
            "The invariance loss measures by how many standard errors environments differ more than by chance. The "
            "shaded band is the range of chance. Values below the band occur if inputs were standardised per "
            "environment, and are not a problem."
        )
    sentences.append("The curves should be flat at the end; if they still change, train for longer.")
    alt = "Curves of training and validation by step."
    return _encode_figure(figure, alt, *sentences)


def _draw_crops(report: Report) -> list[_Picture]:
    """Draw images of a few control cells and, in the rows below, of cells with the strongest perturbations.

    Images with three channels are drawn in one picture, as red, green and blue. Of other images, each channel is drawn
    in grey, in a picture of its own.
    """
    if report.crops is None or not len(report.crops[0]):
        return []
    images, labels, channels = report.crops
    names = np.array(labels, dtype=object)
    groups = {"control": np.flatnonzero(np.isin(names, report.controls))}
    groups |= {name: np.flatnonzero(names == name) for name in report.strongest[:MAX_CROP_PERTURBATIONS]}
    groups = {name: rows for name, rows in groups.items() if len(rows)}
    pixels = [np.asarray(images[rows[:CROPS_PER_ROW]], dtype=np.float32) for rows in groups.values()]
    low, high = np.percentile(np.concatenate(pixels), _PERCENTILES, axis=(0, 2, 3))
    scale = np.where(high > low, high - low, 1)[:, None, None]
    scaled = [((crops - low[:, None, None]) / scale).clip(0, 1) for crops in pixels]
    n_channels = images.shape[1]
    pictures = []
    for channel in [[0, 1, 2]] if n_channels == 3 else [[number] for number in range(min(n_channels, _MAX_CHANNELS))]:
        title = ", ".join(channels[number] for number in channel)
        figure = _draw_mosaic(list(groups), [crops[:, channel] for crops in scaled], title)
        if n_channels == 3:
            colors = zip(("Red", "green", "blue"), channels, low, high, strict=True)
            ranges = [f"{color}: {name}, from {start:.3g} to {end:.3g}" for color, name, start, end in colors]
        else:
            ranges = [f"Black is {low[channel[0]]:.3g}, white is {high[channel[0]]:.3g} and more"]
        caption = f"{'; '.join(ranges)}, in all rows."
        pictures.append(_encode_figure(figure, f"Crops of cells, one row per perturbation: {title}.", caption))
    return pictures


def _draw_mosaic(names: Sequence[str], rows: Sequence[np.ndarray], title: str) -> Figure:
    """Draw images of cells in rows, with the name of each row, such as the perturbation, to its left.

    Parameters
    ----------
    names
        Names of the rows.
    rows
        Images of the cells in each row, ``(N, 1, H, W)`` or ``(N, 3, H, W)``, with values between 0 and 1.
    title
        Title of the figure.
    """
    import matplotlib.pyplot as plt

    height, width = rows[0].shape[2:]
    gap = max(1, width // 16)
    canvas = np.ones((len(rows) * (height + gap) - gap, CROPS_PER_ROW * (width + gap) - gap, 3), dtype=np.float32)
    for place, crops in enumerate(rows):
        top = place * (height + gap)
        for column, crop in enumerate(crops):
            left = column * (width + gap)
            canvas[top : top + height, left : left + width] = crop.transpose(1, 2, 0)
    figure, ax = plt.subplots(figsize=(_WIDTH, _WIDTH), layout="constrained")
    ax.imshow(canvas, aspect="auto")
    places = [place * (height + gap) + height / 2 for place in range(len(rows))]
    ax.set_yticks(places, [wrap_name(name, 14) for name in names], fontsize="small")
    ax.set_xticks([])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_title(wrap_name(title, 40), fontsize="medium")
    # The names of rows take a part of the figure's width. The height of the figure is adapted to the remaining width,
    # so that pixels of the images are square.
    figure.draw_without_rendering()
    box = ax.get_window_extent()
    pixels = box.width * canvas.shape[0] / canvas.shape[1] - box.height
    figure.set_figheight(figure.get_figheight() + pixels / figure.dpi)
    return figure


def _draw_heat_map(report: Report) -> _Picture | None:
    """Draw a heat map of the cosine similarities between profiles of perturbations.

    Rows and columns are ordered by hierarchical clustering. Up to 40 perturbations with the strongest effects are
    drawn, without controls.

    Returns
    -------
    The picture; `None` if fewer than two perturbations have a profile that is finite and not 0.
    """
    import matplotlib.pyplot as plt
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    profiles = report.profiles.drop(index=report.controls, errors="ignore")
    length = np.linalg.norm(profiles.to_numpy(), axis=1)
    is_drawn = np.isfinite(length) & (length > 0)
    profiles, length = profiles[is_drawn], length[is_drawn]
    chosen = np.argsort(-length, kind="stable")[:_MAX_PROFILES]
    if len(chosen) < 2:
        return None
    unit = profiles.to_numpy()[chosen] / length[chosen, None]
    cosines = np.clip(unit @ unit.T, -1, 1)
    order = leaves_list(linkage(squareform(1 - cosines, checks=False), "average", optimal_ordering=True))
    cosines = cosines[order][:, order]
    names = [
        name if len(name) <= _MAX_LABEL_LETTERS else f"{name[: _MAX_LABEL_LETTERS - 1]}…"
        for name in profiles.index[chosen[order]]
    ]
    n = len(names)
    drawn_names = list(map(escape_dollars, names))
    column_names = drawn_names if n <= _MAX_COLUMN_LABELS else []
    height = 1.1 + max(0.16 * n, 0.9) + 0.06 * max(map(len, column_names), default=0)
    figure, ax = plt.subplots(figsize=(_WIDTH, height), layout="constrained")
    image = ax.imshow(cosines, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
    ax.set_yticks(range(n), drawn_names, fontsize=8)
    ax.set_xticks(range(len(column_names)), column_names, fontsize=8)
    ax.tick_params(axis="x", rotation=90)
    ax.tick_params(length=0)
    bar = figure.colorbar(image, ax=ax, location="top", shrink=0.7, aspect=30, ticks=[-1, 0, 1])
    bar.set_label("cosine between profiles", fontsize="small")
    bar.ax.tick_params(labelsize="small")
    first, second = np.triu_indices(n, 1)
    nearest = np.argsort(-cosines[first, second], kind="stable")[:3]
    pairs = ", ".join(f"{names[first[i]]} and {names[second[i]]} ({cosines[first[i], second[i]]:.2f})" for i in nearest)
    which = f"{n} perturbations" if n == len(profiles) else f"The {n} strongest of {len(profiles)} perturbations"
    columns = "" if column_names else " Columns are in the order of the rows."
    caption = (
        f"{which}, ordered so that similar ones are neighbours.{columns} A profile is the mean {profiles.columns.name} "
        "of a perturbation's held-out cells relative to controls. Red: two perturbations change cells in the same "
        "direction. Blue: in opposite directions. White: unrelated.",
        f"Most similar: {pairs}.",
        "Red blocks along the diagonal are candidates for a common mechanism, such as genes of one pathway. Profiles "
        "of weak perturbations are mostly noise.",
    )
    return _encode_figure(figure, f"Heat map of cosines between profiles of {n} perturbations.", *caption)


def _flatten_settings(settings: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Convert nested settings to a flat mapping: nested names are joined with dots, and values become text."""
    found: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            found |= _flatten_settings(value, f"{above}{name}.")
        else:
            found[f"{above}{name}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return found
