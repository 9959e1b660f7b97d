"""SCBD as a method of the JUMP batch-correction benchmark (Arevalo et al., 2024): wells in, corrected wells out.

    python scripts/correct_with_scbd.py INPUT BATCH_KEY LABEL_KEY OUTPUT [--smoketest=1] [--train-share=0.5]

Reads and writes what the other methods of the workflow do: a Parquet table with one row a well, whose ``Metadata_…``
columns describe it and whose other columns are features. Rows stay in their order, and metadata as it is.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import scvi
from anndata import AnnData

from scbd import SCBDModel

CONTROL = "DMSO"
WELL = "Metadata_Well"
TRAINED = "Metadata_ScbdTrained"


def correct_with_scbd(
    dframe_path: str | Path,
    batch_key: str,
    label_key: str,
    output_path: str | Path,
    *,
    smoketest: bool = False,
    train_share: float = 1.0,
    seed: int = 0,
) -> None:
    """Learn z_c of the wells, and write it in place of their features.

    Parameters
    ----------
    dframe_path
        Parquet table of wells.
    batch_key
        Column with the batch, or several with blanks between them, as the workflow's configuration lists them.
    label_key
        Column with the compound, ``Metadata_JCP2022`` in the workflow.
    output_path
        Parquet table to write: ``scbd_0``, ``scbd_1``, …, then the metadata.
    smoketest
        Two steps of training.
    train_share
        Share of the compounds that the model learns from. Below 1, the output has a column ``Metadata_ScbdTrained``
        that says which rows these were, so that scores can be taken from the others.
    seed
        Of the draw of compounds, and of training.
    """
    scvi.settings.seed = seed
    wells, meta = read_wells(dframe_path)
    label = meta[label_key].astype(str).to_numpy()
    has_control = CONTROL in set(label)
    SCBDModel.setup_anndata(
        wells,
        y_key=label_key,
        e_key=batch_key.split(),
        layer="X",
        control=CONTROL if has_control else None,
        position_key=WELL if has_control and WELL in meta else None,
    )
    model = SCBDModel(wells)
    how = {"max_steps": 2} if smoketest else {}
    if train_share < 1:
        trained = drawn(label, train_share, seed)
        wells.obs["split"] = np.where(trained, "train", "test")
        model.train(split="split", enable_progress_bar=False, **how)
        meta[TRAINED] = trained
    else:
        model.train(enable_progress_bar=False, **how)
    z = model.get_latent_representation()
    corrected = pd.DataFrame(z, columns=[f"scbd_{i}" for i in range(z.shape[1])])
    pd.concat([corrected, meta], axis=1).to_parquet(output_path)


def read_wells(path: str | Path) -> tuple[AnnData, pd.DataFrame]:
    """Wells as a table of features, and their metadata with rows numbered from 0."""
    table = pd.read_parquet(path).reset_index(drop=True)
    is_meta = table.columns.str.startswith("Meta")
    meta, features = table.loc[:, is_meta].copy(), table.loc[:, ~is_meta]
    wells = AnnData(
        X=features.to_numpy(np.float32),
        obs=meta.set_index(meta.index.astype(str)),
        var=pd.DataFrame(index=features.columns.astype(str)),
    )
    return wells, meta


def drawn(label: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Rows of the compounds that are learned from; controls always are."""
    compounds = np.setdiff1d(label, [CONTROL])
    n = max(2, round(share * len(compounds)))
    return np.isin(label, [CONTROL, *np.random.default_rng(seed).permutation(compounds)[:n]])


def main(arguments: list[str] | None = None) -> None:
    """From the command line, as the rule calls it."""
    parser = argparse.ArgumentParser(description="SCBD for the JUMP batch-correction benchmark.")
    for name in ("dframe_path", "batch_key", "label_key", "output_path"):
        parser.add_argument(name)
    parser.add_argument("--smoketest", default="0", help="1 or true: two steps of training")
    parser.add_argument("--train-share", type=float, default=1.0, help="share of compounds to learn from")
    given = vars(parser.parse_args(arguments))
    given["smoketest"] = given["smoketest"].lower() in ("1", "true")
    correct_with_scbd(**given)


if __name__ == "__main__":
    main()
