"""What a gene of a simulated screen does to the cells of a well, as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scbd.datasets._simulated_images import PHENOTYPES, draw, photograph
from scbd.datasets._simulated_wells import drawn_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping


def simulated_effect(
    truth: Mapping[str, Any], gene: str, well: str, *, image_size: int, n_cells: int = 512, seed: int = 0
) -> np.ndarray:
    """Mean picture of cells of a gene less that of the same cells without it, in the same well.

    What decoded pictures of a perturbation are compared with, see :meth:`scbd.SCBDModel.traverse`.

    Parameters
    ----------
    truth
        ``uns["truth"]`` of :func:`simulated_screen`.
    gene, well
        Their names there.
    image_size
        Pixels a side, as of the screen.
    n_cells
        To average over.
    seed
        Of these cells, and of their noise.

    Returns
    -------
    float32 ``(4, image_size, image_size)``, in units of the stored images (0 to 255).

    Raises
    ------
    KeyError
        If there is no such gene or well.

    Examples
    --------
    >>> screen = scbd.datasets.simulated_screen(500, image_size=32, n_complexes=3, genes_per_complex=2)
    >>> truth = screen.uns["truth"]
    >>> effect = scbd.datasets.simulated_effect(truth, "GENE1", "P1_W1", image_size=32)
    >>> nothing = scbd.datasets.simulated_effect(truth, "nontargeting", "P1_W1", image_size=32)
    >>> bool(abs(effect).max() > 5), float(abs(nothing).max())
    (True, 0.0)
    """
    for what, name, table in (("gene", gene, truth["phenotypes"]), ("well", well, truth["wells"])):
        if name not in table.index:
            msg = f"There is no {what} {name!r} in this screen: it has {table.index[0]!r} to {table.index[-1]!r}."
            raise KeyError(msg)
    guides = truth["efficacy"]
    efficacy = guides.loc[guides.index.str.startswith(f"{gene}_sg"), "efficacy"].mean()
    effect = truth["phenotypes"].loc[gene] * efficacy * truth["strengths"].loc[well]
    here = truth["wells"].loc[[well] * n_cells]
    means = []
    for mean in (effect.to_numpy(), np.zeros(len(PHENOTYPES))):
        rng = np.random.default_rng(seed)  # the same cells, and the same noise
        shown = mean + rng.normal(size=(n_cells, len(mean))) * np.array(list(PHENOTYPES.values()))
        drawn = draw(rng, drawn_parameters(shown, here["density"].to_numpy()), image_size)
        means.append(photograph(rng, drawn, here, image_size).mean(0, dtype=np.float64))
    return (means[0] - means[1]).astype(np.float32)
