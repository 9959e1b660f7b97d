"""The network and the objective of SCBD: two blocks and three losses (paper, eq. 1), in plain torch."""

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
    check_smoothing,
    check_temperature,
    invariance_loss,
    log_normaliser,
    normalised_supervised_information,
    supervised_contrastive_loss,
)
from scbd.nn._decoders import AdditiveDecoder
from scbd.nn._distributed import gather_rows
from scbd.nn._encoders import Block, on_sphere
from scbd.nn._explained_variance import Numbers, environment_effects
from scbd.nn._groups import Groups

if TYPE_CHECKING:
    from scbd.nn._decoders import Likelihood
    from scbd.nn._encoders import Norm
    from scbd.nn._feature_scaling import FeatureScaling
    from scbd.nn._image_preprocessing import Preprocess
    from scbd.nn._input_transform import InputTransform

StyleTarget = Literal["e", "ye"]
Invariance = Literal["variance", InvarianceReduction]
Positives = Literal["all", "other_environments"]


# weight of the supervised loss of single cells relative to that of sets: a set may show an effect that its cells do not
_SINGLE_CELL_WEIGHT = 0.5


class EmbeddedBatch(NamedTuple):
    """Embeddings of a batch in all blocks."""

    z: tuple[Tensor, ...]
    """z_c and, if the model has this block, z_s; ``(B, D)`` each."""
    passed: list[Tensor]
    """Intermediate representations of z_c: one of each stage of the encoder, and r_c; ``(B, features)`` each.

    The list is empty if the form of the invariance loss does not use them.
    """
    h: Tensor | None = None
    """Projections ``(B, D)``: z_c before scaling to unit length. Given if sets of cells are averaged."""

    def gathered(self) -> EmbeddedBatch:
        """Return the joint batch of all processes."""
        h = None if self.h is None else gather_rows(self.h)
        return EmbeddedBatch(tuple(map(gather_rows, self.z)), list(map(gather_rows, self.passed)), h)


class SupervisedLosses(NamedTuple):
    """Supervised losses of z_c. All fields are scalars, except ``log_normaliser``."""

    loss: Tensor
    """Loss to minimise, with label smoothing and the chosen positives."""
    shown: Tensor
    """Loss to log: without label smoothing and with all positives, so that it is comparable between runs."""
    learned: Tensor
    """Normalised supervised information, see :func:`share_learned`."""
    log_normaliser: Tensor
    """Normaliser :func:`scbd.nn.log_normaliser` of each cell ``(B,)``, or of each of S sets of cells ``(S,)``."""


