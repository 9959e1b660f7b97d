"""Network and objective of SCBD in plain torch: two encoders, which compute z_c and z_s, and three losses.

The objective is eq. 1 of the paper.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from scbd._shared.checks import check_choice, check_count, check_number
from scbd.model._auto_alpha import AutoAlpha
from scbd.model._interfaces import Alpha, EmbeddingModule, Losses, PreparedInputs
from scbd.nn._contrastive import (
    InvarianceReduction,
    anchor_terms,
    anchor_weights,
    check_smoothing,
    check_temperature,
    normalised_supervised_information,
    unchecked_invariance_loss,
    weighted_sums,
)
from scbd.nn._decoders import AdditiveDecoder
from scbd.nn._distributed import gather_rows
from scbd.nn._encoders import Block, on_sphere
from scbd.nn._explained_variance import environment_effects
from scbd.nn._groups import Groups
from scbd.nn._log_sum_exp import log_sum_exp

if TYPE_CHECKING:
    from scbd.nn._decoders import Likelihood
    from scbd.nn._encoders import Norm
    from scbd.nn._feature_scaling import FeatureScaling
    from scbd.nn._image_preprocessing import Preprocess
    from scbd.nn._input_transform import InputTransform

StyleTarget = Literal["e", "ye"]
Invariance = Literal["variance", InvarianceReduction]


# weight of the supervised loss of single cells if it is added to the supervised loss of sets of cells, which has weight
# 1; a set is a mean of several cells of one perturbation, and may show an effect that its single cells do not show
_SINGLE_CELL_WEIGHT = 0.5


class EmbeddedBatch(NamedTuple):
    """Embeddings of the cells of a batch, and the intermediate values of the networks that the losses use."""

    z: tuple[Tensor, ...]
    """z_c and, if the model has it, z_s: one tensor ``(B, D)`` each."""
    passed: list[Tensor]
    """Intermediate representations in the encoder of z_c, ``(B, features)`` each.

    There is one for each stage (resolution) of the encoder, followed by r_c, the output of the encoder before the
    projection to z_c. The list is empty if the chosen form of the invariance loss does not use intermediate
    representations.
    """
    h: Tensor | None = None
    """Projections of the cells, ``(B, D)``: the vectors that are scaled to unit length to give z_c.

    `None` unless the supervised loss uses averages of several cells of a perturbation.
    """


class SupervisedLosses(NamedTuple):
    """Supervised losses of z_c for a batch of cells. All fields are scalars, except ``log_normaliser``."""

    loss: Tensor
    """Loss to minimise, with the label smoothing that the user has chosen."""
    shown: Tensor
    """Loss to log: without label smoothing, so that it is comparable between runs with different settings."""
    learned: Tensor
    """Normalised supervised information of z_c: 0 for a collapsed embedding, at most 1.

    See :func:`normalised_supervised_information`.
    """
    log_normaliser: Tensor
    """Logarithm of the softmax denominator of each cell, ``(B,)``, see :func:`scbd.nn.log_normaliser`.

    If the loss uses averages of several cells of a perturbation, there is one value for each of S averages, ``(S,)``.
    """


class SCBDModule(EmbeddingModule):
    r"""Network of SCBD: two encoders that are coupled only by the objective

    .. math:: L^{sup}_{z_c, y} + L^{sup}_{z_s, e} + \alpha L^{inv}_{z_c, e}.

    Parameters
    ----------
    preprocess
        Preparation of the images or features for the encoders, such as scaling and augmentation.
    encoder
        Name of an encoder or a torch module, see :func:`scbd.nn.build_encoder`. z_c and z_s have separate copies of the
        encoder.
    transform
        Transform applied to features before the encoder. z_c and z_s have separate copies of the transform.
    norm
        Normalisation in encoders that are given by name, see :func:`scbd.nn.build_encoder`.
    n_latent
        Dimension of z_c, and of z_s.
    alpha
        Weight of the invariance loss, or ``"auto"``, see :class:`scbd.model.AutoAlpha`.
    temperature
        Temperature of the supervised losses and of the contrastive forms of the invariance loss.
    smoothing
        Label smoothing of the supervised loss of single cells in z_c, see
        :func:`scbd.nn.supervised_contrastive_loss`. The loss of sets of cells has no smoothing.
    set_size
        Number of cells of one perturbation in a set. The projections of the cells are averaged, and the average is
        scaled to unit length. The supervised loss of z_c then compares these averages, and half of the loss of single
        cells is added. With 1, the loss compares single cells only.
    style_target
        Label by which z_s is clustered: the environment (``"e"``) or the pair of perturbation and environment
        (``"ye"``); `None` for a model without z_s. With several environments per cell, ``"e"`` averages the losses of
        the single environments, and ``"ye"`` pairs the perturbation with the cross of all environments.
    include_self
        Whether the softmax denominator of the losses includes a cell's similarity with itself, see
        :func:`scbd.nn.supervised_contrastive_loss`.
    invariance
        Form of the invariance loss: ``"variance"``, computed on the intermediate representations and z_c, see
        :func:`scbd.nn.invariance_statistic`; or a contrastive form, computed on z_c, see
        :func:`scbd.nn.invariance_loss`.
    covariates
        Codes of C separate environments, such as plate and position, integer ``(E, C)``. A code of ``e`` stands for one
        of the E combinations of these environments, and row k belongs to code k. `None` if each cell has a single
        environment.
    controls
        Codes of the labels of controls; `None` if no controls were named.
    """  # noqa: D400

    covariates: Tensor | None
    controls: np.ndarray | None

    def __init__(
        self,
        preprocess: Preprocess | FeatureScaling,
        *,
        encoder: str | nn.Module,
        transform: InputTransform | None = None,
        norm: Norm = "batch",
        n_latent: int,
        alpha: Alpha,
        temperature: float,
        smoothing: float,
        set_size: int = 1,
        style_target: StyleTarget | None,
        include_self: bool,
        invariance: Invariance,
        covariates: np.ndarray | None = None,
        controls: np.ndarray | None = None,
    ) -> None:
        check_choice("invariance", invariance, Invariance)
        if not isinstance(alpha, str):
            check_number("alpha", alpha)
        elif alpha != "auto":
            msg = f"alpha={alpha!r} is not known: give a number, or 'auto'."
            raise ValueError(msg)
        elif invariance != "variance":
            msg = (
                f"alpha='auto' knows the scale of invariance='variance', not of {invariance!r}: give a number, or "
                "choose one by a sweep (scbd.select_alpha)."
            )
            raise ValueError(msg)
        check_count("n_latent", n_latent)
        check_temperature(temperature)
        check_smoothing(smoothing)
        check_count("set_size", set_size)
        check_choice("style_target", style_target, {"e": "environment", "ye": "the pair", None: "no z_s"})
        super().__init__(preprocess)
        self.alpha = alpha
        self.auto_alpha = AutoAlpha() if alpha == "auto" else None
        self.temperature = temperature
        self.smoothing = smoothing
        self.set_size = set_size
        self.style_target = style_target
        self.include_self = include_self
        self.invariance = invariance
        # the codes of separate environments follow from setup_anndata, so they are not saved with the weights
        self.register_buffer("covariates", None, persistent=False)
        self.set_label_codes(covariates, controls)
        self.content = Block(encoder, preprocess.output_shape, n_latent, transform, norm=norm)
        if style_target:
            self.style = Block(encoder, preprocess.output_shape, n_latent, copy.deepcopy(transform), norm=norm)
        self.decoder: AdditiveDecoder | None = None  # a decoder is created by train_decoder

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the objective, by name, which must be the same when an interrupted run is resumed."""
        return {name: getattr(self, name) for name in ("alpha", "smoothing", "set_size", "invariance")}

    @property
    def alpha_rule(self) -> AutoAlpha | None:
        """Rule that adapts alpha during training with ``alpha="auto"``; `None` if alpha is constant."""
        return self.auto_alpha

    @property
    def current_alpha(self) -> float | Tensor:
        """Current weight of the invariance loss: the given number, or for ``alpha="auto"`` the value found so far."""
        return float(self.alpha) if self.auto_alpha is None else self.auto_alpha.alpha

    def set_label_codes(self, covariates: np.ndarray | None, controls: np.ndarray | None) -> None:
        """Store the codes of separate environments and of controls in the module.

        This method is called before each training run as well, because labels may have been added to the data.

        Parameters
        ----------
        covariates, controls
            See :class:`SCBDModule`.
        """
        self.covariates = None if covariates is None else torch.as_tensor(covariates, device=self.device)
        # losses need these codes on the CPU
        self._covariates, self.controls = covariates, controls

    def learned(self, z_c: Tensor, y: Groups, normaliser: Tensor) -> Tensor:
        """Compute the normalised supervised information of z_c, without label smoothing.

        It is 0 for a collapsed embedding and at most 1, see :func:`normalised_supervised_information`.

        Parameters
        ----------
        z_c
            Embeddings of single cells, or of averages over sets of cells of one perturbation, ``(B, D)``.
        y
            Perturbations of the cells or sets.
        normaliser
            Value of :func:`scbd.nn.log_normaliser` for these embeddings, ``(B,)``.

        Returns
        -------
        A scalar.
        """
        perturbed = self.perturbed(y)
        loss = self._supervised(z_c, y, normaliser, anchors=perturbed)
        return normalised_supervised_information(loss, y, include_self=self.include_self, anchors=perturbed)

    def perturbed(self, y: Groups) -> Tensor | None:
        """Return a mask of the perturbed cells, boolean ``(B,)``, on the CPU: all cells except controls.

        `None` is returned if no controls were named. The supervised information of z_c is computed for perturbed cells
        only. If most wells are controls, the information on controls would otherwise hide that on perturbations.
        """
        if self.controls is None:
            return None
        return torch.from_numpy(~np.isin(y.distinct_labels, self.controls)[y.codes])

    def forward(
        self,
        inputs: Tensor,
        y: Tensor,
        e: Tensor,
        *,
        ramp: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Losses:
        """Compute the losses of a batch of cells.

        The supervised loss of z_c that is logged has no label smoothing.

        Parameters
        ----------
        inputs, y, e, ramp, generator
            See :meth:`scbd.model.EmbeddingModule.forward`.
        """
        return self.losses(self.blocks(self.prepare(inputs, e, generator)), y, e, ramp=ramp)

    def blocks(self, inputs: PreparedInputs) -> EmbeddedBatch:
        """Compute z_c and, if the model has it, z_s of the cells of a batch whose inputs have been prepared."""
        h, passed = self.content.forward_with_intermediates(inputs.within)
        z_c = on_sphere(h)
        return EmbeddedBatch(
            (z_c,) if self.style is None else (z_c, self.style(inputs.whole)),
            passed if self.invariance == "variance" else [],
            h if self.set_size > 1 else None,
        )

    def losses(self, embedded: EmbeddedBatch, y: Tensor, e: Tensor, *, ramp: float = 1.0) -> Losses:
        """Compute the losses of a batch from the embeddings of its cells.

        Parameters
        ----------
        embedded
            Embeddings of the cells. In distributed training, these are the cells of this process; the cells of all
            processes are gathered before the losses are computed.
        y, e, ramp
            See :meth:`forward`.
        """
        of_y, of_e = Groups.of(gather_rows(y)), Groups.of(gather_rows(e))
        z_c, *z_s = map(gather_rows, embedded.z)
        passed, h = map(gather_rows, embedded.passed), None if embedded.h is None else gather_rows(embedded.h)
        supervised = self.supervised(z_c, of_y, h)
        loss, parts = supervised.loss, {"supervised_c": supervised.shown, "learned_c": supervised.learned}
        environments = self.side_by_side(of_e)
        for z in z_s:
            clusters = environments if self.style_target == "e" else [of_y.cross(of_e)]
            normaliser = log_sum_exp(z, self.temperature, self.include_self)
            each = [self._supervised(z, labels, normaliser) for labels in clusters]
            parts["supervised_s"] = _average(each)
            learned = [
                normalised_supervised_information(of_one.detach(), labels, include_self=self.include_self)
                for of_one, labels in zip(each, clusters, strict=True)
            ]
            parts["learned_s"] = _average(learned)
            loss = loss + parts["supervised_s"]
        if self.invariance == "variance":
            effects = environment_effects((*passed, z_c), environments, of_y)
            parts |= {"invariance_c": effects.statistic, "interaction_c": effects.interaction}
            parts["environment_c"] = effects.embedding_statistic
        else:
            # with single cells, the invariance loss and the supervised loss have the same softmax denominators
            normaliser = supervised.log_normaliser
            if self.set_size > 1:
                normaliser = log_sum_exp(z_c, self.temperature, self.include_self)
            how = normaliser, self.temperature, self.invariance
            each = [unchecked_invariance_loss(z_c, of_one, *how) for of_one in environments]
            parts["invariance_c"] = _average(each)
        return Losses(loss + ramp * self.current_alpha * parts["invariance_c"], parts, z_c.detach())

    def side_by_side(self, e: Groups) -> list[Groups]:
        """Return the cells grouped by environment, once for each separate environment column.

        The result is ``[e]`` if there is a single column.

        Parameters
        ----------
        e
            Cells grouped by environment; with several columns, by the combination of their values.
        """
        if self._covariates is None:
            return [e]
        return [e.regroup(codes[e.distinct_labels][e.codes]) for codes in self._covariates.T]

    def columns(self, e: Tensor) -> Tensor:
        """Return the codes of the environments of cells in each separate environment column, ``(B, K)``.

        See :meth:`scbd.model.EmbeddingModule.columns`.
        """
        if self.covariates is None or e.ndim > 1:
            return super().columns(e)
        return self.covariates.to(e.device)[e]

    def matched(self, z_c: Tensor, y: Groups, h: Tensor | None) -> tuple[Tensor, Groups]:
        """Return the points that the supervised loss of z_c compares, and the perturbation labels of the points.

        The points are the embeddings of single cells, or averages over sets of several cells of one perturbation,
        scaled to unit length.

        Parameters
        ----------
        z_c
            Embeddings of the cells, ``(B, D)``.
        y
            Perturbations of the cells.
        h
            Projections of the cells before scaling to unit length, ``(B, D)``, which are averaged over sets; `None` to
            return single cells.
        """
        if h is None:
            return z_c, y
        means, labels = y.average_over_sets(h, self.set_size)
        return on_sphere(means), labels

    def supervised(self, z_c: Tensor, y: Groups, h: Tensor | None = None) -> SupervisedLosses:
        """Compute the supervised losses of z_c: the loss to minimise, the loss to log and the supervised information.

        The losses compare single cells, or averages over sets of several cells of one perturbation. The loss of sets
        has no label smoothing, and half of the loss of single cells, with label smoothing, is added to it.

        Parameters
        ----------
        z_c
            Embeddings of the cells, ``(B, D)``.
        y
            Perturbations of the cells.
        h
            Projections of the cells, which are averaged over sets, see :meth:`matched`; `None` to compare single cells.
        """
        smoothing, of_single_cells = self.smoothing, None
        if h is not None:
            normaliser = log_sum_exp(z_c, self.temperature, self.include_self)
            of_single_cells = self._supervised(z_c, y, normaliser, smoothing=smoothing)
            smoothing, (z_c, y) = 0.0, self.matched(z_c, y, h)
        # the softmax denominators and the sums of similarities are computed once, and used by all losses of these
        # points
        normaliser, perturbed = log_sum_exp(z_c, self.temperature, self.include_self), self.perturbed(y)
        weights, weights_of_all = (
            anchor_weights(y, self.temperature, smoothing=smoothing, anchors=anchors) for anchors in (None, perturbed)
        )
        terms = anchor_terms(z_c, y, normaliser, len(weights))
        loss = weighted_sums(terms, weights)
        # the logged loss has no label smoothing, since a smoothed loss stays close to that of a collapsed embedding
        # even if z_c distinguishes perturbations
        logged = np.zeros_like(weights)
        logged[:2] = anchor_weights(y, self.temperature)
        shown, of_all = weighted_sums(terms.detach(), np.stack([logged, weights_of_all]))
        if of_single_cells is not None:
            loss = loss + _SINGLE_CELL_WEIGHT * of_single_cells
        how: dict[str, Any] = {"smoothing": smoothing, "include_self": self.include_self, "anchors": perturbed}
        return SupervisedLosses(loss, shown, normalised_supervised_information(of_all, y, **how), normaliser)

    def _supervised(self, z: Tensor, labels: Groups, log_normaliser: Tensor, **how: Any) -> Tensor:
        """Compute the supervised loss of embeddings whose softmax denominators are known."""
        weights = anchor_weights(labels, self.temperature, **how)
        return weighted_sums(anchor_terms(z, labels, log_normaliser, len(weights)), weights)

    def make_decoder(self, likelihood: Likelihood, width: int) -> AdditiveDecoder:
        """Create an untrained decoder, which maps z_c and, if the model has it, z_s to images or features.

        Parameters
        ----------
        likelihood
            Likelihood of the inputs given the embeddings: ``"bernoulli"`` or ``"gaussian"``.
        width
            Number of channels of the decoder's layers.
        """
        n_latents = tuple(block.n_latent for block in (self.content, self.style) if block is not None)
        return AdditiveDecoder(n_latents, self.preprocess.output_shape, width=width, likelihood=likelihood)

    def on_load(self, model: Any, **kwargs: Any) -> None:
        """Create the decoder of a loaded model if a decoder was saved with the model.

        scvi-tools calls this method before it loads the weights.
        """
        if model.decoder_settings_:
            self.decoder = self.make_decoder(model.decoder_settings_["likelihood"], model.decoder_settings_["width"])


def _average(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack(values).mean()
