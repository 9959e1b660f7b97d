"""SCBDModel: the two embeddings of the paper, under the scvi-tools contract."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from scbd._anndata import NUMBER_REGISTRY, Y_REGISTRY
from scbd.model._arguments import INSTEAD, check_names, keyword_names
from scbd.model._base import ImageModel, encoder_name, parameters
from scbd.model._cells import check_other_environments
from scbd.model._decode import DecodeMixin
from scbd.model._design import covariates
from scbd.model._health import means_differ, measure, remedy
from scbd.model._objective import Invariance, SCBDModule, StyleTarget
from scbd.nn._contrastive import Groups

if TYPE_CHECKING:
    from anndata import AnnData
    from torch import nn

    from scbd._checks import ImageSize
    from scbd.data._loading import ImageDataModule
    from scbd.model._contract import Alpha
    from scbd.model._environments import StandardizeBy

# perturbations from which cells of images are matched in sets, and cells of a set: among so many, few cells show which
# is theirs
_MANY, _SET_SIZE = 30, 4
# whose means are asked before a warning
_CELLS = 2_048
# further arguments with their defaults: of the preparation of inputs, of what features pass, and of the module
_PREPARATION: dict[str, Any] = {"intensity": "auto", "standardize": True, "clip": 20.0}
_TRANSFORM: dict[str, Any] = {"whitening": "auto", "whitening_kwargs": None}
_MODULE: dict[str, Any] = {"set_size": "auto", "norm": "batch", "positives": "all", "include_self": False}


class SCBDModel(DecodeMixin, ImageModel):
    r"""Supervised Contrastive Block Disentanglement (Makino et al., 2025).

    Learns :math:`z_c`, clustered by the perturbation ``y`` and blind to the environment ``e``, and :math:`z_s`,
    clustered by the environment, from images of cells, or from features of cells or wells. Several columns of
    environment, such as plate and position, stand side by side, and z_c may be kept from numbers, such as the time
    (``e_columns`` and ``continuous_covariate_keys`` of :meth:`setup_anndata`).

    Parameters
    ----------
    adata
        Cells that :meth:`setup_anndata` was called on.
    encoder
        Of images, ``"resnet18"``, ``"resnet50"``, ``"densenet121"`` or ``"small"`` (tiny images, quick runs); of
        features, ``"linear"``, which begins as the identity, or ``"mlp"``; or any module from inputs to features.
        ``"auto"`` is ``"resnet18"`` of images where :meth:`setup_anndata` found an accelerator, else ``"small"``; of
        features ``"mlp"`` where there are ten rows or more for each feature, else ``"linear"``.
    n_latent
        Dimension of both embeddings. By default 64, and for ``"linear"`` 300 at most, or without whitening as many as
        there are features. The paper uses 64 for batch correction, 128 for domain generalisation.
    alpha
        How strongly z_c is made invariant to e. 0 leaves it free; too much keeps it from learning. Each form of
        ``invariance`` has its own scale. ``"auto"``, for ``"variance"``, follows what z_c learns, see
        :class:`scbd.model.AutoAlpha`.
    style_target
        What z_s is clustered by: ``"e"``, each of several columns side by side; or the pair ``"ye"`` of the
        perturbation and their cross (domain generalisation). `None` leaves z_s out: the paper's ablation.
    invariance
        Form of the invariance loss. ``"variance"``: what the environment explains at equal label, at every stage of the
        encoder; alpha is the price of one standard error of it, in nats, see
        :func:`scbd.nn.invariance_statistic`. Or one of :func:`scbd.nn.invariance_loss`. The published method is
        ``invariance="listing", smoothing=0, set_size=1, include_self=True, standardize_by=None, augment=False``, with
        alpha 1 (34 wells) and 192 (two balanced environments), at a rate that does not fall.
    smoothing
        Label smoothing of z_c: the share of a cell's target that goes to all cells, so that cells which show no effect
        of their perturbation need not be forced apart. See :func:`scbd.nn.supervised_contrastive_loss`.
    temperature
        Temperature of the contrastive losses.
    image_size
        Resize images to this many pixels a side while training; a pair ``(height, width)`` if they are not square.
        `None` keeps the stored size. Cost grows with the area.
    augment
        Whether training images are flipped and rotated by right angles at random, each by itself: `False`
        where orientation has a meaning, as that of digits.
    standardize_by
        By which cells the inputs of each environment are standardised, channel by channel or feature by feature:
        ``"controls"``, or all of its ``"cells"``, which takes perturbations out as well where environments hold
        different ones. ``"auto"``: all cells, where most environments hold the same perturbations; else controls, where
        nine tenths of the cells lie in environments with four or more of them; else all cells, where most environments
        hold dozens of perturbations; else, and with `None` (the published form), inputs are standardised over all
        environments together. An environment of other perturbations than most goes by its controls, and so does a new
        one. What is left in z_c is taken out in the same way, see :meth:`get_latent_representation`. z_s sees inputs
        as they are.
    registry
        Used by :meth:`load` for a model without data.
    **module_kwargs
        ``intensity``: how pixel values are transformed, see :class:`scbd.nn.Preprocess`; ``standardize`` (`True`):
        whether channels, or features, are brought to one scale; ``clip`` (20): standard deviations at which scaled
        features are cut off. ``whitening``: what features pass before each encoder, ``"within"``, ``"controls"``,
        ``"lda"``, ``"plda"`` or `None` (by default ``"plda"`` before ``"linear"``, ``"within"`` before ``"mlp"``), with
        ``whitening_kwargs``, see :class:`scbd.nn.InputTransform`. ``norm``: of encoders of images by name, see
        :func:`scbd.nn.build_encoder`. ``set_size``: so many cells of a perturbation are averaged, before the sphere,
        into one point that the supervised loss matches, beside the cells themselves; what single cells do not show,
        sets of weak cells may. By default 4 where there are 30 perturbations or more and the encoder is no linear map,
        else 1. ``positives`` (``"all"``, or those of ``"other_environments"``) and ``include_self`` (`False`, as the
        paper's formula; the published code counts it), see :func:`scbd.nn.supervised_contrastive_loss`.

    Raises
    ------
    TypeError
        If there is no such argument.
    ValueError
        If a value cannot be, or is for inputs of the other kind.

    Examples
    --------
    >>> scbd.SCBDModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.SCBDModel(adata)
    >>> model.train()
    >>> adata.obsm["X_scbd_c"] = model.get_latent_representation(block="c")
    >>> adata.obsm["X_scbd_c"].shape
    (240, 64)
    """

    traits = replace(ImageModel.traits, side_by_side=True, findings={**ImageModel.traits.findings, "health_": dict})
    module: SCBDModule

    def __init__(
        self,
        adata: AnnData | None = None,
        encoder: str | nn.Module = "auto",
        *,
        n_latent: int | None = None,
        alpha: Alpha = "auto",
        style_target: StyleTarget | None = "e",
        invariance: Invariance = "variance",
        smoothing: float = 2 / 3,
        temperature: float = 0.1,
        image_size: ImageSize | None = None,
        augment: bool = True,
        standardize_by: StandardizeBy = "auto",
        registry: dict[str, Any] | None = None,
        **module_kwargs: Any,
    ) -> None:
        super().__init__(adata, registry)
        self.init_params_ = self._get_init_params(locals())
        further = {**_PREPARATION, **_TRANSFORM, **_MODULE}
        known = [*keyword_names(SCBDModel.__init__), *further]
        check_names(module_kwargs, known, type(self).__name__, INSTEAD["__init__"])
        further |= module_kwargs
        numbers = self._registered(NUMBER_REGISTRY).get("columns", [])
        if numbers and invariance != "variance":
            msg = (
                f"invariance={invariance!r} takes labels as environments, not numbers ({', '.join(numbers)}): use "
                "invariance='variance', or set up without continuous_covariate_keys."
            )
            raise ValueError(msg)
        encoder = self._encoder(encoder)
        own = {name: further[name] for name in _PREPARATION}
        preprocess = self._preprocess(image_size=image_size, augment=augment, standardize_by=standardize_by, **own)
        transform = self._transform(encoder, further["whitening"], n_latent, further["whitening_kwargs"])
        if n_latent is None:  # a linear encoder leaves the dimension of its inputs
            n_latent = (preprocess if transform is None else transform).output_shape[0] if encoder == "linear" else 64
        if further["set_size"] == "auto":
            many = len(self._registered(Y_REGISTRY)["categories"]) >= _MANY
            matches_sets = many and encoder != "linear" and further["positives"] == "all"
            further["set_size"] = _SET_SIZE if matches_sets else 1
        self.module = SCBDModule(
            preprocess,
            encoder=encoder,
            transform=transform,
            n_latent=n_latent,
            alpha=alpha,
            temperature=temperature,
            smoothing=smoothing,
            style_target=style_target,
            invariance=invariance,
            covariates=covariates(self.registry_),
            controls=self._control_codes,
            **{name: further[name] for name in _MODULE},
        )
        self.health_: dict[str, float] = {}
        self.decoder_settings_ = {}

    @property
    def health(self) -> dict[str, float]:
        """How alive z_c was at the end of training; empty before.

        ``supervised_c``: its supervised loss; ``ceiling``: that of a collapsed embedding, log B; ``learned_c``: share
        of what the labels say that z_c carries, from 0 (as a single point) to 1, of cells that are no controls where
        these are known; ``environment_c``: by how many standard errors of a batch z_c shows its
        environments, between -2 and 2 by chance, see :func:`scbd.nn.invariance_statistic`; ``spread``: its total
        variance, between 0 (collapsed) and 1; ``effective_rank``: directions in use, of ``n_latent``; ``collapsed``: 1
        if it is nearly a point and means of perturbations differ no more than those of permuted labels, else 0;
        ``final_alpha``: alpha, or where ``"auto"`` ended.
        """
        return self.health_

    def _before_training(self, y: np.ndarray, e: np.ndarray) -> None:
        """See that perturbations have the partners asked for; know the environments."""
        if self.module.positives == "other_environments":
            check_other_environments(y, e, self._registered(Y_REGISTRY)["categories"])
        self.module.set_known(covariates(self.registry_), self._control_codes)

    def _after_training(self, data: ImageDataModule) -> None:
        """Look at z_c on a batch, and warn if it carries nothing."""
        of_invariance = self._share_of_invariance()
        self.health_, warning = measure(
            self.module,
            data.example_batch(),
            self._tells_means,
            lambda: remedy(self.module, of_invariance),
        )
        if warning:
            warnings.warn(warning, UserWarning, stacklevel=5)

    def _tells_means(self) -> bool:
        """Whether z_c tells means of perturbations apart, of validation cells where there are some."""
        rows = self.validation_indices if len(self.validation_indices) > 1 else self.train_indices
        rows = np.sort(np.random.default_rng(0).permutation(rows)[:_CELLS])
        z = self.get_latent_representation(indices=rows, enable_progress_bar=False)
        return means_differ(torch.from_numpy(z), Groups(torch.from_numpy(self._codes(self.adata, Y_REGISTRY)[rows])))

    def _share_of_invariance(self) -> float:
        """The largest share that the invariance loss had of the objective at a training step that was logged."""
        history = self.history_ or {}
        if "train_loss" not in history:
            return 0.0
        loss, invariance = (history[f"train_{name}"][f"train_{name}"] for name in ("loss", "invariance_c"))
        alpha = history["alpha"]["alpha"] if "alpha" in history else self.module.alpha
        return min(float((alpha * invariance / loss).abs().max()), 1.0)

    def _parts(self) -> list[tuple[str, str]]:
        """Blocks and objective, to print."""
        module = self.module
        blocks, style = "z_c alone", ""
        if module.style_target is not None:
            blocks, style = "z_c, z_s", f", z_s clustered by {' × '.join(module.style_target)}"
        alpha = f"{module.alpha:g}" if module.auto_alpha is None else "auto"
        if module.auto_alpha is not None and self.is_trained_:
            alpha = f"auto, {float(module.current_alpha):.2g} in the end"
        matched = "single cells" if module.set_size == 1 else f"cells and sets of {module.set_size}"
        encoder = encoder_name(self._encoder(self.init_params_["non_kwargs"]["encoder"]))
        networks = f"{encoder} → r ({module.content.n_features}) → z ({module.content.n_latent})"
        return [
            ("blocks", f"{blocks}: {networks}, {parameters(module)}"),
            (
                "objective",
                f"alpha {alpha} ({module.invariance}), temperature {module.temperature:g}, "
                f"smoothing {module.smoothing:.2g}, {matched} matched{style}",
            ),
        ]

    def _outcome(self) -> list[tuple[str, str]]:
        """Health and decoder, to print."""
        health, decoder, lines = self.health, self.decoder_settings_, []
        if health:
            state = (
                f"z_c {'COLLAPSED' if health['collapsed'] else 'alive'}: supervised loss {health['supervised_c']:.2f} "
                f"(collapsed: {health['ceiling']:.2f}), spread {health['spread']:.2f}, "
                f"effective rank {health['effective_rank']:.1f}"
            )
            lines.append(("", state))
        if decoder:
            together = "with the encoders" if decoder["joint"] else "on frozen blocks"
            lines.append(("decoder", f"{decoder['likelihood']}, width {decoder['width']}, trained {together}"))
        return lines
