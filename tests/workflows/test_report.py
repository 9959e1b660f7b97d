from __future__ import annotations

import re
from dataclasses import fields, replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from helpers.figure_checks import require_readable

from scbd._workflows import report as report_module
from scbd._workflows.report import Report, write_report

SECTIONS = ["verdict", "umaps", "scores", "training", "crops", "related", "decisions", "warnings", "settings", "code"]
VOID = {"meta", "img", "br", "hr", "link", "input", "rect", "line"}


# parts of the names of tests that draw figures; in all other tests nothing is drawn, to save time
DRAWN = ("whole", "escapes", "number_of_perturbations", "computes_a_umap", "matplotlib")


def keep_alt_and_caption(figure, alt: str, *caption: str) -> report_module._Picture:
    plt.close(figure)
    return report_module._Picture("data:image/png;base64,", 1, 1, alt, caption)


@pytest.fixture(autouse=True)
def quick_pictures(request, monkeypatch):
    name = request.function.__name__
    if "computes_a_umap" not in name:
        monkeypatch.setattr(report_module, "compute_umap", lambda values: np.asarray(values)[:, :2])
    monkeypatch.setattr(report_module, "_DPI", 40)
    if not any(part in name for part in DRAWN):
        empty = lambda *args, **how: plt.subplots(squeeze=False)[1]
        monkeypatch.setattr("scbd.pl.umap_blocks", empty)
        monkeypatch.setattr("scbd.pl.history", lambda *args, **how: empty().ravel())
        monkeypatch.setattr(report_module, "_encode_figure", keep_alt_and_caption)


def make_report(n_perturbations: int = 4, *, n_cells: int = 120, n_wells: int = 3, **changes: Any) -> Report:
    """Build a report of cells with controls, in which each perturbation lies in a direction of its own."""
    rng = np.random.default_rng(0)
    names = [f"gene_{number}" for number in range(n_perturbations)]
    genes = np.array([*names, "mock"])[np.arange(n_cells) % (n_perturbations + 1)]
    obs = pd.DataFrame({"gene": genes, "well": [f"W{row % n_wells}" for row in range(n_cells)], "day": "1"})
    profiles = pd.DataFrame(rng.normal(size=(n_perturbations, 5)), index=names).rename_axis(columns="z_c")
    embeddings = {"X_pixel_pca": rng.normal(size=(n_cells, 6)), "X_scbd_c": rng.normal(size=(n_cells, 5))}
    steps = pd.Index([1, 2, 3], name="step")
    losses = ["train_loss", "validation_loss", "train_learned_c", "validation_learned_c", "train_environment_c"]
    scores = pd.DataFrame(
        {
            "embedding": ["pixel PCA", "z_c"] * 2,
            "measure": ["F1 of gene"] * 2 + ["F1 of well"] * 2,
            "value": [0.2, 0.61, 0.8, 0.35],
            "low": [0.1, 0.5, 0.7, 0.3],
            "high": [0.3, 0.7, 0.9, 0.4],
            "chance": [0.25] * 2 + [0.33] * 2,
            "better": ["higher"] * 2 + ["lower"] * 2,
            "n": [n_perturbations] * 2 + [n_cells] * 2,
            "unit": ["perturbations"] * 2 + ["cells"] * 2,
        }
    )
    made = Report(
        verdict="z_c is best. Use it.",
        next_step="Continue with z_c.",
        best="z_c",
        best_rule="the highest score",
        scores=scores,
        terms={"z_c": "content"},
        cells=AnnData(obs=obs.set_axis(obs.index.astype(str)).astype("category"), obsm=embeddings),
        embeddings={"pixel PCA": "X_pixel_pca", "z_c": "X_scbd_c"},
        y_key="gene",
        e_keys=["well"],
        controls=["mock"],
        strongest=names[:10],
        history={name: pd.DataFrame({name: [3.0, 2.0, 1.0]}, index=steps) for name in losses},
        ceiling=None,
        crops=(rng.integers(0, 255, (n_cells, 2, 6, 6)).astype("uint8"), list(genes), ["DNA", "actin"]),
        profiles=profiles,
        decisions=pd.DataFrame({"decision": ["alpha"], "value": ["auto"], "n_cells": [1200], "why": ["a reason"]}),
        warnings=["Few cells."],
        settings={"model": {"n_latent": 5}, "seed": 0},
        versions={"scbd": "1"},
        code="import scbd",
        files={"cells.h5ad": "all embeddings"},
    )
    return replace(made, **changes)


