"""The main model of the package, :class:`SCBDModel` (Makino et al., 2025), with the interface of scvi-tools."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from scbd._shared.checks import check_count, check_number, count_or_default, join_first
from scbd._shared.keys import Y_REGISTRY
from scbd._shared.labels import as_columns, label_text, label_values
from scbd._shared.messages import warn_user
from scbd.model._arguments import check_constructor_arguments, explain_arguments, keyword_names
from scbd.model._base import ImageModel, describe_n_parameters, encoder_name
from scbd.model._decode import CELLS_READ_PER_BLOCK, DECODE_BATCH_SIZE, DecodeMixin
from scbd.model._decoder_objective import DecoderObjective
from scbd.model._design import environment_column_codes
from scbd.model._embed import row_numbers
from scbd.model._health import (
    advice_on_collapse,
    means_differ,
    measure_health,
    warn_if_environments_mislead,
)
from scbd.model._minified import block_names
from scbd.model._objective import Invariance, SCBDModule, StyleTarget
from scbd.model._presets import PRESETS, Preset, PresetName, fill_from_preset
from scbd.model._train import TRAINER_ARGUMENTS, TrainMixin, TrainSettings
from scbd.nn._groups import Groups

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from anndata import AnnData
    from torch import Tensor, nn

    from scbd._shared.checks import ImageSize
    from scbd.data._loading import ImageDataModule
    from scbd.data._sources import ImageSource
    from scbd.model._interfaces import Alpha
    from scbd.model._reference_cells import StandardizeBy
    from scbd.nn._decoders import Likelihood

# With set_size="auto" and at least _MIN_PERTURBATIONS_FOR_SETS perturbations, the supervised loss also contrasts means
# of _DEFAULT_SET_SIZE cells of the same perturbation, because a single cell rarely shows which of the many
# perturbations it has received.
_MIN_PERTURBATIONS_FOR_SETS, _DEFAULT_SET_SIZE = 30, 4
# With smoothing="auto", the label smoothing of the supervised loss is _SCREEN_SMOOTHING in a perturbation screen, in
# which many cells do not show their perturbation. Data with fewer than _MIN_PERTURBATIONS_FOR_SETS labels and without
# controls are no screen: the labels are classes that the cells show, and are not smoothed.
_SCREEN_SMOOTHING = 2 / 3
# maximum number of cells used to test whether the mean z_c differs between perturbations, before a warning that z_c
# does not carry the perturbation
_MEANS_TEST_CELLS = 2_048
# maximum number of training cells from which we compute whether environments change the meaning of image features
_INTERACTION_CELLS = 2_048
# prefix of the names of the decoder's losses in model.history, for example of decoder_train_loss
_DECODER_PREFIX = "decoder_"
# maximum number of cells from which traverse computes the mean z_c of a perturbation
_MAX_CELLS_PER_MEAN = 1000
# maximum deviation from unit length of an embedding that is decoded; it allows for rounding errors
_UNIT_LENGTH_TOLERANCE = 0.01
# default learning rate of decoder training, and its default batch size if the encoders are frozen; a batch then need
# not hold several cells of a perturbation
_DECODER_LR, _DECODER_BATCH_SIZE = 1e-3, 128
# further keyword arguments of SCBDModel for the preprocessing of inputs, with their defaults
_PREPARATION: dict[str, Any] = {"intensity": "auto", "standardize": True, "clip": 20.0}
# further keyword arguments of SCBDModel for the linear transform of features, with their defaults
_TRANSFORM: dict[str, Any] = {"whitening": "auto", "whitening_kwargs": None}
# further keyword arguments of SCBDModel for the torch module (networks and losses), with their defaults
_MODULE: dict[str, Any] = {"set_size": "auto", "norm": "batch", "include_self": False}


class SCBDModel(DecodeMixin, ImageModel):
    r"""Supervised Contrastive Block Disentanglement (Makino et al., 2025).

    The model learns two embeddings from images of cells, or from features of cells or wells. The embedding :math:`z_c`
    is clustered by the perturbation ``y`` and is invariant to the environment ``e``. The embedding :math:`z_s` is
    clustered by the environment.

    z_c can be made invariant to several environments per cell, such as plate and position (see ``e_columns`` of
    :meth:`setup_anndata`).

    Parameters
    ----------
    adata
        Table of cells that was registered with :meth:`setup_anndata`.
    encoder
        Name of the encoder, or any torch module that maps inputs to vectors:

        - for images, ``"resnet18"``, ``"resnet50"``, ``"densenet121"`` or ``"small"`` (for tiny images and quick runs);
        - for features, ``"linear"``, a linear map that starts as the identity, or ``"mlp"``.

        ``"auto"`` stands for ``"resnet18"`` for images if the machine had an accelerator when :meth:`setup_anndata` was
        called, and otherwise for ``"small"``. For features, it stands for ``"mlp"`` if there are at least ten rows per
        feature, and otherwise for ``"linear"``.
    preset
        Name of a set of settings for one use case. Settings that you give replace those of the preset.

        - ``"screen"``: embed the cells of a perturbation screen without effects of the environment. All defaults in
          this signature are those of this preset.
        - ``"domain_generalization"``: classify images of an environment that is not in the training data, such as
          digits in another colour. Inputs are not standardised and not augmented, and labels are smoothed:
          ``standardize=False, standardize_by=None, augment=False, n_latent=128, style_target="ye", smoothing=2/3``.
          :meth:`train` makes 1,500 steps of 1,024 images. Use ``augment=True`` for images without an upper side, such
          as tissue.
        - ``"paper"``: train the published method with its hyperparameters:
          ``encoder="resnet18", alpha=1, invariance="listing", smoothing=0, set_size=1, include_self=True,
          standardize_by=None, augment=False``. :meth:`train` makes 25,000 steps of 2,048 cells with a constant learning
          rate of 0.0001. The paper uses ``alpha=1`` for 34 wells and ``alpha=192`` for two balanced environments.

        The presets ``"domain_generalization"`` and ``"paper"`` are for images.
    n_latent
        Dimension of both embeddings. Default: 64. The default for the encoder ``"linear"`` is the number of features,
        but at most 300 if features are whitened. The paper uses 64 for batch correction and 128 for domain
        generalisation.
    alpha
        Weight of the invariance loss, which makes z_c independent of the environment. With 0, z_c is not made
        invariant. With too large a weight, z_c does not learn the perturbation. The scale of alpha depends on the form
        of the invariance loss, ``invariance``. With ``"auto"``, which requires ``invariance="variance"``, alpha is
        adapted during training, see :class:`scbd.model.AutoAlpha`.
    style_target
        Labels by which z_s is clustered. ``"e"`` stands for the environment; if there are several columns of
        environments, the loss is averaged over them. ``"ye"`` stands for the combination of perturbation and
        environment (domain generalisation). With `None`, the model has no z_s, as in the paper's ablation.
    invariance
        Form of the invariance loss. ``"variance"`` is the variance that the environment explains among cells of the
        same perturbation, in the intermediate representations of the encoder and in z_c; alpha is then in nats per
        standard error of this variance, see :func:`scbd.nn.invariance_statistic`. The other forms are described in
        :func:`scbd.nn.invariance_loss`.
    smoothing
        Label smoothing of the supervised loss of z_c: fraction of the target probability that is distributed evenly
        over all cells, instead of over the cells of the same perturbation. Cells that do not show an effect of their
        perturbation then need not be separated from other cells. See :func:`scbd.nn.supervised_contrastive_loss`.
        ``"auto"`` stands for 2/3 in a perturbation screen: if controls were named in :meth:`setup_anndata`, or if there
        are 30 or more perturbations. Otherwise, the labels are taken for classes that the cells show, and ``"auto"``
        stands for 0.
    temperature
        Temperature of the contrastive losses of z_c and z_s.
    image_size
        Size to which images are resized, in pixels per side, or a pair ``(height, width)`` for images that are not
        square. `None` keeps the stored size. The cost of training is proportional to the area.
    augment
        Whether each training image is flipped and rotated by a multiple of 90 degrees at random. Use `False` if the
        orientation of images has a meaning, as for digits.
    standardize_by
        Reference cells, from which the mean and the standard deviation of each environment are estimated. With these,
        inputs are standardised per environment, separately for each channel or feature.

        - ``"controls"``: the controls of the environment.
        - ``"cells"``: all cells of the environment. If environments contain different perturbations, this removes part
          of the effects of perturbations, too.
        - ``"auto"``: the first choice that applies: all cells, if most environments contain the same perturbations, not
          counting controls; controls, if 90 % of the cells lie in environments with four or more controls; all cells,
          if most environments contain dozens of perturbations; otherwise as with `None`. Without named controls,
          images are also treated as with `None` if one environment holds more than 3/4 of the training cells.
        - `None`: inputs are standardised over all environments together, as in the published method.

        With ``"auto"``, an environment whose perturbations differ from those of most environments is standardised with
        its controls, whether or not it was seen in training. The residual offset of each environment in z_c is
        estimated in the same way, see :meth:`get_latent_representation`. z_s is computed from inputs that are not
        standardised per environment.
    registry
        Set-up of a saved model. Only :meth:`load` uses this argument, to create a model without data.
    **module_kwargs
        Further settings, with defaults in parentheses:

        - ``intensity`` (``"auto"``): transformation of pixel values, see :class:`scbd.nn.Preprocess`.
        - ``standardize`` (`True`): whether each channel, or feature, is centred and scaled to standard deviation 1.
        - ``clip`` (20): number of standard deviations at which scaled features are clipped.
        - ``whitening``: linear transform of features before each encoder: ``"within"``, ``"controls"``, ``"lda"``,
          ``"plda"`` or `None`, see :class:`scbd.nn.InputTransform`. By default ``"plda"`` before the encoder
          ``"linear"`` and ``"within"`` before ``"mlp"``.
        - ``whitening_kwargs``: further arguments of :class:`scbd.nn.InputTransform`.
        - ``norm``: normalisation layers of the named image encoders, see :func:`scbd.nn.build_encoder`.
        - ``set_size``: number of cells of one perturbation that are averaged into one point before the embedding is
          scaled to unit length. The supervised loss contrasts these points in addition to the single cells, because the
          mean of several cells may show a weak effect that single cells do not show. The default is 4 if there are at
          least 30 perturbations and the encoder is not ``"linear"``. Otherwise, it is 1, and only single cells are
          contrasted.
        - ``include_self`` (`False`): whether the denominator of the contrastive losses includes the similarity of a
          cell to itself. The paper's formula does not include this similarity, but the published code does.

    Raises
    ------
    TypeError
        If an argument does not exist.
    ValueError
        If a value is not valid, or if a setting for features is given for images, or the reverse.

    Examples
    --------
    >>> scbd.SCBDModel.setup_anndata(adata, y_key="gene", e_key="well")
    >>> model = scbd.SCBDModel(adata)
    >>> model.train()
    >>> adata.obsm["X_scbd_c"] = model.get_latent_representation(block="c")
    >>> adata.obsm["X_scbd_c"].shape
    (240, 64)
    """

    traits = replace(ImageModel.traits, side_by_side=True)
    module: SCBDModule
    decoder_settings_: dict[str, Any]

    @fill_from_preset
    def __init__(
        self,
        adata: AnnData | None = None,
        encoder: str | nn.Module = "auto",
        *,
        preset: PresetName = "screen",
        n_latent: int | None = None,
        alpha: Alpha = "auto",
        style_target: StyleTarget | None = "e",
        invariance: Invariance = "variance",
        smoothing: float | Literal["auto"] = "auto",
        temperature: float = 0.1,
        image_size: ImageSize | None = None,
        augment: bool = True,
        standardize_by: StandardizeBy = "auto",
        registry: dict[str, Any] | None = None,
        **module_kwargs: Any,
    ) -> None:
        super().__init__(adata, registry)
        # models saved by earlier versions may name their only kind of positives that remains
        if module_kwargs.get("positives") == "all":
            del module_kwargs["positives"]
        self.init_params_ = self._get_init_params(locals())
        given = {**locals(), **module_kwargs}
        # A subclass whose constructor has other arguments replaces init_params_, but not these attributes.
        self._preset_name = preset
        self._preset_settings = {name: value for name, value in self._preset.model.items() if given[name] == value}
        further = {**_PREPARATION, **_TRANSFORM, **_MODULE}
        known = [*keyword_names(SCBDModel.__init__), *further]
        check_constructor_arguments(type(self), module_kwargs, known)
        further |= module_kwargs
        if preset != "screen" and self._inputs.image_key is None:
            msg = f"preset={preset!r} is for images, and the model was set up with features: leave it out."
            raise ValueError(msg)
        self.traits = replace(self.traits, plan_kwargs={**self.traits.plan_kwargs, **PRESETS[preset].plan})
        encoder = self._encoder(encoder)
        self._encoder_name = encoder_name(encoder)
        own = {name: further[name] for name in _PREPARATION}
        preprocess = self._make_preprocess(image_size=image_size, augment=augment, standardize_by=standardize_by, **own)
        transform = self._make_transform(encoder, further["whitening"], n_latent, further["whitening_kwargs"])
        # The linear encoder is a square matrix, so that the default dimension of its embedding is that of its inputs.
        if n_latent is None:
            n_latent = (preprocess if transform is None else transform).output_shape[0] if encoder == "linear" else 64
        many = len(self._registered(Y_REGISTRY)["categories"]) >= _MIN_PERTURBATIONS_FOR_SETS
        if smoothing == "auto":
            smoothing = _SCREEN_SMOOTHING if many or self._control_codes is not None else 0.0
        if further["set_size"] == "auto":
            further["set_size"] = _DEFAULT_SET_SIZE if many and encoder != "linear" else 1
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
        self.decoder_settings_ = {}

    @property
    def health(self) -> dict[str, float]:
        """Diagnostics of z_c at the end of training; empty before training.

        The diagnostics are computed on one batch of validation cells, or on one batch of training cells if there are no
        validation cells:

        - ``supervised_c``: supervised loss of z_c, in nats, without label smoothing.
        - ``ceiling``: value of the supervised loss, in nats, for a z_c that is collapsed to one point: log(B - 1) for B
          contrasted points, or log B with ``include_self=True``.
        - ``learned_c``: normalised supervised information: information of z_c about the perturbations, 0 if z_c is
          collapsed, and at most 1. Controls do not count if they were named in :meth:`setup_anndata`.
        - ``environment_c``: effect of the environment on z_c, in standard errors of a batch. Values between -2 and 2
          arise by chance. See :func:`scbd.nn.invariance_statistic`.
        - ``spread``: total variance of z_c, from 0 (collapsed) to 1.
        - ``effective_rank``: effective number of dimensions that z_c uses, at most ``n_latent``.
        - ``collapsed``: 1 if z_c is nearly a single point and the means of perturbations in z_c do not differ more than
          means after permuting the labels; otherwise 0.
        - ``final_alpha``: alpha, the weight of the invariance loss; with ``alpha="auto"``, the value at the end of
          training.
        """
        return self.results_.diagnostics or {}

    @explain_arguments(*keyword_names(TrainMixin.train), *TRAINER_ARGUMENTS)
    def train_decoder(
        self,
        *,
        likelihood: Likelihood | Literal["auto"] = "auto",
        width: int = 64,
        joint: bool = False,
        weight: float = 1.0,
        cycle: float | None = None,
        **training: Any,
    ) -> None:
        """Train a decoder, which shows as pictures the information that the embeddings z_c and z_s contain.

        z_c and z_s each add a separate contribution to the picture (paper, appendix A), so that one of them can be
        exchanged, see :meth:`swap_blocks`. By default the encoders are frozen, as in the paper, and the embeddings do
        not change.

        Parameters
        ----------
        likelihood
            ``"bernoulli"`` for intensities between 0 and 1, or ``"gaussian"``, with one learned scale, for any
            intensities. ``"auto"`` selects ``"bernoulli"`` if the model prepares images with ``intensity="scale"`` and
            their intensities then lie between 0 and 1, and ``"gaussian"`` otherwise.
        width
            Number of channels of the decoder's layers. The paper uses 256, which takes sixteen times as many operations
            as 64.
        joint
            Whether to train encoders and decoder together (which the paper leaves to future work). Training continues
            from the current weights of the encoders, which need not have been trained before.
        weight
            Weight of the reconstruction loss in joint training, where it is added to the contrastive losses. The
            reconstruction loss is in nats per value (pixel and channel). With a larger weight, z_c contains more
            information on individual cells.
        cycle
            Weight of the cycle loss: pictures are decoded from z_c of one cell and z_s of another and embedded again,
            and the new embeddings should equal these z_c and z_s. Default: 1 in joint training of a model with z_c and
            z_s, otherwise 0, as in the paper.
        **training
            Arguments of :meth:`train`, such as ``max_steps``. Some defaults differ: ``lr`` is 0.001. With frozen
            encoders, the length is 400 epochs for up to 20,000 training cells, and fewer epochs for more cells;
            ``batch_size`` is 128, or half the number of cells if there are fewer than 256; and batches are drawn at
            random, without equal numbers of cells per perturbation. The default split is the one that the encoders were
            trained with.

        Raises
        ------
        ValueError
            If the encoders are not trained and ``joint`` is false, or if a setting does not fit the data. The error is
            raised before training starts.
        scbd.model.TrainingDiverged, KeyboardInterrupt, SystemExit
            If training diverges or is interrupted, see :meth:`train`. The partly trained decoder is kept; if the run
            made no step, an earlier decoder is kept.

        Notes
        -----
        With frozen encoders, ``history`` holds the loss as ``decoder_train_loss`` and ``decoder_validation_loss``. In
        joint training, ``history`` holds the reconstruction loss as ``train_reconstruction`` and
        ``validation_reconstruction``, next to the losses of the encoders. The cycle loss, a squared distance between 0
        and 4, is named ``decoder_train_cycle`` and ``decoder_validation_cycle``, or in joint training ``train_cycle``
        and ``validation_cycle``.
        """
        if not joint and not self.is_trained_:
            msg = "The encoders are not trained: call train() first, or train both together with joint=True."
            raise ValueError(msg)
        if not weight > 0:
            msg = f"weight={weight}: the reconstruction needs a positive weight."
            raise ValueError(msg)
        if cycle is None:
            cycle = float(joint and self.module.style is not None)
        check_number("cycle", cycle)
        if cycle and self.module.style is None:
            msg = f"cycle={cycle} needs two blocks, and this {type(self).__name__} has z_c alone: leave it out."
            raise ValueError(msg)
        self._adata_or_attached(None)
        decoder = self.module.make_decoder(self._choose_likelihood(likelihood), width)
        bound = inspect.signature(self.train).bind(**training)
        bound.apply_defaults()
        max_steps = self._training_defaults.get("max_steps") if joint else None
        settings = TrainSettings(**bound.arguments).with_defaults(_DECODER_LR, max_steps)
        if not joint:
            n, p = settings.batch_size, training.get("perturbations_per_batch")
            # at most half of the rows form a batch, so that even a table of a few wells gives two batches
            most = max(2, min(_DECODER_BATCH_SIZE, self.adata.n_obs // 2))
            settings = settings.replace(batch_size=most if n is None else n, perturbations_per_batch=p)
        objective = DecoderObjective(self.module, decoder, weight if joint else None, cycle=cycle)
        run = self._fit(objective, settings, contrastive=joint)
        try:
            if joint:
                self._store_run(run)
        finally:  # an interrupted run keeps the partly trained decoder, as it keeps the partly trained encoders
            if run.moved:
                self._remove_decoder()
                self.module.decoder = decoder.to(self.module.device).eval()
                self.decoder_settings_ = {"joint": joint, "steps": run.settings["steps"]} | objective.own_settings
        if not joint:
            self.history_ = (self.history_ or {}) | run.history.frames(prefix=_DECODER_PREFIX)
            if run.error is not None:
                raise run.error

    @explain_arguments()
    def traverse(
        self,
        indices: Sequence[int] | np.ndarray,
        to: str | float,
        adata: AnnData | None = None,
        *,
        n_steps: int = 5,
        batch_size: int | None = None,
    ) -> np.ndarray:
        r"""Decode pictures of cells while z_c moves in steps from their own perturbation to another perturbation.

        The pictures predict the effect of the other perturbation on a cell in the cell's own environment. For :math:`t`
        from 0 to 1, z_c is replaced by :math:`z_c + t\,(\mu_{to} - \mu_{own})`, scaled to unit length. Here
        :math:`\mu_{own}` is the mean z_c of all cells with the cell's own perturbation, and :math:`\mu_{to}` is the
        mean z_c of all cells with the other perturbation. Each mean is computed from at most 1,000 cells, a random
        choice that is the same in each call.

        The cell's z_s does not change. The difference between the cell and the mean of its perturbation is kept as
        well: before scaling, the last z_c differs from :math:`\mu_{to}` as the first differs from :math:`\mu_{own}`.

        Parameters
        ----------
        indices
            Row numbers of the cells to start from, for example controls, or a boolean mask.
        to
            Perturbation to move to, a label of ``y_key``.
        adata
            Table that holds the cells of ``indices``, and all cells from which the means are computed, with their
            perturbations. Default: the training data.
        n_steps
            Number of pictures per cell. The first is the reconstruction of the cell, the last is at :math:`t = 1`.
        batch_size
            Number of cells per forward pass. Default: 256.

        Returns
        -------
        Array, float32 ``(len(indices), n_steps, C, H, W)`` of images, or ``(len(indices), n_steps, F)`` of features, in
        the units of :meth:`reconstruct`.

        Raises
        ------
        KeyError
            If no cell has the perturbation ``to``.
        ValueError
            If no decoder has been trained, or ``n_steps`` is less than 2.

        See Also
        --------
        scbd.pl.traverse : Draws these pictures.
        """
        self._require_decoder()
        check_count("n_steps", n_steps, least=2)
        batch_size = count_or_default("batch_size", batch_size, DECODE_BATCH_SIZE)
        adata = self._adata_or_attached(adata)
        y_key = self.registry_["setup_args"]["y_key"]
        found = label_values(adata.obs, as_columns(y_key)).cat
        labels, wanted = found.rename_categories(label_text).astype(str).to_numpy(), label_text(to)
        if wanted not in labels:
            msg = f"to={to!r}: no cell has this perturbation. Those of {y_key!r} are {join_first(np.unique(labels))}."
            raise KeyError(msg)
        rows = row_numbers(indices, adata.n_obs)
        blocks = {block: self._embedded(block, adata, rows, batch_size) for block in block_names(self.module)}
        names, places = np.unique([wanted, *labels[rows]], return_inverse=True)
        means = []
        for name in names:
            same = np.random.default_rng(0).permutation(np.flatnonzero(labels == name))[:_MAX_CELLS_PER_MEAN]
            means.append(self._embedded("c", adata, np.sort(same), batch_size).mean(0))
        step = means[places[0]] - np.stack(means)[places[1:]]
        path = blocks["c"][:, None] + np.linspace(0, 1, n_steps, dtype=np.float32)[:, None] * step[:, None]
        path /= np.linalg.norm(path, axis=-1, keepdims=True)
        others = [np.repeat(z, n_steps, axis=0) for block, z in blocks.items() if block != "c"]
        images = self.decode(path.reshape(-1, path.shape[-1]), *others, batch_size=batch_size)
        return images.reshape(len(rows), n_steps, *images.shape[1:])

    def _choose_likelihood(self, asked: Likelihood | Literal["auto"]) -> Likelihood:
        """Return the likelihood of the decoder: the requested one, or for ``"auto"`` one that fits the intensities.

        To decide if a Bernoulli likelihood fits, the intensities of up to 512 random cells are read.

        Raises
        ------
        ValueError
            If the Bernoulli likelihood is requested and the intensities are not between 0 and 1.
        """
        if asked == "gaussian" or (asked == "auto" and self.module.preprocess.intensity != "scale"):
            return "gaussian"
        n = self._source(self._adata_or_attached(None)).shape[0]
        values = self.get_intensities(indices=np.sort(np.random.default_rng(0).permutation(n)[:CELLS_READ_PER_BLOCK]))
        low, high = float(values.min()), float(values.max())
        within = low >= -1e-4 and high <= 1 + 1e-4
        if asked == "bernoulli" and not within:
            msg = (
                f"likelihood='bernoulli' needs intensities between 0 and 1, these reach from {low:.3g} to {high:.3g}: "
                "use likelihood='gaussian'."
            )
            raise ValueError(msg)
        return ("bernoulli" if within else "gaussian") if asked == "auto" else asked

    def _check_embeddings(self, embeddings: Sequence[Tensor]) -> None:
        lengths = torch.stack([z.norm(dim=1) for z in embeddings])
        # the comparison is negated so that the result is also true for embeddings with NaN
        off = ~((lengths - 1).abs() <= _UNIT_LENGTH_TOLERANCE)
        if off.any():
            rows = np.flatnonzero(off.any(0).numpy())
            msg = (
                f"The embeddings to decode have other lengths than 1 in {len(rows)} rows ({join_first(rows)}): take "
                "those of cells with center=None, and divide points between cells by their length."
            )
            raise ValueError(msg)

    @contextmanager
    def _without_untrained_parts(self) -> Iterator[None]:
        """Detach the decoder from the model during a training run, so that the run neither trains nor saves it."""
        decoder, settings = self.module.decoder, self.decoder_settings_
        self.module.decoder, self.decoder_settings_ = None, {}
        try:
            yield
        finally:
            self.module.decoder, self.decoder_settings_ = decoder, settings

    def _remove_decoder(self) -> None:
        """Remove the decoder, which was trained on embeddings of earlier weights, and its history."""
        self.module.decoder = None
        self.decoder_settings_ = {}
        if self.history_:
            self.history_ = {
                name: frame for name, frame in self.history_.items() if not name.startswith(_DECODER_PREFIX)
            }

    @property
    def _training_defaults(self) -> Mapping[str, Any]:
        return {**super()._training_defaults, **self._preset.training}

    @property
    def _preset(self) -> Preset:
        return PRESETS[self._preset_name]

    def _before_training(self, y: np.ndarray, e: np.ndarray) -> None:
        """Give the module the codes of all registered labels before a run.

        They include labels that were registered after the model was created.

        Parameters
        ----------
        y, e
            Codes of perturbation and environment of the training cells, ``(N,)``.
        """
        self.module.set_label_codes(environment_column_codes(self.registry_), self._control_codes)

    def _fit_preprocessing(
        self, source: ImageSource, y: np.ndarray, e: np.ndarray, rows: np.ndarray, seed: int
    ) -> None:
        """Fit the preprocessing, and warn if images that are standardised per environment mislead.

        See :meth:`TrainMixin._fit_preprocessing` for the parameters.
        """
        is_first_run = not self.module.is_fitted
        super()._fit_preprocessing(source, y, e, rows, seed)
        if is_first_run and self._inputs.image_key is not None and self.alignment_.kinds:
            sample = np.sort(np.random.default_rng(seed).permutation(rows)[:_INTERACTION_CELLS])
            blocks = np.array_split(sample, -(-len(sample) // CELLS_READ_PER_BLOCK))
            images = (torch.from_numpy(source.read(block)) for block in blocks)
            warn_if_environments_mislead(self.module, images, torch.from_numpy(y[sample]), torch.from_numpy(e[sample]))

    def _after_training(self, data: ImageDataModule) -> None:
        """Compute the diagnostics :attr:`health` of z_c after a run.

        A warning is raised if z_c does not carry the perturbation, or if the model has overfitted the training cells.

        Parameters
        ----------
        data
            Data module of the run. Its first validation batch is used, or its first training batch if the run had no
            validation cells.
        """
        # largest fraction of the total loss that the invariance loss has made up, over the logged training steps
        history, largest = self.history_ or {}, 0.0
        if "train_loss" in history:
            loss, invariance = (history[f"train_{name}"][f"train_{name}"] for name in ("loss", "invariance_c"))
            alpha = history["alpha"]["alpha"] if "alpha" in history else self.module.alpha
            largest = min(float((alpha * invariance / loss).abs().max()), 1.0)
        remedy = advice_on_collapse(self.module, largest)
        batch = data.example_batch()
        self.results_.diagnostics, warning = measure_health(self.module, batch, self._has_different_means, remedy)
        if warning:
            warn_user(warning)

    def _has_different_means(self) -> bool:
        """Test whether the mean z_c differs between perturbations more than between random groups (permuted labels).

        The test uses validation cells if there are at least two, and training cells otherwise.
        """
        rows = self.validation_indices if len(self.validation_indices) > 1 else self.train_indices
        rows = np.sort(np.random.default_rng(0).permutation(rows)[:_MEANS_TEST_CELLS])
        z = self.get_latent_representation(indices=rows, enable_progress_bar=False)
        return means_differ(torch.from_numpy(z), Groups(torch.from_numpy(self._codes(self.adata, Y_REGISTRY)[rows])))

    def _summary_lines(self) -> list[tuple[str, str]]:
        """Return the lines of ``print(model)`` about the embeddings, the encoder and the losses.

        Each line is a pair of a heading and a text.
        """
        module = self.module
        blocks, style = "z_c alone", ""
        if module.style_target is not None:
            blocks, style = "z_c, z_s", f", z_s clustered by {' × '.join(module.style_target)}"
        alpha = f"{module.alpha:g}" if module.auto_alpha is None else "auto"
        if module.auto_alpha is not None and self.is_trained_:
            alpha = f"auto, {float(module.current_alpha):.2g} in the end"
        matched = "single cells" if module.set_size == 1 else f"cells and sets of {module.set_size}"
        networks = f"{self._encoder_name} → r ({module.content.n_features}) → z ({module.content.n_latent})"
        preset = []
        if self._preset.model:
            own = [
                f"{name}={value:.2g}" if isinstance(value, float) else f"{name}={value!r}"
                for name, value in self._preset_settings.items()
            ]
            preset = [("preset", f"{self._preset_name}: {', '.join(own) or 'all of its settings are replaced'}")]
        return [
            *preset,
            ("blocks", f"{blocks}: {networks}, {describe_n_parameters(module)}"),
            (
                "objective",
                f"alpha {alpha} ({module.invariance}), temperature {module.temperature:g}, "
                f"smoothing {module.smoothing:.2g}, {matched} matched{style}",
            ),
        ]

    def _result_lines(self) -> list[tuple[str, str]]:
        """Return the lines of ``print(model)`` about the diagnostics of z_c and the decoder, after training.

        Each line is a pair of a heading and a text.
        """
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