class SCBDModule(EmbeddingModule):
    r"""Network of SCBD: two encoders that are coupled only by the objective

    .. math:: L^{sup}_{z_c, y} + L^{sup}_{z_s, e} + \alpha L^{inv}_{z_c, e}.

    Parameters
    ----------
    preprocess
        Preparation of the inputs.
    encoder
        Name or module, see :func:`scbd.nn.build_encoder`; each block has a separate copy.
    transform
        Transform applied to features before the encoder; each block has a separate copy.
    norm
        Normalisation in encoders that are given by name, see :func:`scbd.nn.build_encoder`.
    n_latent
        Dimension of both embeddings.
    alpha
        Weight of the invariance loss, or ``"auto"``, see :class:`scbd.model.AutoAlpha`.
    temperature
        Temperature of the supervised losses and of the contrastive forms of the invariance loss.
    smoothing
        Label smoothing of the supervised loss of single cells in z_c, see
        :func:`scbd.nn.supervised_contrastive_loss`. The loss of sets of cells has no smoothing.
    set_size
        Number of cells of one perturbation whose projections are averaged, before scaling to unit length, into one
        point. The supervised loss of z_c then matches these points, and half of the loss of single cells is added. With
        1, single cells are matched only.
    positives
        Positives of z_c: ``"all"`` cells of the same perturbation, or those in ``"other_environments"`` only, see
        :func:`scbd.nn.supervised_contrastive_loss`.
    style_target
        Label by which z_s is clustered: the environment (``"e"``) or the pair of perturbation and environment
        (``"ye"``); `None` for a model without z_s. With several environments per cell, ``"e"`` averages the losses of
        the single environments, and ``"ye"`` pairs the perturbation with the cross of all environments.
    include_self
        Whether the normaliser includes a cell's similarity with itself, see
        :func:`scbd.nn.supervised_contrastive_loss`.
    invariance
        Form of the invariance loss: ``"variance"``, computed on the intermediate representations and z_c, see
        :func:`scbd.nn.invariance_statistic`; or a contrastive form, computed on z_c, see
        :func:`scbd.nn.invariance_loss`.
    covariates
        Codes of C separate environments, such as plate and position, for each code of ``e``, which is their cross:
        integer ``(E, C)``. `None` if each cell has a single environment.
    controls
        Codes of the labels of controls; `None` if no controls were named.
    """  # noqa: D400

    covariates: Tensor | None
    controls: Tensor | None

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
        positives: Positives,
        style_target: StyleTarget | None,
        include_self: bool,
        invariance: Invariance,
        covariates: np.ndarray | None = None,
        controls: np.ndarray | None = None,
    ) -> None:
        _check_alpha(alpha, invariance)
        check_count("n_latent", n_latent)
        check_temperature(temperature)
        check_smoothing(smoothing)
        check_count("set_size", set_size)
        check_choice("positives", positives, Positives)
        if set_size > 1 and positives != "all":
            msg = f"set_size={set_size}: the cells of a set come from any environment; leave positives out."
            raise ValueError(msg)
        check_choice("style_target", style_target, {"e": "environment", "ye": "the pair", None: "no z_s"})
        super().__init__(preprocess)
        self.alpha = alpha
        self.auto_alpha = AutoAlpha() if alpha == "auto" else None
        self.temperature = temperature
        self.smoothing = smoothing
        self.set_size = set_size
        self.positives = positives
        self.style_target = style_target
        self.include_self = include_self
        self.invariance = invariance
        # these follow from setup_anndata, and are therefore not saved with the weights
        self.register_buffer("covariates", None, persistent=False)
        self.register_buffer("controls", None, persistent=False)
        self.set_label_codes(covariates, controls)
        self.content = Block(encoder, preprocess.output_shape, n_latent, transform, norm=norm)
        if style_target:
            self.style = Block(encoder, preprocess.output_shape, n_latent, copy.deepcopy(transform), norm=norm)
        self.decoder: AdditiveDecoder | None = None  # created by train_decoder

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the objective, which a resumed run must share."""
        return {name: getattr(self, name) for name in ("alpha", "smoothing", "set_size", "invariance")}

    @property
    def alpha_rule(self) -> AutoAlpha | None:
        """Rule that adapts alpha during training with ``alpha="auto"``; `None` if alpha is constant."""
        return self.auto_alpha

    @property
    def current_alpha(self) -> float | Tensor:
        """Current value of alpha: the given number, or with ``"auto"`` the value found so far, a scalar."""
        return float(self.alpha) if self.auto_alpha is None else self.auto_alpha.alpha

    def set_label_codes(self, covariates: np.ndarray | None, controls: np.ndarray | None) -> None:
        """Set the codes of separate environments and of controls; called again when labels have been added.

        Parameters
        ----------
        covariates, controls
            See :class:`SCBDModule`.
        """
        known = [
            None if codes is None else torch.as_tensor(codes, device=self.device) for codes in (covariates, controls)
        ]
        self.covariates, self.controls = known

    def learned(self, z_c: Tensor, y: Groups, normaliser: Tensor) -> Tensor:
        """Compute the normalised supervised information of z_c, without label smoothing, see :func:`share_learned`.

        Parameters
        ----------
        z_c
            Embeddings of cells, or of sets of cells, ``(B, D)``.
        y
            Perturbations of the cells or sets.
        normaliser
            Value of :func:`scbd.nn.log_normaliser` for these embeddings, ``(B,)``.

        Returns
        -------
        A scalar.
        """
        perturbed = self.perturbed(y)
        similarity = self._similarity | {"log_normaliser": normaliser}
        loss = supervised_contrastive_loss(z_c, y, anchors=perturbed, **similarity)
        return normalised_supervised_information(loss, y, include_self=self.include_self, anchors=perturbed)

    def perturbed(self, y: Groups) -> Tensor | None:
        """Return a mask of the cells that are not controls, boolean ``(B,)``; `None` if no controls were named.

        The supervised information of z_c is computed for these cells only. If most wells are controls, the information
        on controls would otherwise hide that on perturbations.
        """
        return None if self.controls is None else ~torch.isin(y.labels, self.controls.to(y.labels.device))

    def environments(self, e: np.ndarray) -> np.ndarray:
        """Return the codes of each cell's environments, ``(N, C)``; environments of different columns differ in code.

        Parameters
        ----------
        e
            Codes of the environment, or of the cross of several columns, ``(N,)``.
        """
        if self.covariates is None:
            return super().environments(e)
        codes = self.covariates.cpu().numpy()[e]
        return codes * codes.shape[1] + np.arange(codes.shape[1])

    def forward(
        self,
        inputs: Tensor,
        y: Tensor,
        e: Tensor,
        *,
        numbers: Tensor | None = None,
        ramp: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Losses:
        """Compute the losses of a batch. The supervised loss of z_c is logged without label smoothing.

        Parameters
        ----------
        inputs, y, e, ramp, generator
            See :meth:`scbd.model.EmbeddingModule.forward`.
        numbers
            Values of continuous covariates such as time, ``(B, K)``. The invariance loss makes z_c independent of
            smooth functions of these values. The loss of z_s does not use them, because it clusters cells by labels.
        """
        return self.losses(self.blocks(self.prepare(inputs, e, generator)), y, e, numbers, ramp=ramp)

    def blocks(self, inputs: PreparedInputs) -> EmbeddedBatch:
        """Embed a prepared batch in all blocks."""
        h, passed = self.content.forward_with_intermediates(inputs.within)
        z_c = on_sphere(h)
        return EmbeddedBatch(
            (z_c,) if self.style is None else (z_c, self.style(inputs.whole)),
            passed if self.invariance == "variance" else [],
            h if self.set_size > 1 else None,
        )

    def losses(
        self, embedded: EmbeddedBatch, y: Tensor, e: Tensor, numbers: Tensor | None = None, *, ramp: float = 1.0
    ) -> Losses:
        """Compute the losses of embedded cells of all processes.

        Parameters
        ----------
        embedded
            Embeddings of this process's cells; they are gathered with those of the other processes.
        y, e, numbers, ramp
            See :meth:`forward`.
        """
        embedded = embedded.gathered()
        of_y, of_e = Groups(gather_rows(y)), Groups(gather_rows(e))
        z_c, *z_s = embedded.z
        supervised = self.supervised(z_c, of_y, of_e, embedded.h)
        loss, parts = supervised.loss, {"supervised_c": supervised.shown, "learned_c": supervised.learned}
        environments = self.side_by_side(of_e)
        for z in z_s:
            clusters = environments if self.style_target == "e" else [of_y.cross(of_e)]
            each = [supervised_contrastive_loss(z, of_one, **self._similarity) for of_one in clusters]
            parts["supervised_s"] = torch.stack(each).mean()
            learned = [
                normalised_supervised_information(of_one.detach(), labels, include_self=self.include_self)
                for of_one, labels in zip(each, clusters, strict=True)
            ]
            parts["learned_s"] = torch.stack(learned).mean()
            loss = loss + parts["supervised_s"]
        if self.invariance == "variance":
            ordered = Numbers.columns(None if numbers is None else gather_rows(numbers))
            effects = environment_effects((*embedded.passed, z_c), [*environments, *ordered], of_y)
            parts |= {"invariance_c": effects.statistic, "interaction_c": effects.interaction}
            parts["environment_c"] = effects.embedding_statistic
        else:
            similarity = self._similarity
            if self.set_size == 1:  # both losses use the same Gram matrix
                similarity |= {"log_normaliser": supervised.log_normaliser}
            each = [invariance_loss(z_c, of_one, reduction=self.invariance, **similarity) for of_one in environments]
            parts["invariance_c"] = torch.stack(each).mean()
        return Losses(loss + ramp * self.current_alpha * parts["invariance_c"], parts, z_c.detach())

    def side_by_side(self, e: Groups) -> list[Groups]:
        """Return one grouping of the cells for each separate environment column, or ``[e]`` if there is a single one.

        Parameters
        ----------
        e
            Environments of the cells, or the cross of several columns.
        """
        if self.covariates is None:
            return [e]
        return [Groups(codes) for codes in self.covariates.to(e.labels.device)[e.labels].T]

    def columns(self, e: Tensor) -> Tensor:
        """Return the codes of each separate environment, see :meth:`scbd.model.EmbeddingModule.columns`."""
        if self.covariates is None or e.ndim > 1:
            return super().columns(e)
        codes: Tensor = self.covariates.to(e.device)[e]
        return codes

    def matched(self, z_c: Tensor, y: Groups, h: Tensor | None) -> tuple[Tensor, Groups]:
        """Return the points that the supervised loss of z_c matches, and their labels.

        The points are the cells, or means of sets of cells, scaled to unit length.

        Parameters
        ----------
        z_c
            Embeddings of the cells, ``(B, D)``.
        y
            Perturbations of the cells.
        h
            Projections of the cells before scaling to unit length, ``(B, D)``, which are averaged over sets; `None` to
            match cells.
        """
        if h is None:
            return z_c, y
        means, labels = y.average_over_sets(h, self.set_size)
        return on_sphere(means), labels

    def supervised(self, z_c: Tensor, y: Groups, e: Groups, h: Tensor | None = None) -> SupervisedLosses:
        """Compute the supervised losses of z_c: the loss to minimise, the loss to log and the supervised information.

        If sets are matched, they are matched without label smoothing, and half of the loss of single cells with
        smoothing is added.

        Parameters
        ----------
        z_c
            Embeddings of the cells, ``(B, D)``.
        y, e
            Perturbations and environments of the cells.
        h
            Projections of the cells, see :meth:`matched`; `None` to match cells.
        """
        similarity, smoothing, beside = self._similarity, self.smoothing, None
        if h is not None:
            beside = supervised_contrastive_loss(z_c, y, smoothing=smoothing, **similarity)
            smoothing, (z_c, y) = 0.0, self.matched(z_c, y, h)
        # all losses on z_c use the same Gram matrix
        normaliser = log_normaliser(z_c, **similarity)
        similarity |= {"log_normaliser": normaliser}
        loss = of_all = shown = supervised_contrastive_loss(z_c, y, smoothing=smoothing, **similarity)
        if beside is not None:
            loss = loss + _SINGLE_CELL_WEIGHT * beside
        if self.positives != "all":
            loss = supervised_contrastive_loss(z_c, y, environments=e, smoothing=smoothing, **self._similarity)
        if smoothing:
            # logged without smoothing: a smoothed loss is close to that of a collapsed embedding even after learning
            with torch.no_grad():
                shown = supervised_contrastive_loss(z_c, y, **similarity)
        perturbed = self.perturbed(y)
        if perturbed is not None:
            with torch.no_grad():
                of_all = supervised_contrastive_loss(z_c, y, smoothing=smoothing, anchors=perturbed, **similarity)
        how: dict[str, Any] = {"smoothing": smoothing, "include_self": self.include_self, "anchors": perturbed}
        learned = normalised_supervised_information(of_all.detach(), y, **how)
        return SupervisedLosses(loss, shown, learned, normaliser)

    @property
    def _similarity(self) -> dict[str, Any]:
        """Arguments of all contrastive losses: temperature and normaliser."""
        return {"temperature": self.temperature, "include_self": self.include_self}

    def make_decoder(self, likelihood: Likelihood, width: int) -> AdditiveDecoder:
        """Create an untrained decoder of all blocks.

        Parameters
        ----------
        likelihood
            ``"bernoulli"`` or ``"gaussian"``.
        width
            Number of channels of the decoder's layers.
        """
        n_latents = tuple(block.n_latent for block in (self.content, self.style) if block is not None)
        return AdditiveDecoder(n_latents, self.preprocess.output_shape, width=width, likelihood=likelihood)

    def on_load(self, model: Any, **kwargs: Any) -> None:
        """Create the decoder if one was saved with the model (scvi-tools calls this method on loading)."""
        if model.decoder_settings_:
            self.decoder = self.make_decoder(model.decoder_settings_["likelihood"], model.decoder_settings_["width"])


def _check_alpha(alpha: Alpha, invariance: str) -> None:
    """Raise ``ValueError`` unless alpha is a valid weight, or ``"auto"`` with the form ``"variance"`` of invariance."""
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
