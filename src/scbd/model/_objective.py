"""The network and objective of SCBD: two blocks, three losses (paper, eq. 1). Torch alone."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from scbd._checks import check_choice, check_count, check_number
from scbd.model._contract import Alpha, AutoAlpha, EmbeddingModule, Losses, Prepared
from scbd.nn._contrastive import (
    Groups,
    InvarianceReduction,
    check_smoothing,
    check_temperature,
    invariance_loss,
    log_normaliser,
    share_learned,
    supervised_contrastive_loss,
)
from scbd.nn._decoders import AdditiveDecoder
from scbd.nn._distributed import gather
from scbd.nn._encoders import Block, on_sphere
from scbd.nn._variance import Numbers, environment_effects

if TYPE_CHECKING:
    from scbd.nn._decoders import Likelihood
    from scbd.nn._encoders import Norm
    from scbd.nn._inputs import FeatureScaling, InputTransform, Preprocess

StyleTarget = Literal["e", "ye"]
Invariance = Literal["variance", InvarianceReduction]
Positives = Literal["all", "other_environments"]


# weight of the loss of cells beside that of their sets: what a set shows, its cells need not
_CELLS_BESIDE_SETS = 0.5


class Embedded(NamedTuple):
    """A batch in both blocks."""

    z: tuple[Tensor, ...]
    """z_c and, unless it is left out, z_s, each ``(B, D)``."""
    passed: list[Tensor]
    """What the inputs were on the way to z_c, if the form of invariance looks there: a vector a stage, and r_c."""
    h: Tensor | None = None
    """z_c before it is brought to unit length, ``(B, D)``, if sets of cells are averaged there."""

    def gathered(self) -> Embedded:
        """The joint batch of all processes."""
        h = None if self.h is None else gather(self.h)
        return Embedded(tuple(map(gather, self.z)), list(map(gather, self.passed)), h)


class Supervised(NamedTuple):
    """The supervised loss of z_c, scalars but for the last."""

    loss: Tensor
    """With smoothing of the labels and the positives that were chosen, to descend."""
    shown: Tensor
    """Without smoothing, with all positives: comparable from run to run."""
    learned: Tensor
    """Share of what the labels say, see :func:`share_learned`."""
    log_normaliser: Tensor
    """See :func:`scbd.nn.log_normaliser`, ``(B,)``."""


class SCBDModule(EmbeddingModule):
    r"""Two encoders that meet only in the objective

    .. math:: L^{sup}_{z_c, y} + L^{sup}_{z_s, e} + \alpha L^{inv}_{z_c, e}.

    Parameters
    ----------
    preprocess
        What prepares the inputs.
    encoder
        Name or module, see :func:`scbd.nn.build_encoder`; each block has its own.
    transform
        What features pass before an encoder; each block has its own.
    norm
        Of encoders by name, see :func:`scbd.nn.build_encoder`.
    n_latent
        Dimension of both embeddings.
    alpha
        Weight of the invariance loss, or ``"auto"``, see :class:`scbd.model.AutoAlpha`.
    temperature
        Temperature of all three losses.
    smoothing
        Of the labels of the cells of z_c, see :func:`scbd.nn.supervised_contrastive_loss`; sets are matched without.
    set_size
        Cells of a perturbation whose projections are averaged, before they are brought to unit length, into one point
        that the supervised loss of z_c matches, half of the loss of the cells beside it; 1 matches cells alone.
    positives
        Of z_c: ``"all"`` cells of a label, or those of ``"other_environments"``, see
        :func:`scbd.nn.supervised_contrastive_loss`.
    style_target
        What z_s is clustered by: the environment ``"e"``, or the pair ``"ye"``; `None` leaves z_s out. Of several
        environments side by side, ``"e"`` is the mean of their losses, and ``"ye"`` the pair with their cross.
    include_self
        Self-similarity in the normaliser, see :func:`scbd.nn.supervised_contrastive_loss`.
    invariance
        Form of the invariance loss: ``"variance"``, at every stage on the way to z_c and there, see
        :func:`scbd.nn.invariance_statistic`; or one of the contrastive forms, on z_c, see
        :func:`scbd.nn.invariance_loss`.
    covariates
        Environments that stand side by side, such as plate and position: codes of each, integer ``(E, C)``, for each
        code of ``e``, which is their cross. `None` if ``e`` is the one environment.
    controls
        Codes of the labels of controls, where they are known.
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
        # what the labels were set up with says it: no part of the weights
        self.register_buffer("covariates", None, persistent=False)
        self.register_buffer("controls", None, persistent=False)
        self.set_known(covariates, controls)
        self.content = Block(encoder, preprocess.output_shape, n_latent, transform, norm=norm)
        if style_target:
            self.style = Block(encoder, preprocess.output_shape, n_latent, copy.deepcopy(transform), norm=norm)
        self.decoder: AdditiveDecoder | None = None  # comes with train_decoder

    @property
    def settings(self) -> dict[str, Any]:
        """Of the objective; a resumed run must share them."""
        return {name: getattr(self, name) for name in ("alpha", "smoothing", "set_size", "invariance")}

    @property
    def alpha_rule(self) -> AutoAlpha | None:
        """Of ``alpha="auto"``."""
        return self.auto_alpha

    @property
    def current_alpha(self) -> float | Tensor:
        """Alpha as of now: the number given, or what ``"auto"`` has found so far, a scalar."""
        return float(self.alpha) if self.auto_alpha is None else self.auto_alpha.alpha

    def set_known(self, covariates: np.ndarray | None, controls: np.ndarray | None) -> None:
        """Know environments that stand side by side, and which labels are controls; again, when new ones were met."""
        known = [
            None if codes is None else torch.as_tensor(codes, device=self.device) for codes in (covariates, controls)
        ]
        self.covariates, self.controls = known

    def learned(self, z_c: Tensor, y: Groups, normaliser: Tensor) -> Tensor:
        """Share of what labels say that z_c ``(B, D)`` carries without smoothing: :func:`share_learned`."""
        perturbed = self.perturbed(y)
        similarity = self._similarity | {"log_normaliser": normaliser}
        loss = supervised_contrastive_loss(z_c, y, anchors=perturbed, **similarity)
        return share_learned(loss, y, include_self=self.include_self, anchors=perturbed)

    def perturbed(self, y: Groups) -> Tensor | None:
        """Cells of a batch that are no controls, boolean ``(B,)``; `None` where controls are not known.

        What z_c has learned is asked of these: where most wells are controls, their share would hide that of others.
        """
        return None if self.controls is None else ~torch.isin(y.labels, self.controls.to(y.labels.device))

    def environments(self, e: np.ndarray) -> np.ndarray:
        """Codes of each environment ``(N, C)``, no two environments having one in common."""
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
        """Losses of a batch, that of z_c shown without smoothing, see :class:`scbd.model.EmbeddingModule`.

        ``numbers``, integer ``(B, K)``, are places in an order, such as that of time: z_c is to know nothing of what
        changes slowly with them. z_s, which is made of clusters, does not hear of them.
        """
        return self.losses(self.blocks(self.prepare(inputs, e, generator)), y, e, numbers, ramp=ramp)

    def blocks(self, inputs: Prepared) -> Embedded:
        """Embed a prepared batch."""
        h, passed = self.content.watched(inputs.within)
        z_c = on_sphere(h)
        return Embedded(
            (z_c,) if self.style is None else (z_c, self.style(inputs.whole)),
            passed if self.invariance == "variance" else [],
            h if self.set_size > 1 else None,
        )

    def losses(
        self, embedded: Embedded, y: Tensor, e: Tensor, numbers: Tensor | None = None, *, ramp: float = 1.0
    ) -> Losses:
        """Objective of embedded cells, those of all processes together, see :meth:`forward`."""
        embedded = embedded.gathered()
        of_y, of_e = Groups(gather(y)), Groups(gather(e))
        z_c, *z_s = embedded.z
        supervised = self.supervised(z_c, of_y, of_e, embedded.h)
        loss, parts = supervised.loss, {"supervised_c": supervised.shown, "learned_c": supervised.learned}
        environments = self.side_by_side(of_e)
        for z in z_s:
            clusters = environments if self.style_target == "e" else [of_y.crossed(of_e)]
            each = [supervised_contrastive_loss(z, of_one, **self._similarity) for of_one in clusters]
            parts["supervised_s"] = torch.stack(each).mean()
            learned = [
                share_learned(of_one.detach(), labels, include_self=self.include_self)
                for of_one, labels in zip(each, clusters, strict=True)
            ]
            parts["learned_s"] = torch.stack(learned).mean()
            loss = loss + parts["supervised_s"]
        if self.invariance == "variance":
            ordered = Numbers.columns(None if numbers is None else gather(numbers))
            effects = environment_effects((*embedded.passed, z_c), [*environments, *ordered], of_y)
            parts |= {"invariance_c": effects.statistic, "interaction_c": effects.interaction}
            parts["environment_c"] = effects.of_last
        else:
            similarity = self._similarity
            if self.set_size == 1:  # both losses read the same Gram matrix
                similarity |= {"log_normaliser": supervised.log_normaliser}
            each = [invariance_loss(z_c, of_one, reduction=self.invariance, **similarity) for of_one in environments]
            parts["invariance_c"] = torch.stack(each).mean()
        return Losses(loss + ramp * self.current_alpha * parts["invariance_c"], parts, z_c.detach())

    def side_by_side(self, e: Groups) -> list[Groups]:
        """Each environment by itself; the one, if there are no others."""
        if self.covariates is None:
            return [e]
        return [Groups(codes) for codes in self.covariates.to(e.labels.device)[e.labels].T]

    def columns(self, e: Tensor) -> Tensor:
        """Of each that stands side by side, see :meth:`scbd.model.EmbeddingModule.columns`."""
        if self.covariates is None or e.ndim > 1:
            return super().columns(e)
        codes: Tensor = self.covariates.to(e.device)[e]
        return codes

    def matched(self, z_c: Tensor, y: Groups, h: Tensor | None) -> tuple[Tensor, Groups]:
        """What the supervised loss of z_c matches, and its labels: cells, or means of sets of ``h``, at unit length."""
        if h is None:
            return z_c, y
        means, labels = y.in_sets(h, self.set_size)
        return on_sphere(means), labels

    def supervised(self, z_c: Tensor, y: Groups, e: Groups, h: Tensor | None = None) -> Supervised:
        """Supervised losses of z_c ``(B, D)``: the one that is descended, and those to look at; of sets with ``h``.

        Sets are matched as they are, and their cells beside them, with smoothing.
        """
        similarity, smoothing, beside = self._similarity, self.smoothing, None
        if h is not None:
            beside = supervised_contrastive_loss(z_c, y, smoothing=smoothing, **similarity)
            smoothing, (z_c, y) = 0.0, self.matched(z_c, y, h)
        # all losses on z_c read the same Gram matrix
        normaliser = log_normaliser(z_c, **similarity)
        similarity |= {"log_normaliser": normaliser}
        loss = of_all = shown = supervised_contrastive_loss(z_c, y, smoothing=smoothing, **similarity)
        if beside is not None:
            loss = loss + _CELLS_BESIDE_SETS * beside
        if self.positives != "all":
            loss = supervised_contrastive_loss(z_c, y, environments=e, smoothing=smoothing, **self._similarity)
        if smoothing:
            # shown as it would be without: beside the ceiling, a smoothed loss looks dead
            with torch.no_grad():
                shown = supervised_contrastive_loss(z_c, y, **similarity)
        perturbed = self.perturbed(y)
        if perturbed is not None:
            with torch.no_grad():
                of_all = supervised_contrastive_loss(z_c, y, smoothing=smoothing, anchors=perturbed, **similarity)
        how: dict[str, Any] = {"smoothing": smoothing, "include_self": self.include_self, "anchors": perturbed}
        learned = share_learned(of_all.detach(), y, **how)
        return Supervised(loss, shown, learned, normaliser)

    @property
    def _similarity(self) -> dict[str, Any]:
        """How all losses compare two cells."""
        return {"temperature": self.temperature, "include_self": self.include_self}

    def make_decoder(self, likelihood: Likelihood, width: int) -> AdditiveDecoder:
        """An untrained decoder of both blocks to images as the encoders see them."""
        n_latents = tuple(block.n_latent for block in (self.content, self.style) if block is not None)
        return AdditiveDecoder(n_latents, self.preprocess.output_shape, width=width, likelihood=likelihood)

    def on_load(self, model: Any, **kwargs: Any) -> None:
        """Make room for the decoder that was saved with the model (part of scvi-tools' loading contract)."""
        if model.decoder_settings_:
            self.decoder = self.make_decoder(model.decoder_settings_["likelihood"], model.decoder_settings_["width"])


def _check_alpha(alpha: Alpha, invariance: str) -> None:
    """Raise ``ValueError`` unless alpha is a weight that goes with the form of invariance."""
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
