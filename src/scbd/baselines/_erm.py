"""Empirical risk minimisation: a classifier of y that knows nothing of e (Vapnik, 1995)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scbd.baselines._classifier import ClassifierModel

if TYPE_CHECKING:
    from anndata import AnnData
    from torch import nn


class ERMModel(ClassifierModel):
    """A plain classifier of the perturbation, the baseline of domain generalisation.

    Its embedding, ``get_latent_representation()``, is what the encoder gives to the linear head.

    Parameters
    ----------
    adata
        Cells that :meth:`setup_anndata` was called on.
    encoder
        See :class:`scbd.SCBDModel`.
    registry
        Used by :meth:`load` for a model without data.
    **preprocess
        Of images ``image_size`` (pixels a side), ``intensity`` (pixel transform), ``standardize`` (channels to
        mean 0 and variance 1), ``augment`` (random flips and right-angle rotations), as in
        :class:`scbd.nn.Preprocess`, and ``norm`` (kind of normalisation layers); of features
        ``standardize``, ``clip`` (scaled values are cut off there), ``whitening`` and ``whitening_kwargs``, as in
        :class:`scbd.SCBDModel`.

    Examples
    --------
    >>> scbd.baselines.ERMModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.baselines.ERMModel(adata, encoder="small")
    >>> model.train(max_steps=2000)
    >>> model.predict().shape
    (240,)
    """

    def __init__(
        self,
        adata: AnnData | None = None,
        encoder: str | nn.Module = "auto",
        registry: dict[str, Any] | None = None,
        **preprocess: Any,
    ) -> None:
        super().__init__(adata, registry)
        self.init_params_ = self._get_init_params(locals())
        self._set_up(encoder, preprocess)
