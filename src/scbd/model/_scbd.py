"""SCBDModel: the two embeddings of the paper, under the scvi-tools contract."""

from __future__ import annotations

import logging
import warnings
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from scbd._keys import NUMBER_REGISTRY, Y_REGISTRY
from scbd.model._base import ImageModel
from scbd.model._environments import check_numbers_known, covariates
from scbd.model._health import complaint, environment_left, learned_lately, measure
from scbd.model._module import Invariance, Positives, SCBDModule, StyleTarget
from scbd.model._parts import check_other_environments
from scbd.model._preparation import n_latent_for
from scbd.model._summary import encoder_name, parameters
from scbd.model._traverse import TraverseMixin

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from anndata import AnnData
    from torch import nn

    from scbd._sizes import ImageSize
    from scbd.data import ImageDataModule
    from scbd.model._alpha import Alpha
    from scbd.model._preparation import WhiteningChoice
    from scbd.nn import Intensity, Norm

# trained in bfloat16 they end where float32 does: docs/archive/performance.md
_UNHARMED_BY_BFLOAT16 = ("small", "resnet18")

logger = logging.getLogger(__name__)


class SCBDModel(TraverseMixin, ImageModel):
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
        ``"auto"`` is ``"resnet18"`` of images where :meth:`setup_anndata` found an accelerator (a GPU), else
        ``"small"``, a ninth of the work; of features ``"linear"`` below 10,000 rows, ``"mlp"`` from there on.
    n_latent
        Dimension of both embeddings. By default 64, and for ``"linear"`` 300 at most, or without whitening as many as
        there are features. The paper uses 64 for batch correction, 128 for domain generalisation.
    alpha
        How strongly z_c is made invariant to e. 0 leaves it free; too much keeps it from learning. Each form of
        ``invariance`` has its own scale. ``"auto"``, for ``"variance"``, follows what z_c learns and can tell of
        validation cells: up to 0.05 where environments change what labels look like, up to 0.005 where they shift all
        cells alike. See :class:`scbd.model.AutoAlpha`.
    temperature
        Temperature of the contrastive losses.
    smoothing
        Label smoothing of z_c: the share of a cell's target that goes to all cells, so that cells which show no effect
        of their perturbation need not be forced apart. By default 2/3 for images, 0 for features. See
        :func:`scbd.nn.supervised_contrastive_loss`.
    positives
        Which cells z_c is brought together with: ``"all"`` of the perturbation, or only those in
        ``"other_environments"``. See :func:`scbd.nn.supervised_contrastive_loss`.
    style_target
        What z_s is clustered by: ``"e"``, each of several columns side by side; or the pair ``"ye"`` of the
        perturbation and their cross (domain generalisation). `None` leaves z_s out: the paper's ablation, with half
        of the parameters.
    include_self
        Keep self-similarity in the normaliser, as the published code does; the paper's formula does not.
    invariance
        Form of the invariance loss. ``"variance"``: what the environment explains at equal label, at every stage of the
        encoder; alpha is the price of one standard error of it, in nats, see
        :func:`scbd.nn.invariance_statistic`. Or one of :func:`scbd.nn.invariance_loss`. The published method is
        ``invariance="listing", smoothing=0``, with alpha 1 (34 wells) and 192 (two balanced environments); on coloured
        digits with the small encoder, 10 to 30 is the most that works.
    image_size
        Resize images to this many pixels a side while training; a pair ``(height, width)`` if they are not square.
        `None` keeps the stored size. Cost grows with the area.
    intensity
        How pixel values are transformed: ``"scale"`` divides integers by their largest value, ``"arcsinh"`` compresses
        the long tail of fluorescence counts, ``"none"`` leaves them; ``"auto"`` is ``"arcsinh"`` for uint16,
        ``"scale"`` for uint8, ``"none"`` for floats. See :class:`scbd.nn.Preprocess`.
    augment
        Whether training images are flipped and rotated by right angles at random.
    standardize
        Whether channels, or features, are brought to one scale.
    clip
        Number of standard deviations at which scaled features are clipped, see :class:`scbd.nn.FeatureScaling`.
    whitening
        What features pass before each encoder, learned from training cells, see :class:`scbd.nn.InputTransform`:
        ``"within"``, ``"controls"``, ``"lda"``, ``"plda"`` or `None`; by default ``"plda"`` before ``"linear"``, and
        nothing before others.
    whitening_kwargs
        Its further arguments, such as ``regularization``.
    norm
        What normalises activations of an encoder of images by name, ``"batch"``, ``"instance"`` or ``"group"``, see
        :func:`scbd.nn.build_encoder`.
    registry
        Used by :meth:`load` for a model without data.

    Examples
    --------
    >>> scbd.SCBDModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.SCBDModel(adata)
    >>> model.train()
    >>> adata.obsm["X_scbd_c"] = model.get_latent_representation(block="c")
    >>> adata.obsm["X_scbd_c"].shape
    (240, 64)
    """

    _side_by_side = True
    _of_weights = MappingProxyType({**ImageModel._of_weights, "health_": dict})
    module: SCBDModule

    def __init__(
        self,
        adata: AnnData | None = None,
        encoder: str | nn.Module = "auto",
        n_latent: int | None = None,
        alpha: Alpha = "auto",
        temperature: float = 0.1,
        smoothing: float | None = None,
        positives: Positives = "all",
        style_target: StyleTarget | None = "e",
        include_self: bool = True,
        invariance: Invariance = "variance",
        image_size: ImageSize | None = None,
        intensity: Intensity = "auto",
        standardize: bool = True,
        augment: bool = False,
        clip: float | None = 20.0,
        whitening: WhiteningChoice = "auto",
        whitening_kwargs: Mapping[str, Any] | None = None,
        norm: Norm = "batch",
        registry: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(adata, registry)
        self.init_params_ = self._get_init_params(locals())
        check_numbers_known(self._registered(NUMBER_REGISTRY).get("columns", []), invariance)
        encoder = self._encoder(encoder)
        own = {"image_size": image_size, "intensity": intensity, "standardize": standardize, "augment": augment}
        preprocess = self._preprocess(**own, clip=clip)
        transform = self._transform(encoder, whitening, n_latent, whitening_kwargs)
        self.module = SCBDModule(
            preprocess,
            encoder=encoder,
            transform=transform,
            norm=norm,
            n_latent=n_latent_for(encoder, n_latent, preprocess.output_shape[0], transform),
            alpha=alpha,
            temperature=temperature,
            smoothing=self._smoothing(smoothing),
            positives=positives,
            style_target=style_target,
            include_self=include_self,
            invariance=invariance,
            covariates=covariates(self.registry_),
            controls=self._control_codes,
        )
        self.health_: dict[str, float] = {}
        self.decoder_settings_ = {}
        self._unharmed_by_bfloat16 = encoder in _UNHARMED_BY_BFLOAT16 and norm == "batch"

    @property
    def health(self) -> dict[str, float]:
        """How alive z_c was at the end of training; empty before.

        ``supervised_c``: its supervised loss; ``ceiling``: that of a collapsed embedding, log B; ``learned_c``: share
        of what the labels say that z_c tells, of cells that are no controls where these are known, see
        :func:`scbd.nn.share_learned`; ``environment_c``: by how many
        standard errors of a batch z_c shows its environments, between -2 and 2 by chance, see
        :func:`scbd.nn.invariance_statistic`; ``spread``: its total variance, between 0 (collapsed) and 1;
        ``effective_rank``: directions in use, of ``n_latent``; ``collapsed``: 1 or 0; ``final_alpha``: alpha, or where
        ``"auto"`` ended.
        """
        return self.health_

    def _smoothing(self, smoothing: float | None) -> float:
        """By default that of many cells which do not show what was done to them, or of wells, which do."""
        if smoothing is not None:
            return smoothing
        return 0.0 if self._inputs.image_key is None else 2 / 3

    def _before_training(self, y: np.ndarray, e: np.ndarray) -> None:
        """See that perturbations have the partners asked for; know the environments."""
        if self.module.positives == "other_environments":
            check_other_environments(y, e, self._registered(Y_REGISTRY)["categories"])
        self.module.set_known(covariates(self.registry_), self._control_codes)

    def _after_training(self, data: ImageDataModule) -> None:
        """Look at z_c on a batch, and warn if it is a point, or tells no more than one."""
        self.health_, verdict = measure(self.module, data.example_batch())
        learned = learned_lately(self.history_ or {}) if data.validates else 0.0
        wrong = complaint(
            self.health_,
            verdict,
            self.module,
            n_steps=data.max_steps,
            batch_size=data.batch_size,
            learned_of_training=learned,
        )
        if wrong:
            warnings.warn(wrong, UserWarning, stacklevel=3)
        if data.validates and (left := environment_left(self.health_, self.module)):
            logger.warning(left)

    def _parts(self) -> list[tuple[str, str]]:
        """Blocks and objective, for :func:`summary`."""
        module = self.module
        blocks, style = "z_c alone", ""
        if module.style_target is not None:
            blocks, style = "z_c, z_s", f", z_s clustered by {' × '.join(module.style_target)}"
        alpha = f"{module.alpha:g}" if module.auto_alpha is None else "auto"
        if module.auto_alpha is not None and self.is_trained_:
            alpha = f"auto, {float(module.current_alpha):.2g} in the end"
        encoder = encoder_name(self._encoder(self.init_params_["non_kwargs"]["encoder"]))
        networks = f"{encoder} → r ({module.content.n_features}) → z ({module.content.n_latent})"
        return [
            ("blocks", f"{blocks}: {networks}, {parameters(module)}"),
            (
                "objective",
                f"alpha {alpha} ({module.invariance}), temperature {module.temperature:g}, "
                f"smoothing {module.smoothing:.2g}{style}",
            ),
        ]

    def _outcome(self) -> list[tuple[str, str]]:
        """Health and decoder, for :func:`summary`."""
        health, decoder, lines = self.health, self.decoder_settings_, []
        if health:
            state = f"z_c {'COLLAPSED' if health['collapsed'] else 'alive'}: supervised loss "
            state += (
                f"{health['supervised_c']:.2f} (collapsed: {health['ceiling']:.2f}), spread {health['spread']:.2f}, "
            )
            lines.append(("", f"{state}effective rank {health['effective_rank']:.1f}"))
        if decoder:
            together = "with the encoders" if decoder["joint"] else "on frozen blocks"
            lines.append(("decoder", f"{decoder['likelihood']}, width {decoder['width']}, trained {together}"))
        return lines