class Page(HTMLParser):
    """Elements of a page; raises if one is not closed, or is closed in the wrong order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if not self._open or self._open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def of(self, tag: str) -> list[dict[str, Any]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def ids(self) -> list[str]:
        return [str(attributes["id"]) for _, attributes in self.elements if "id" in attributes]


def write_and_parse(report: Report, folder: Path) -> Page:
    write_report(report, folder / "report.html")
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def test_write_report_page_is_whole_and_needs_no_other_file(tmp_path):
    page = write_and_parse(make_report(), tmp_path)
    assert [name for name in page.ids if name in SECTIONS] == SECTIONS
    assert not page.of("script") and not page.of("link") and not page.of("iframe")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"url\(|@import|https?://", text)
    images = page.of("img")
    assert all(image["src"].startswith("data:image/png;base64,") and len(image["alt"]) > 10 for image in images)
    # four UMAPs (two embeddings by gene and by well), training curves, two channels, the heat map
    assert len(images) == 8 == len(page.of("figcaption"))
    assert {link["href"] for link in page.of("a")} <= {f"#{name}" for name in page.ids}
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_write_report_states_scores_decisions_and_settings(tmp_path):
    page = write_and_parse(make_report(), tmp_path)
    for phrase in (
        "z_c is best. Use it.",
        "120 held-out cells",
        "Higher is better. Rests on 4 perturbations.",
        "z_c best 0.61 0.50 to 0.70 0.25",
        "alpha auto a reason 1,200",
        "Few cells.",
        "model.n_latent 5",
        "import scbd",
        "cells.h5ad all embeddings",
    ):
        assert phrase in page.text
    assert len([row for row in page.of("tr") if row.get("class") == "best"]) == 2


def test_write_report_bars_show_scores_on_one_scale(tmp_path):
    page = write_and_parse(make_report(), tmp_path)
    widths = [float(bar["width"].rstrip("%")) for bar in page.of("rect") if bar["class"] == "value"]
    np.testing.assert_allclose(widths, [100 * x for x in (0.2 / 0.7, 0.61 / 0.7, 0.8 / 0.9, 0.35 / 0.9)], atol=0.01)
    places = [float(line["x1"].rstrip("%")) for line in page.of("line") if line["class"] == "chance"]
    np.testing.assert_allclose(places, [100 * x for x in (0.25 / 0.7, 0.25 / 0.7, 0.33 / 0.9, 0.33 / 0.9)], atol=0.01)


HOSTILE = "<b>&\"'</td> $\\frac$ {{ 1/0 }}"


def test_write_report_escapes_all_text(tmp_path):
    report = make_report()
    obs = report.cells.obs.astype(str).replace({"gene_0": HOSTILE, "W0": HOSTILE}).astype("category")
    renamed: dict[str, Any] = {
        field.name: HOSTILE for field in fields(Report) if field.name in ("verdict", "best", "code")
    }
    assert report.crops is not None
    images, labels, _ = report.crops
    page = write_and_parse(
        replace(
            report,
            **renamed,
            scores=report.scores.replace({"z_c": HOSTILE, "F1 of gene": HOSTILE}),
            cells=AnnData(obs=obs, obsm=dict(report.cells.obsm)),
            embeddings={HOSTILE: "X_scbd_c"},
            strongest=[HOSTILE],
            crops=(images, [HOSTILE if name == "gene_0" else name for name in labels], [HOSTILE, "actin"]),
            profiles=report.profiles.rename(index={"gene_0": HOSTILE}),
            decisions=pd.DataFrame({"decision": [HOSTILE], "value": [HOSTILE], "why": [HOSTILE]}),
            warnings=[HOSTILE],
            settings={HOSTILE: {HOSTILE: HOSTILE}},
            versions={HOSTILE: HOSTILE},
            files={HOSTILE: HOSTILE},
        ),
        tmp_path,
    )
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<b>" not in text and escape("<b>&") in text
    assert not page.of("b")


def few_cells(n: int) -> dict[str, Any]:
    report = make_report()
    return {"cells": report.cells[:n].copy(), "crops": None}


def without_values() -> dict[str, Any]:
    cells = make_report().cells
    cells.obsm["X_scbd_c"][:10] = np.nan
    return {"cells": cells}


@pytest.mark.parametrize(
    ("changes", "present", "absent"),
    [
        ({"crops": None}, [], ["Cells of the strongest perturbations"]),
        ({"crops": (np.empty((0, 2, 4, 4)), [], ["DNA", "actin"])}, ["no crops of held-out cells"], []),
        ({"controls": []}, ["Coloured: the 4 perturbations with the strongest"], ["Grey: controls."]),
        ({"e_keys": ["well", "day"]}, ["does not carry the environment (day)", "day: 1 values"], []),
        ({"e_keys": []}, [], ["If colours are mixed"]),
        ({"best": None}, ["No embedding is called best."], ["z_c best"]),
        ({"warnings": []}, ["Warnings None."], ["read it"]),
        ({"history": {}}, ["No training curves were recorded."], []),
        ({"scores": make_report().scores[:0]}, ["There are no scores"], []),
        ({"decisions": make_report().decisions[:0]}, ["Nothing was decided automatically."], []),
        ({"decisions": make_report().decisions.drop(columns="n_cells")}, ["alpha auto a reason –"], []),
        ({"profiles": make_report().profiles[:1]}, ["There is no heat map"], []),
        ({"profiles": make_report().profiles.mul([0, np.nan, 1, 1], axis=0)}, ["2 perturbations, ordered"], []),
        (few_cells(0), ["0 cells were held out, which is too few"], []),
        (few_cells(4), ["4 cells were held out, which is too few"], []),
        (without_values(), ["10 cells without finite values are missing"], []),
    ],
)
def test_write_report_missing_parts_are_replaced_by_sentences(tmp_path, changes, present, absent):
    text = write_and_parse(make_report(**changes), tmp_path).text
    assert all(phrase in text for phrase in present)
    assert not any(phrase in text for phrase in absent)


@pytest.mark.parametrize("columns", [["value", "low", "high", "chance"], ["low", "high"], ["chance"]])
def test_write_report_missing_numbers_are_dashes(tmp_path, columns):
    report = make_report()
    page = write_and_parse(replace(report, scores=report.scores.assign(**dict.fromkeys(columns, np.nan))), tmp_path)
    assert "nan" not in page.text.lower()
    shown = {bar["class"] for bar in page.of("rect") + page.of("line")}
    assert shown == {
        "track",
        *({"value", "interval", "chance"} - {{"low": "interval"}.get(name, name) for name in columns}),
    }


@pytest.mark.parametrize("n_perturbations", [1, 2, 300])
def test_write_report_any_number_of_perturbations_states_the_rest(tmp_path, n_perturbations):
    report = make_report(n_perturbations, n_cells=2 * (n_perturbations + 1) + 10, n_wells=30)
    page = write_and_parse(report, tmp_path)
    if n_perturbations == 300:
        phrases = [
            "the 10 perturbations with",
            "290 others",
            "The 40 strongest of 300",
            "the 10 labels of well",
            "20 others",
        ]
        assert all(phrase in page.text for phrase in phrases)


def test_write_report_heat_map_keeps_the_longest_profiles_and_no_controls(monkeypatch):
    report = make_report(60, n_cells=200)
    profiles = pd.concat([report.profiles, pd.DataFrame([[9.0] * 5], index=["mock"])])
    names: list[str] = []
    monkeypatch.setattr(report_module, "_encode_figure", lambda figure, *rest, **how: names.extend(tick_labels(figure)))
    report_module._draw_heat_map(replace(report, profiles=profiles))
    plt.close("all")
    assert len(names) == 40
    norms = np.linalg.norm(report.profiles, axis=1)
    assert set(names) == set(report.profiles.index[np.argsort(-norms)[:40]])


def tick_labels(figure) -> list[str]:
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def test_write_report_heat_map_puts_similar_perturbations_together(monkeypatch):
    direction = np.random.default_rng(0).normal(size=(2, 5))
    profiles = pd.DataFrame(direction[[0, 1] * 4] + 0.01, index=[f"{'ab'[row % 2]}{row}" for row in range(8)])
    names: list[str] = []
    monkeypatch.setattr(report_module, "_encode_figure", lambda figure, *rest, **how: names.extend(tick_labels(figure)))
    report_module._draw_heat_map(make_report(profiles=profiles, strongest=[]))
    plt.close("all")
    assert len({name[0] for name in names[:4]}) == len({name[0] for name in names[4:]}) == 1


@pytest.mark.parametrize(("n_channels", "n_pictures"), [(1, 1), (3, 1), (5, 5), (8, 6)])
def test_write_report_crops_have_one_picture_per_channel_or_in_colour(n_channels, n_pictures):
    images = np.random.default_rng(0).integers(0, 255, (120, n_channels, 6, 6)).astype("uint8")
    report = make_report()
    assert report.crops is not None
    _, labels, _ = report.crops
    channels = [f"channel {number}" for number in range(n_channels)]
    pictures = report_module._draw_crops(replace(report, crops=(images, labels, channels)))
    assert len(pictures) == n_pictures
    assert ("Red: channel 0, from" in pictures[0].caption[0]) == (n_channels == 3)


@pytest.mark.parametrize("shape", [(6, 6), (6, 12), (40, 20)])
@pytest.mark.parametrize("name", ["g", "Metadata_JCP2022_perturbation_by_name", "W" * 20])
def test_write_report_crops_have_square_pixels_and_whole_names(shape, name):
    figure = report_module._draw_mosaic([name, "control"], [np.zeros((3, 1, *shape))] * 2, "DNA")
    require_readable(figure)
    (ax,) = figure.axes
    height, width = np.asarray(ax.images[0].get_array()).shape[:2]
    assert ax.bbox.height / ax.bbox.width == pytest.approx(height / width, rel=0.03)
    plt.close(figure)


def test_write_report_computes_a_umap_of_each_embedding(tmp_path):
    """UMAPs are also drawn of a collapsed z_c, in which all cells are equal."""
    report = make_report(n_cells=40)
    report.cells.obsm["X_scbd_c"][:] = 1
    assert len(write_and_parse(report, tmp_path).of("img")) == 8


def test_write_report_leaves_matplotlib_unchanged(tmp_path):
    plt.close("all")
    open_before = plt.figure().number
    before = plt.rcParams.copy()
    write_report(make_report(), tmp_path / "report.html")
    assert plt.get_fignums() == [open_before] and plt.rcParams == before
    with pytest.raises(KeyError):
        write_report(make_report(embeddings={"z_c": "X_scbd_c", "gone": "X_gone"}), tmp_path / "other.html")
    assert plt.get_fignums() == [open_before] and plt.rcParams == before
    plt.close("all")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
