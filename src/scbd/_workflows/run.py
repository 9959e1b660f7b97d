"""The main analysis, ``scbd.run``: train a model, embed all cells, name the best embedding, and write the results."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scbd._shared.files import (
    check_output_directory,
    hold_directory,
    save_figure,
    write_atomically,
    write_table,
    write_text,
)
from scbd._shared.keys import (
    BEST_KEY,
    CONTENT_KEY,
    FEATURE_PCA_KEY,
    NOT_IN_SPLIT,
    PIXEL_PCA_KEY,
    SPLIT_ARGUMENTS,
    SPLIT_KEY,
    STYLE_KEY,
)
from scbd._shared.labels import (
    CROSS_SEPARATOR,
    as_columns,
    check_control_labels,
    find_likely_controls,
    get_obs_column,
    label_text,
    label_values,
)
from scbd._workflows.candidates import (
    CellLabels,
    add_standardised,
    choose_reference_cells,
    compute_corrected_inputs,
    standardize_over_training_cells,
)
from scbd._workflows.compare import evaluate
from scbd._workflows.inspection import find_place_columns
from scbd._workflows.report import Report, write_report
from scbd._workflows.report_contents import FILES, collect_report
from scbd._workflows.training_runs import (
    check_repeatable,
    describe_training_data,
    locate_inputs,
    log_level,
    merge_setup_arguments,
    recorded_warnings,
    seed_everything,
    train_or_load,
)
from scbd._workflows.verdict import judge_embeddings
from scbd.baselines._classifiers import ERMModel
from scbd.baselines._pixel_pca import pixel_pca
from scbd.data._input_location import InputLocation
from scbd.data._splits import Split, hold_out_perturbations, stratified_split
from scbd.data._storable import as_storable, stored_names
from scbd.metrics._arguments import get_label_texts
from scbd.model._presets import with_preset
from scbd.model._scbd import SCBDModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

logger = logging.getLogger(__name__)

# obsm keys of the two embeddings of the model, z_c (content) and z_s (style)
_BLOCKS = {"z_c": CONTENT_KEY, "z_s": STYLE_KEY}
# Files from which an interrupted run can be continued.
_STATE_FILES = ("settings.json", "checkpoints/last.ckpt")
# All files and folders that a run writes, except an empty folder of checkpoints. A new run raises an error if its
# directory contains one of them.
_OUTPUTS = {name for names in FILES for name in names.split(", ")} - {"checkpoints/"} | set(_STATE_FILES)
# _TEST_FRACTION: fraction of the cells that are test cells, and also fraction of the perturbations that are held out
# with all of their cells. _MIN_PERTURBATIONS_TO_HOLD_OUT: minimum number of perturbations for which whole perturbations
# are held out.
_TEST_FRACTION, _MIN_PERTURBATIONS_TO_HOLD_OUT = 0.2, 30
# _N_COMPONENTS: number of principal components of features. _N_PCA_CELLS: maximum number of cells to which the PCA is
# fitted, and also number of cells that the PCA transforms at a time.
_N_COMPONENTS, _N_PCA_CELLS = 50, 20_000
# parts of AnnData that hold arrays and tables by name
_SLOTS = ("layers", "obsm", "varm", "obsp", "varp")
# Arguments of SCBDModel that are also arguments of ERMModel, the plain classifier of the perturbation.
_SHARED_WITH_ERM = (
    *("encoder", "image_size", "intensity", "standardize", "standardize_by", "augment"),
    *("whitening", "whitening_kwargs", "norm"),
)
# Maximum number of values (cells × features) of a data set whose features are used in full when embeddings are
# compared. Larger data sets are represented by their principal components. The limit corresponds to 200 MB in float32,
# and classifiers on the features (probes) need several times that memory.
_MAX_PROBED_VALUES = 50_000_000


def run(
    adata: AnnData,
    *,
    y_key: str | Sequence[str],
    e_key: str | Sequence[str],
    out: str | os.PathLike[str],
    mechanism_key: str | Sequence[str] | None = None,
    guide_key: str | None = None,
    erm: bool | None = None,
    setup_kwargs: Mapping[str, Any] | None = None,
    model_kwargs: dict[str, Any] | None = None,
    train_kwargs: dict[str, Any] | None = None,
    resume: bool = False,
    seed: int = 0,
) -> pd.DataFrame:
    """Train SCBD, embed all cells, name the best of several embeddings, and write all results to a directory.

    **Held-out cells.** By default, a fifth of the cells is held out for testing, drawn at random from each perturbation
    in each environment. With 30 or more perturbations, a fifth of these (never the controls) is also held out with all
    of their cells. A tenth of the remaining cells is used for validation, except for features with the encoder
    ``"linear"``. The scores below are computed on test and validation cells together, the held-out cells. To choose the
    split, give ``split`` or ``train_size`` in ``train_kwargs``. With ``train_size=1.0``, all cells are trained on, and
    no embedding is called best.

    **The verdict** compares these embeddings, the simplest first:

    - the inputs (features, or principal components of images);
    - the inputs standardised per environment;
    - both of these sphered on the controls, if at least 16 controls are trained on;
    - the standardised inputs whitened within perturbations (:func:`scbd.corrections.wccn`);
    - z_c, and z_c standardised per environment;
    - the embedding of a plain classifier of the perturbation (ERM), if ``erm`` is true.

    Held-out cells of each perturbation in each environment are averaged into profiles. The score is the average
    precision with which profiles retrieve their replicates: profiles of the same perturbation in *other* environments
    (:func:`scbd.metrics.replicate_retrieval` with ``against="perturbations"``). If ``position_key`` is given, and
    enough perturbations have replicates at other positions of the plate, only replicates at other positions count.

    The embedding with the highest score is best. Embeddings within 0.01 of the highest score count as equal, and the
    simplest of them is called best. If ten or more perturbations were held out with all of their cells, the score is
    the mean over these perturbations only, because an encoder has an advantage on perturbations that it was trained on.

    If too few perturbations repeat across environments, profiles must retrieve other profiles instead of such
    replicates. The first of these tasks that the data allow is used, and the verdict names it:

    1. retrieve other perturbations with the same value of ``mechanism_key``;
    2. retrieve the same perturbation with another value of ``guide_key``;
    3. retrieve the same perturbation in other plates, batches or wells (columns of ``obs`` with such names);
    4. if none of this is possible, the perturbation of single cells is predicted by a linear classifier (probe).

    The verdict also states how well the environment can be predicted among controls (or within perturbations), by the
    best of three kinds of probes: linear, quadratic and nearest neighbours.

    **Files.** ``model/`` and ``settings.json`` are written as soon as the model is trained, ``cells.h5ad`` as soon as
    the cells are embedded, and all other files at the end. A score that cannot be computed, for example because each
    perturbation has a single cell, is missing from the tables, and a warning states why.

    - ``report.html``: one page with the verdict, pictures and settings;
    - ``verdict.txt`` and ``verdict.csv``: the verdict, and the scores behind it;
    - ``replicates.csv``: average precision of each perturbation, one column per embedding;
    - ``metrics.csv``: the returned table, with scores of probes of single cells;
    - ``cells.h5ad``: all of ``adata`` but the images or features that the model takes, with ``obsm["X_scbd_c"]``
      (z_c), ``obsm["X_scbd_s"]`` (z_s, if the model has one), ``obsm["X_pixel_pca"]`` or ``obsm["X_feature_pca"]``
      (principal components of the images or features), ``obsm["X_scbd_best"]`` (the best embedding) and
      ``obs["scbd_split"]`` (``"train"``, ``"validation"`` or ``"test"``);
    - ``history.csv``, ``training_curves.png`` and ``umap.png``: losses by step, and UMAPs of the embeddings;
    - ``checkpoints/``: states from which an interrupted run continues. It can be deleted after the run.

    Parameters
    ----------
    adata
        Cells, see :meth:`scbd.SCBDModel.setup_anndata`.
    y_key, e_key
        Column or columns of ``obs`` with the perturbation, and with the environment.
    out
        Directory of the results. It is created if it is missing.
    mechanism_key
        Column or columns of ``obs`` with a label that several perturbations share, such as the mechanism of action. If
        the order of embeddings in retrieving replicates is uncertain, retrieval of the mechanism decides between them.
    guide_key
        Column of ``obs`` with the reagent of each cell, such as the guide RNA.
    erm
        If true, also train a plain classifier on the same inputs and cells (:class:`scbd.baselines.ERMModel`), with the
        same number of steps and the same batch size, to be compared with z_c. Default: true for features, where it
        takes seconds; false for images, where it takes about as long as the training of z_c.
    setup_kwargs
        Further arguments of ``setup_anndata``, such as the location of images or features, and the controls.
    model_kwargs, train_kwargs
        Arguments of :class:`scbd.SCBDModel`, such as ``{"preset": "domain_generalization"}``, and of its ``train``.
    resume
        Continue a run in ``out`` that was interrupted or failed. With the same arguments, only the missing steps are
        trained.
    seed
        Seed of weights, split, batches, probes and UMAPs.

    Returns
    -------
    Table of :func:`scbd.evaluate`, with scores of linear probes that predict perturbation and environment from z_c,
    z_s, the inputs, the inputs standardised per environment, and the standardised inputs whitened within perturbations.
    Images, and features with more than 50 million values, are represented by 50 principal components.
    ``attrs["verdict"]`` of the table is the text of ``verdict.txt``, and ``attrs["scores"]`` the table of
    ``verdict.csv``.

    Raises
    ------
    FileExistsError
        If ``out`` contains a run and ``resume`` is false; if ``out`` contains a ``cells.h5ad`` that does not belong to
        a run; or if ``out`` is a file.
    BlockingIOError
        If another run is writing to ``out``.
    PermissionError
        If ``out`` is not writable.
    KeyError, TypeError, ValueError
        If ``adata`` or a setting cannot be used for training, or if an entry of ``adata`` cannot be written to a file.
        These errors are raised before anything is written.

    Examples
    --------
    >>> model_kwargs, train_kwargs = {"encoder": "small"}, {"max_steps": 2000}
    >>> report = scbd.run(
    ...     adata, y_key="gene", e_key="well", out="results", model_kwargs=model_kwargs, train_kwargs=train_kwargs
    ... )  # doctest: +SKIP
    """
    out = check_output_directory(out)
    with hold_directory(out):
        _check_holds_no_other_run(out, resume=resume)
        setup = merge_setup_arguments(setup_kwargs, y_key=y_key, e_key=as_columns(e_key))
        model_kwargs, training = with_preset(model_kwargs or {}), train_kwargs or {}
        check_repeatable({}, training, ())
        how: dict[str, Any] = {"mechanism_key": mechanism_key, "guide_key": guide_key, "erm": erm, "resume": resume}
        return _run_in_directory(adata, setup, model_kwargs, training, out, seed=seed, **how)


def _run_in_directory(
    adata: AnnData,
    setup: Mapping[str, Any],
    model_kwargs: dict[str, Any],
    training: dict[str, Any],
    out: Path,
    *,
    mechanism_key: str | Sequence[str] | None,
    guide_key: str | None,
    erm: bool | None,
    resume: bool,
    seed: int,
) -> pd.DataFrame:
    """Carry out the analysis of :func:`run` in the directory ``out``, to which nothing else writes.

    Parameters
    ----------
    adata
        Cells.
    setup
        Arguments of ``setup_anndata``; ``e_key`` is a list of columns.
    model_kwargs
        Arguments of :class:`scbd.SCBDModel`, with those of the preset.
    training
        Arguments of its ``train``.
    out, mechanism_key, guide_key, erm, resume, seed
        See :func:`run`.
    """
    y_key, columns = setup["y_key"], setup["e_key"]
    seed_everything(seed)
    with recorded_warnings() as messages:
        SCBDModel.setup_anndata(adata, **setup)
        model = SCBDModel(adata, **model_kwargs)
    inputs = locate_inputs(adata, setup)
    for key in (mechanism_key, guide_key):
        for column in () if key is None else as_columns(key):
            get_obs_column(adata.obs, column)
    data = describe_training_data(adata, setup, training.get("split"))
    _check_writable(_without_inputs(adata, inputs))
    asked = {"data": data, "asked": {"model": model_kwargs, "training": training}, "seed": seed}
    if all(training.get(name) is None for name in SPLIT_ARGUMENTS):
        training = {**training, "split": _default_split(adata, setup, model._train_size, seed)}
    model = train_or_load(model, asked, out, resume=resume, **{"seed": seed} | training)
    settings = json.loads((out / "settings.json").read_text(encoding="utf-8"))
    messages += settings.get("warnings", [])

    # Embeddings that an earlier run has stored in adata are removed. Otherwise, they could be mistaken for results of
    # this run, which may compute fewer embeddings.
    for key in (*_BLOCKS.values(), BEST_KEY):
        adata.obsm.pop(key, None)
    blocks = {name: key for name, key in _BLOCKS.items() if name == "z_c" or model.module.style is not None}
    for name, key in blocks.items():
        adata.obsm[key] = model.get_latent_representation(block=name[-1])
    pca_name, pca_key = ("pixel PCA", PIXEL_PCA_KEY) if inputs.image_key else ("feature PCA", FEATURE_PCA_KEY)
    adata.obsm[pca_key] = compute_input_pca(adata, inputs, seed)
    # Users need this column to exclude training cells from scores, because scores on training cells are too high.
    part = np.full(adata.n_obs, NOT_IN_SPLIT, dtype=object)
    for name in ("train", "validation", "test"):
        part[getattr(model, f"{name}_indices")] = name
    adata.obs[SPLIT_KEY] = pd.Categorical(part)
    environments = [columns] if model.module.covariates is None else [(column,) for column in columns]
    crosses = {CROSS_SEPARATOR.join(several): several for several in (as_columns(y_key), *environments)}
    for label, several in crosses.items():
        # If a label (perturbation or environment) is given as several columns, these are combined into a new column of
        # obs. A single column is in obs already.
        if len(several) > 1:
            adata.obs[label] = label_values(adata.obs, several)
    y_name, *e_names = crosses
    labels = _cell_labels(adata.obs, model, y_name, e_names, setup, mechanism_key, guide_key)
    _write_cells(adata, inputs, out)

    reference = choose_reference_cells(labels, model_kwargs.get("standardize_by", "auto"))
    input_name, values, source = pca_name, adata.obsm[pca_key], inputs.source(adata)
    if inputs.image_key is None and source.shape[0] * source.shape[1] <= _MAX_PROBED_VALUES:
        features = np.asarray(source.read(slice(0, source.shape[0])))
        input_name, values = "features", standardize_over_training_cells(features, labels.is_train)
    candidates = compute_corrected_inputs(input_name, values, labels, reference)
    probed = {name: z for name, z in candidates.items() if not name.endswith("sphered")}
    candidates["z_c"] = adata.obsm[CONTENT_KEY]
    add_standardised(candidates, "z_c", labels, reference)
    if inputs.image_key is None if erm is None else erm:
        used = model.training_settings_
        length = {"max_steps": used["steps"], "max_epochs": None, "batch_size": used["batch_size"], "lr": used["lr"]}
        candidates["ERM"] = _erm_embedding(adata, setup, model_kwargs, out, {"seed": seed, **training, **length})
    with recorded_warnings() as of_scores:
        judged = judge_embeddings(labels, candidates, seed=seed)
        table = evaluate(
            adata,
            [y_name, *e_names],
            embeddings={name: adata.obsm[key] for name, key in blocks.items()} | probed,
            train_indices=model.train_indices,
            seed=seed,
        )
    messages += of_scores
    if judged.best is not None:
        adata.obsm[BEST_KEY] = np.asarray(candidates[judged.best], dtype=np.float32)
        _write_cells(adata, inputs, out)
    messages = list(dict.fromkeys(messages))
    text = "\n".join([judged.text, *(f"- {note}" for note in (*judged.notes, *messages))])
    write_table(table, out / "metrics.csv")
    write_table(pd.concat(model.history.values(), axis=1), out / "history.csv", index=True)
    write_table(judged.scores, out / "verdict.csv")
    write_table(judged.replicates.rename_axis("label"), out / "replicates.csv", index=True)
    write_text(text + "\n", out / "verdict.txt")
    if judged.best not in (None, "z_c"):
        blocks = {f"best: {judged.best}": BEST_KEY, **blocks}
    report = collect_report(
        adata,
        model,
        labels,
        judged,
        inputs=inputs,
        input_embedding=(pca_name, pca_key),
        reference=reference,
        settings=settings,
        warnings=messages,
        out=out,
    )
    write_report(report, out / "report.html")
    _write_pictures(adata, report, [y_name, *e_names], blocks, out, seed)
    table.attrs |= {"verdict": text, "scores": judged.scores}
    return table


def _check_holds_no_other_run(out: Path, *, resume: bool) -> None:
    """Raise ``FileExistsError`` if a run would replace files in the directory ``out`` that it should not replace.

    These are the files of an earlier run if ``resume`` is false, and a ``cells.h5ad`` that does not belong to a run.
    """
    if not resume and any((out / name).exists() for name in _OUTPUTS):
        msg = f"{out} already holds files of a run: choose another directory, or go on with that run (resume=True)."
        raise FileExistsError(msg)
    if (out / "cells.h5ad").exists() and not any((out / name).exists() for name in _STATE_FILES):
        msg = f"{out}/cells.h5ad is of no run that could go on, and would be written over: choose another directory."
        raise FileExistsError(msg)


def _cell_labels(
    obs: pd.DataFrame,
    model: SCBDModel,
    y_name: str,
    e_names: Sequence[str],
    setup: Mapping[str, Any],
    mechanism_key: str | Sequence[str] | None,
    guide_key: str | None,
) -> CellLabels:
    """Collect all labels of the cells that batch corrections and the verdict need, from columns of ``obs``.

    Parameters
    ----------
    obs
        Table of the cells.
    model
        The trained model, which specifies the training cells.
    y_name, e_names
        Columns of ``obs`` with the perturbation, and with each environment label.
    setup
        Arguments of ``setup_anndata`` by name.
    mechanism_key, guide_key
        See :func:`run`.
    """

    def texts(columns: str | Sequence[str]) -> dict[str, np.ndarray]:
        """Return a mapping from each column to its labels as text, one per cell; a missing label becomes ""."""
        named = {column: label_values(obs, column, allow_missing=True) for column in as_columns(columns)}
        return {
            column: np.array([*map(label_text, values.cat.categories), ""], dtype=object)[values.cat.codes]
            for column, values in named.items()
        }

    control, position_key = setup.get("control"), setup.get("position_key")
    (y,) = texts(y_name).values()
    used = {
        y_name,
        *e_names,
        *as_columns(setup["y_key"]),
        *as_columns(setup["e_key"]),
        *as_columns(position_key or y_name),
    }
    places = [column for column in find_place_columns(obs) if column not in used and obs[column].notna().all()]
    return CellLabels(
        y_name=y_name,
        y=y,
        environments=texts(e_names),
        is_train=np.isin(np.arange(len(obs)), model.train_indices),
        is_control=np.isin(y, [] if control is None else check_control_labels(control, pd.unique(y), y_name)),
        position=None if position_key is None else label_values(obs, position_key).astype(str).to_numpy(),
        mechanisms=texts(mechanism_key) if mechanism_key else None,
        guides=texts(guide_key) if guide_key else None,
        places=texts(places) if places else None,
    )


def _erm_embedding(
    adata: AnnData, setup: Mapping[str, Any], model: Mapping[str, Any], out: Path, training: Mapping[str, Any]
) -> np.ndarray:
    """Train a plain classifier of the perturbation (ERM), and return its embedding of all cells.

    The classifier has the same inputs and the same split as the SCBD model, and is trained for the same number of steps
    with the same batch size and learning rate. Settings that both models have are equal, too.
    """
    # Warnings are hidden, because the user has already seen them when the SCBD model was trained on these cells.
    with warnings.catch_warnings(), log_level("scbd", logging.ERROR):
        warnings.simplefilter("ignore")
        ERMModel.setup_anndata(adata, **setup)
        erm = ERMModel(adata, **{name: value for name, value in model.items() if name in _SHARED_WITH_ERM})
        erm.train(**{**training, "checkpoint_dir": out / "checkpoints" / "erm", "resume": True})
        return erm.get_latent_representation()


def _default_split(adata: AnnData, setup: Mapping[str, Any], train_size: float, seed: int) -> Split:
    """Split cells at random into training, validation and test cells.

    Test cells are a fifth of the cells of each perturbation in each environment. With 30 or more perturbations, all
    cells of a fifth of the perturbations are test cells, too. Of the cells that are not test cells, the fraction
    ``train_size`` are training cells, and the rest are validation cells.

    Parameters
    ----------
    adata
        Cells.
    setup
        Arguments of ``setup_anndata`` by name. Controls always have training cells. If no ``control`` is given,
        perturbations with a usual name of controls, such as DMSO, count as controls.
    train_size
        Fraction of the cells outside the test cells that are training cells.
    seed
        Seed of the split.
    """
    names, control = get_label_texts(adata, setup["y_key"]), setup.get("control")
    each = pd.unique(names)
    kept = find_likely_controls(each) if control is None else check_control_labels(control, each, setup["y_key"])
    rows, unseen = np.arange(adata.n_obs), np.empty(0, dtype=np.int64)
    if len(each) - len(kept) >= _MIN_PERTURBATIONS_TO_HOLD_OUT:
        apart = hold_out_perturbations(names, share=_TEST_FRACTION, validation_share=0, keep=kept, seed=seed)
        rows, unseen = apart.train, apart.test
    trained, validated = ((1 - _TEST_FRACTION) * fraction for fraction in (train_size, 1 - train_size))
    strata = [names, get_label_texts(adata, setup["e_key"])]
    inside = stratified_split(strata, train_size=trained, validation_size=validated, seed=seed, rows=rows)
    return Split(inside.train, inside.validation, np.concatenate([inside.test, unseen]))


def compute_input_pca(adata: AnnData, inputs: InputLocation, seed: int) -> np.ndarray:
    """Compute principal components of the inputs: the pixels of images, or features scaled to variance 1.

    The PCA of features is fitted to up to 20,000 randomly drawn cells, and applied to all cells.

    Returns
    -------
    Principal components of all cells, float32 ``(N, 50)``; fewer than 50 if there are fewer features or cells.
    """
    if inputs.image_key is not None:
        return pixel_pca(adata, image_key=inputs.image_key, channels=inputs.channels, seed=seed)
    from sklearn.decomposition import PCA
    from sklearn.preprocessing import StandardScaler

    source = inputs.source(adata)
    scaler, n = StandardScaler(), source.shape[0]
    rows = np.sort(np.random.default_rng(seed).permutation(n)[:_N_PCA_CELLS])
    sample = scaler.fit_transform(source.read(rows))
    pca = PCA(min(_N_COMPONENTS, *sample.shape), svd_solver="randomized", random_state=seed).fit(sample)
    parts = (slice(start, start + _N_PCA_CELLS) for start in range(0, n, _N_PCA_CELLS))
    return np.concatenate([pca.transform(scaler.transform(source.read(part))) for part in parts]).astype(np.float32)


def _write_pictures(
    adata: AnnData, report: Report, labels: Sequence[str], blocks: Mapping[str, str], out: Path, seed: int
) -> None:
    """Write the pictures of the run: ``training_curves.png``, and ``umap.png`` with UMAPs of the embeddings."""
    from scbd import pl

    save_figure(pl.history(report.history, ceiling=report.ceiling)[0].figure, out / "training_curves.png")
    axes = pl.umap_blocks(adata, labels, blocks=blocks, control=report.controls, seed=seed)
    save_figure(axes[0, 0].figure, out / "umap.png")


def _write_cells(adata: AnnData, inputs: InputLocation, out: Path) -> None:
    """Write ``cells.h5ad``: the cells with their embeddings, without the images or features."""
    with write_atomically(out / "cells.h5ad") as partial:
        _without_inputs(adata, inputs).write_h5ad(partial)


def _without_inputs(adata: AnnData, inputs: InputLocation) -> AnnData:
    """Return a table of the cells that can be written to an ``.h5ad`` file, without the images or features.

    Entries that scvi-tools adds to ``uns`` are removed, too. Columns of types that cannot be written are converted.
    The arrays are those of ``adata``, not copies.
    """
    from anndata import AnnData

    inside = {"layers": inputs.layer, "obsm": inputs.image_key or inputs.obsm_key}
    # since AnnData 0.13, layers hold X under the key None
    parts: dict[str, Any] = {
        slot: {key: value for key, value in getattr(adata, slot).items() if key is not None and key != inside.get(slot)}
        for slot in _SLOTS
    }
    parts["uns"] = {key: value for key, value in adata.uns.items() if not str(key).startswith("_scvi")}
    parts = {slot: _with_storable_names(entries, slot) for slot, entries in parts.items()}
    if (raw := adata.raw) is not None:
        varm = _with_storable_names(dict(raw.varm), "raw.varm")
        parts["raw"] = {"X": raw.X, "var": as_storable(raw.var, "raw.var"), "varm": varm}
    parts["X"] = None if inputs.layer == "X" else adata.X
    return AnnData(obs=as_storable(adata.obs), var=as_storable(adata.var, "var"), **parts)


def _with_storable_names(value: Any, where: str) -> Any:
    """Rename keys of a dictionary, and columns of a table, that cannot be written to an ``.h5ad`` file.

    A key ``a/b``, for example, becomes ``a_b``, and a log line states the new name. Dictionaries and tables inside a
    dictionary are treated in the same way. All other values are returned unmodified. ``where`` is the name of the value
    in messages, such as ``"uns"``.
    """
    if isinstance(value, pd.DataFrame):
        return as_storable(value, where)
    if not isinstance(value, Mapping):
        return value
    others = stored_names([key for key in value if isinstance(key, str)])
    for key, other in others.items():
        logger.info("%s[%r] is stored as %r, because a file cannot hold its name.", where, key, other)
    return {others.get(key, key): _with_storable_names(entry, f"{where}[{key!r}]") for key, entry in value.items()}


def _check_writable(cells: AnnData) -> None:
    """Raise ``ValueError`` if an entry of ``uns``, ``obsm``, ``layers`` etc. cannot be written to an ``.h5ad`` file.

    As a test, entries are written to an HDF5 file in memory. Data frames are not tested, because :func:`as_storable`
    has converted them to types that can be written.
    """
    import h5py
    from anndata.io import write_elem

    # Only the first row of each array is written, because it is enough to test the type of the array.
    parts = [("uns", key, value) for key, value in cells.uns.items()]
    parts += [
        (slot, key, value[:1])
        for slot in _SLOTS
        for key, value in getattr(cells, slot).items()
        if key is not None and not isinstance(value, pd.DataFrame)
    ]
    parts += [] if cells.raw is None else [("raw.varm", key, value[:1]) for key, value in cells.raw.varm.items()]
    with h5py.File("cells.h5ad", "w", driver="core", backing_store=False) as file:
        for number, (slot, key, value) in enumerate(parts):
            try:
                write_elem(file, str(number), {key: value})
            except Exception as error:
                msg = (
                    f"{slot}[{key!r}] ({type(value).__name__}) cannot be written to cells.h5ad: remove it, with "
                    f"del adata.{slot}[{key!r}]."
                )
                raise ValueError(msg) from error
