"""The model of the paper, :class:`SCBDModel`, with the interface of scvi-tools."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from scbd._shared.keys import COVARIATE_REGISTRY, Y_REGISTRY
from scbd.model._arguments import REPLACEMENTS, check_argument_names, keyword_names
from scbd.model._base import ImageModel, describe_n_parameters, encoder_name
from scbd.model._decode import DecodeMixin
from scbd.model._design import environment_column_codes
from scbd.model._health import advice_on_collapse, means_differ, measure_health
from scbd.model._objective import Invariance, SCBDModule, StyleTarget
from scbd.model._training_cells import check_positives_in_other_environments
from scbd.nn._groups import Groups

if TYPE_CHECKING:
    from anndata import AnnData
    from torch import nn

    from scbd._shared.checks import ImageSize
    from scbd.data._loading import ImageDataModule
    from scbd.model._interfaces import Alpha
    from scbd.model._reference_cells import StandardizeBy

# set_size="auto": number of perturbations from which on cells are averaged in sets, and cells per set; among that many
# perturbations, a single cell rarely shows which one it has
_MIN_PERTURBATIONS_FOR_SETS, _DEFAULT_SET_SIZE = 30, 4
# number of cells used to test whether perturbation means differ, before a warning is raised
_MEANS_TEST_CELLS = 2_048
# further keyword arguments with their defaults: of the preprocessing, of the transform of features, of the module
_PREPARATION: dict[str, Any] = {"intensity": "auto", "standardize": True, "clip": 20.0}
_TRANSFORM: dict[str, Any] = {"whitening": "auto", "whitening_kwargs": None}
_MODULE: dict[str, Any] = {"set_size": "auto", "norm": "batch", "positives": "all", "include_self": False}


class SCBDModel(DecodeMixin, ImageModel):
    r"""Supervised Contrastive Block Disentanglement (Makino et al., 2025).

    The model learns two embeddings from images of cells, or from features of cells or wells. :math:`z_c` is clustered
    by the perturbation ``y`` and invariant to the environment ``e``. :math:`z_s` is clustered by the environment.

    z_c can be made invariant to several environments per cell, such as plate and position, and to numbers, such as the
    time of imaging (see ``e_columns`` and ``continuous_covariate_keys`` of :meth:`setup_anndata`).

    Parameters
    ----------
    adata
        Table of cells that was registered with :meth:`setup_anndata`.
    encoder
        Name of the encoder, or any module that maps inputs to vectors:

        - for images, ``"resnet18"``, ``"resnet50"``, ``"densenet121"`` or ``"small"`` (for tiny images and quick runs);
        - for features, ``"linear"``, a linear map that starts as the identity, or ``"mlp"``.

        ``"auto"`` stands for ``"resnet18"`` for images if the machine had an accelerator when :meth:`setup_anndata` was
        called, and otherwise for ``"small"``. For features, it stands for ``"mlp"`` if there are at least ten rows per
        feature, and otherwise for ``"linear"``.
    n_latent
        Dimension of both embeddings. Default: 64. The default for the encoder ``"linear"`` is the number of features,
        but at most 300 if features are whitened. The paper uses 64 for batch correction and 128 for domain
        generalisation.
    alpha
        Weight of the invariance loss, which makes z_c independent of e. With 0, z_c is not made invariant. With too
        large a weight, z_c does not learn the perturbation. The scale of alpha depends on ``invariance``. With
        ``"auto"``, which requires ``invariance="variance"``, alpha is adapted during training, see
        :class:`scbd.model.AutoAlpha`.
    style_target
        Labels by which z_s is clustered. ``"e"`` stands for the environment; if there are several columns of
        environments, the loss is averaged over them. ``"ye"`` stands for the combination of perturbation and
        environment (domain generalisation). With `None`, the model has no z_s, as in the paper's ablation.
    invariance
        Form of the invariance loss. ``"variance"`` is the variance that the environment explains among cells of the
        same perturbation, at every stage of the encoder; alpha is then in nats per standard error of this variance, see
        :func:`scbd.nn.invariance_statistic`. The other forms are those of :func:`scbd.nn.invariance_loss`.

        The published method corresponds to
        ``invariance="listing", smoothing=0, set_size=1, include_self=True, standardize_by=None, augment=False``,
        with alpha 1 (34 wells) or 192 (two balanced environments) and a constant learning rate.
    smoothing
        Label smoothing of the supervised loss of z_c: probability of the target that is distributed over all cells.
        Cells that do not show an effect of their perturbation then need not be separated from other cells. See
        :func:`scbd.nn.supervised_contrastive_loss`.
    temperature
        Temperature of the contrastive losses.
    image_size
        Size to which images are resized, in pixels per side, or a pair ``(height, width)`` for images that are not
        square. `None` keeps the stored size. The cost of training is proportional to the area.
    augment
        Whether each training image is flipped and rotated by a multiple of 90 degrees at random. Use `False` if the
        orientation of images has a meaning, as for digits.
    standardize_by
        Reference cells from which the mean and the standard deviation of each environment are estimated. Inputs are
        standardised with them per environment, separately for each channel or feature.

        - ``"controls"``: the controls of the environment.
        - ``"cells"``: all cells of the environment. If environments contain different perturbations, this removes part
          of the effects of perturbations, too.
        - ``"auto"``: the first choice that applies: all cells, if most environments contain the same perturbations;
          controls, if 90 % of the cells lie in environments with four or more controls; all cells, if most environments
          contain dozens of perturbations; otherwise as with `None`.
        - `None`: inputs are standardised over all environments together, as in the published method.

        With ``"auto"``, an environment whose perturbations differ from those of most environments is standardised with
        its controls, whether or not it was seen in training. The residual offset of each environment in z_c is
        estimated in the same way, see :meth:`get_latent_representation`. z_s is computed from inputs that are not
        standardised per environment.
    registry
        Used by :meth:`load` for a model without data.
    **module_kwargs
        Further settings:

        - ``intensity``: transformation of pixel values, see :class:`scbd.nn.Preprocess`.
        - ``standardize`` (`True`): whether each channel, or feature, is centred and scaled to unit deviation.
        - ``clip`` (20): number of standard deviations at which scaled features are clipped.
        - ``whitening``: linear transform of features before each encoder: ``"within"``, ``"controls"``, ``"lda"``,
          ``"plda"`` or `None`, see :class:`scbd.nn.InputTransform`. By default ``"plda"`` before the encoder
          ``"linear"`` and ``"within"`` before ``"mlp"``.
        - ``whitening_kwargs``: further arguments of :class:`scbd.nn.InputTransform`.
        - ``norm``: normalisation layers of the named image encoders, see :func:`scbd.nn.build_encoder`.
        - ``set_size``: number of cells of one perturbation that are averaged into one point before the embedding is
          scaled to unit length. The supervised loss contrasts these points in addition to the single cells, because a
          set of cells may show a weak effect that single cells do not show. The default is 4 if there are at least 30
          perturbations, the encoder is not ``"linear"`` and ``positives`` is ``"all"``, and otherwise 1.
        - ``positives`` (``"all"``): partners of a cell in the supervised loss: all cells of its perturbation, or only
          those in ``"other_environments"``, see :func:`scbd.nn.supervised_contrastive_loss`.
        - ``include_self`` (`False`): whether the denominator of the losses includes the similarity of a cell to itself.
          The paper's formula does not include it, the published code does.

    Raises
    ------
    TypeError
        If an argument does not exist.
    ValueError
        If a value is not valid, or a setting is for the other kind of inputs.

    Examples
    --------
    >>> scbd.SCBDModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.SCBDModel(adata)
    >>> model.train()
    >>> adata.obsm["X_scbd_c"] = model.get_latent_representation(block="c")
    >>> adata.obsm["X_scbd_c"].shape
    (240, 64)
    """

    traits = replace(
        ImageModel.traits,
        side_by_side=True,
        derived_attributes={**ImageModel.traits.derived_attributes, "health_": dict},
    )
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
        check_argument_names(module_kwargs, known, type(self).__name__, REPLACEMENTS["__init__"])
        further |= module_kwargs
        numbers = self._registered(COVARIATE_REGISTRY).get("columns", [])
        if numbers and invariance != "variance":
            msg = (
                f"invariance={invariance!r} takes labels as environments, not numbers ({', '.join(numbers)}): use "
                "invariance='variance', or set up without continuous_covariate_keys."
            )
            raise ValueError(msg)
        encoder = self._encoder(encoder)
        own = {name: further[name] for name in _PREPARATION}
        preprocess = self._make_preprocess(image_size=image_size, augment=augment, standardize_by=standardize_by, **own)
        transform = self._make_transform(encoder, further["whitening"], n_latent, further["whitening_kwargs"])
        if n_latent is None:  # a linear encoder does not change the dimension of its inputs
            n_latent = (preprocess if transform is None else transform).output_shape[0] if encoder == "linear" else 64
        if further["set_size"] == "auto":
            many = len(self._registered(Y_REGISTRY)["categories"]) >= _MIN_PERTURBATIONS_FOR_SETS
            matches_sets = many and encoder != "linear" and further["positives"] == "all"
            further["set_size"] = _DEFAULT_SET_SIZE if matches_sets else 1
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
            covariates=environment_column_codes(self.registry_),
            controls=self._control_codes,
            **{name: further[name] for name in _MODULE},
        )
        self.health_: dict[str, float] = {}
        self.decoder_settings_ = {}

    @property
    def health(self) -> dict[str, float]:
        """Diagnostics of z_c at the end of training; empty before training.

        They are computed on one batch of validation cells, or of training cells if no cells are validated:

        - ``supervised_c``: supervised loss of z_c, in nats, without label smoothing.
        - ``ceiling``: supervised loss of a collapsed embedding, in nats: log(B - 1) for B points, or log B with
          ``include_self=True``.
        - ``learned_c``: normalised supervised information of z_c: 0 for a collapsed embedding, at most 1. Controls are
          excluded if they are known.
        - ``environment_c``: invariance statistic of z_c, in standard errors of a batch. By chance, it is between -2 and
          2. See :func:`scbd.nn.invariance_statistic`.
        - ``spread``: total variance of z_c, from 0 (collapsed) to 1.
        - ``effective_rank``: effective number of dimensions that z_c uses, at most ``n_latent``.
        - ``collapsed``: 1 if z_c is nearly a single point and means of perturbations do not differ more than those of
          permuted labels; otherwise 0.
        - ``final_alpha``: alpha, or the last value of alpha with ``"auto"``.
        """
        return self.health_

    def _before_training(self, y: np.ndarray, e: np.ndarray) -> None:
        """Check that cells have partners if positives lie in other environments, and set the module's known labels.

        Labels that are new since the model was constructed are thereby included.
        """
        if self.module.positives == "other_environments":
            check_positives_in_other_environments(y, e, self._registered(Y_REGISTRY)["categories"])
        self.module.set_label_codes(environment_column_codes(self.registry_), self._control_codes)

    def _after_training(self, data: ImageDataModule) -> None:
        """Compute :attr:`health` on a batch, and warn if z_c does not carry the perturbation or has overfitted."""
        of_invariance = self._max_invariance_fraction()
        self.health_, warning = measure_health(
            self.module,
            data.example_batch(),
            self._has_different_means,
            lambda: advice_on_collapse(self.module, of_invariance),
        )
        if warning:
            warnings.warn(warning, UserWarning, stacklevel=5)

    def _has_different_means(self) -> bool:
        """Return whether perturbation means of z_c differ more than those of permuted labels.

        Validation cells are used if there are at least two, and training cells otherwise.
        """
        rows = self.validation_indices if len(self.validation_indices) > 1 else self.train_indices
        rows = np.sort(np.random.default_rng(0).permutation(rows)[:_MEANS_TEST_CELLS])
        z = self.get_latent_representation(indices=rows, enable_progress_bar=False)
        return means_differ(torch.from_numpy(z), Groups(torch.from_numpy(self._codes(self.adata, Y_REGISTRY)[rows])))

    def _max_invariance_fraction(self) -> float:
        """Return the maximum fraction, over logged training steps, of the objective that is the invariance loss.

        The invariance loss is weighted by alpha. The fraction is at most 1.
        """
        history = self.history_ or {}
        if "train_loss" not in history:
            return 0.0
        loss, invariance = (history[f"train_{name}"][f"train_{name}"] for name in ("loss", "invariance_c"))
        alpha = history["alpha"]["alpha"] if "alpha" in history else self.module.alpha
        return min(float((alpha * invariance / loss).abs().max()), 1.0)

    def _summary_lines(self) -> list[tuple[str, str]]:
        """Return the lines of ``print(model)`` on blocks and objective, as pairs of name and text."""
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
            ("blocks", f"{blocks}: {networks}, {describe_n_parameters(module)}"),
            (
                "objective",
                f"alpha {alpha} ({module.invariance}), temperature {module.temperature:g}, "
                f"smoothing {module.smoothing:.2g}, {matched} matched{style}",
            ),
        ]

    def _result_lines(self) -> list[tuple[str, str]]:
        """Return the lines of ``print(model)`` on health and decoder, as pairs of name and text."""
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
