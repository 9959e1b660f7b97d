"""Preprocessing of stored images or features for an encoder; it runs on the device and is saved with the model."""

from __future__ import annotations

import itertools
import logging
import math
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scbd._checks import check_choice, check_count, check_number, inflect, size_after_resizing
from scbd._linear_maps import (
    covariance,
    discriminant_axes,
    inverse_deviations,
    label_means,
    random_rotation,
    span_of_rows,
    whitening_matrix,
    within_covariance,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from scbd._checks import ImageSize

Intensity = Literal["auto", "scale", "arcsinh", "none"]

# number of values of a uint16
_N_UINT16 = 2**16
# largest standard deviation of a constant channel due to rounding, relative to the root mean square of its values
_RELATIVE_SD_TOLERANCE = 1e-6


class Preprocess(nn.Module):
    r"""Preprocessing of images: conversion to float, resizing, intensity transform and standardisation.

    Optionally, images are augmented in training by flips and rotations by right angles.

    Parameters
    ----------
    image_shape
        ``(C, H, W)`` of the images as stored.
    dtype
        Name of their NumPy dtype, for example ``"uint8"``.
    image_size
        Side of the resized images in pixels (bilinear, antialiased). Images that are not square require a pair
        ``(height, width)``, which may stretch them. By default (`None`) images are not resized.
    intensity
        - ``"scale"`` divides integers by the largest value of their dtype.
        - ``"arcsinh"`` computes :math:`\operatorname{arcsinh}(x)`, which compresses the long tail of fluorescence
          counts (paper, appendix A).
        - ``"none"`` does not change values.
        - ``"auto"`` (default) is ``"arcsinh"`` for uint16, ``"scale"`` for uint8 and ``"none"`` for floats.
    standardize
        Whether to subtract each channel's mean and divide by its standard deviation. Both are estimated by :meth:`fit`.
    augment
        Whether to put each image into a random one of its eight orientations in training (four if it is not square).

    Attributes
    ----------
    mean, sd
        Mean and standard deviation of each channel, buffers of shape ``(C, 1, 1)``. They are 0 and 1 before
        :meth:`fit`.

    Raises
    ------
    ValueError
        If ``intensity`` is unknown, or ``image_size`` is a single number and images are not square.

    Examples
    --------
    >>> preprocess = scbd.nn.Preprocess((4, 32, 32), "uint8", image_size=16, standardize=False)
    >>> preprocess(torch.full((2, 4, 32, 32), 255, dtype=torch.uint8)).shape
    torch.Size([2, 4, 16, 16])
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        dtype: str,
        *,
        image_size: ImageSize | None = None,
        intensity: Intensity = "auto",
        standardize: bool = True,
        augment: bool = False,
    ) -> None:
        super().__init__()
        check_choice("intensity", intensity, Intensity)
        self.image_size = image_size
        self.intensity = (
            {"uint8": "scale", "uint16": "arcsinh"}.get(dtype, "none") if intensity == "auto" else intensity
        )
        self.scale = {"uint8": 255.0, "uint16": 65535.0}.get(dtype, 1.0)
        self.standardize = standardize
        self.augment = augment
        channels, height, width = image_shape
        self.output_shape = (channels, *size_after_resizing(image_size, height, width))
        self.register_buffer("mean", torch.zeros(channels, 1, 1))
        self.register_buffer("sd", torch.ones(channels, 1, 1))
        self.register_buffer("fitted", torch.tensor(not standardize))
        self._table: tuple[Tensor, Tensor] | None = None  # mean and sd, and the outputs for all uint16 values
        self.environments: EnvironmentScaling | None = None

    mean: Tensor
    sd: Tensor
    fitted: Tensor

    def fit(self, batches: Iterable[Tensor], controls: np.ndarray | None = None) -> None:
        """Estimate each channel's mean and standard deviation over all pixels of batches of stored images.

        Parameters
        ----------
        batches
            Batches of images as stored, ``(B, C, H, W)`` each.
        controls
            Not used. A channel is scaled by all images, whether they are controls or not.

        Raises
        ------
        ValueError
            If there are no images, or an image contains NaN or infinite values.
        """
        n, total, squares = 0, torch.zeros(()), torch.zeros(())
        for images in batches:
            pixels = self._transform(images.to(self.mean.device)).double()
            n += pixels.shape[0] * pixels.shape[2] * pixels.shape[3]
            total = total.to(pixels) + pixels.sum((0, 2, 3))
            squares = squares.to(pixels) + pixels.square().sum((0, 2, 3))
        if n == 0:
            msg = "Preprocess.fit was given no images."
            raise ValueError(msg)
        if not bool(squares.isfinite().all()):
            msg = (
                "Some cells have NaN or infinite pixels, from which no channel's mean can be learned: drop them, or "
                "repair their images (np.isfinite(images).all(axis=(1, 2, 3)) tells which are fine)."
            )
            raise ValueError(msg)
        mean = total / n
        sd = (squares / n - mean.square()).clamp(min=0).sqrt()
        # a constant channel, whose sd is only rounding error, becomes zero instead of amplified noise
        sd = torch.where(sd > _RELATIVE_SD_TOLERANCE * (squares / n).sqrt(), sd, 1.0)
        self.mean.copy_(mean[:, None, None])
        self.sd.copy_(sd[:, None, None])
        self.fitted.fill_(True)

    def forward(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Preprocess stored images ``(B, C, H, W)`` of any dtype.

        Parameters
        ----------
        images
            Images as stored.
        generator
            Random generator (on the CPU) for the orientations. Without it, images are not augmented.

        Returns
        -------
        Images of shape ``(B, C, *output_shape[1:])``, float32, channels last in memory.
        """
        images = self.scaled_inputs(images)
        if self.augment and self.training and generator is not None:
            images = random_orientation(images, generator)
        return images.contiguous(memory_format=torch.channels_last)

    def within(self, prepared: Tensor, images: Tensor, environments: EnvironmentScaling, codes: Tensor) -> Tensor:
        """Standardise preprocessed images ``(B, C, H, W)`` per environment, given codes ``(B, K)``.

        ``images``, the images as stored, are not used. They are an argument because :meth:`FeatureScaling.within` uses
        stored features.
        """
        return environments(prepared, codes)

    def measured(self, images: Tensor) -> Tensor:
        """Return stored images ``(B, C, H, W)`` in the units of :meth:`intensities`, without augmentation; float32."""
        return self.intensities(self.scaled_inputs(images))

    def intensities(self, images: Tensor) -> Tensor:
        """Undo the standardisation of preprocessed images ``(B, C, H, W)``; the intensity transform is not undone."""
        return images * self.sd + self.mean if self.standardize else images

    def scaled(self, intensities: Tensor) -> Tensor:
        """Standardise intensities ``(B, C, H, W)`` as returned by :meth:`intensities`."""
        return self._standardized(intensities.clone())

    def scaled_inputs(self, images: Tensor) -> Tensor:
        """Preprocess stored images as :meth:`forward` does, but without augmentation.

        The statistics of environments are estimated from these images.
        """
        return (
            self._transform_with_table(images)
            if self._is_table_faster(images)
            else self._standardized(self._transform(images))
        )

    def _standardized(self, images: Tensor) -> Tensor:
        return images.sub_(self.mean).div_(self.sd) if self.standardize else images

    def _is_table_faster(self, images: Tensor) -> bool:
        """Return whether a look-up table of all values of each channel is faster: on a CPU, arcsinh is slow."""
        resized = images.shape[-2:] != self.output_shape[1:]
        slow = self.intensity == "arcsinh" and images.dtype == torch.uint16 and images.device.type == "cpu"
        return slow and not resized and images.numel() > len(self.mean) * _N_UINT16

    def _transform_with_table(self, images: Tensor) -> Tensor:
        """Preprocess images with a look-up table of all 65,536 values of each channel.

        The result is the same as without the table.
        """
        statistics = torch.cat([self.mean, self.sd])
        if self._table is None or not torch.equal(self._table[0], statistics):
            values = torch.arange(_N_UINT16, dtype=torch.int32).to(torch.uint16).view(1, 1, 1, -1)
            values = self._standardized(self._transform(values.repeat(1, len(self.mean), 1, 1)))
            self._table = statistics, values.flatten()
        offsets = torch.arange(len(self.mean), dtype=torch.int32) * _N_UINT16
        pixels = images.permute(0, 2, 3, 1).to(torch.int32, memory_format=torch.contiguous_format).add_(offsets)
        return self._table[1].index_select(0, pixels.view(-1)).view(pixels.shape).permute(0, 3, 1, 2)

    def _transform(self, images: Tensor) -> Tensor:
        """Return a resized float32 copy of the images, with transformed intensities.

        The operations work in place on this copy to save memory. The caller may change it in place as well.
        """
        images = images.to(torch.float32, memory_format=torch.channels_last, copy=True)
        if self.image_size is not None and images.shape[-2:] != self.output_shape[1:]:
            images = F.interpolate(images, self.output_shape[1:], mode="bilinear", antialias=True, align_corners=False)
        if self.intensity == "scale":
            return images.div_(self.scale)
        if self.intensity == "arcsinh":
            return images.arcsinh_()
        return images


def random_orientation(images: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Put each image of a batch ``(B, C, H, W)`` into a random one of its eight orientations (four if not square)."""
    choice = torch.rand(3, len(images), generator=generator).lt(0.5)
    if images.shape[-1] != images.shape[-2]:
        choice[2] = False
    turned = torch.empty_like(images)
    # each image is copied only once; flipping the whole batch for each choice would take three times as long
    for orientation in itertools.product((False, True), repeat=3):
        rows = (choice == torch.tensor(orientation)[:, None]).all(0).nonzero()[:, 0].to(images.device)
        if not len(rows):
            continue
        across, down, transposed = orientation
        some = images[rows].flip([axis for axis, wanted in ((-1, across), (-2, down)) if wanted])
        turned[rows] = some.transpose(-1, -2) if transposed else some
    return turned


logger = logging.getLogger(__name__)

# standard deviation of a normal distribution, in units of its median absolute deviation
_SD_PER_MAD = 1.4826
# minimum number of controls from which scales of features are estimated
_MIN_CONTROLS = 16


class FeatureScaling(nn.Module):
    r"""Robust scaling and clipping of features: :math:`(x - \mathrm{median}) / (1.4826\, \mathrm{MAD})`.

    Median and median absolute deviation (MAD) are computed over the controls if there are at least 16, otherwise over
    all training cells. The variation of controls then has the same size in every feature. Some features are scaled
    differently:

    - A feature whose MAD is 0, because most cells have the same value, is scaled by its standard deviation.
    - A feature that does not vary among controls is scaled by its variation among all training cells.
    - A feature that is constant among all training cells becomes 0.

    Differences that could be due to rounding in the dtype of the features, about a millionth of a feature's largest
    value in float32, do not count as variation.

    Parameters
    ----------
    n_features
        Number of features ``F``.
    standardize
        Whether to scale. With `False`, values are neither scaled nor clipped.
    clip
        Scaled values are clipped to plus or minus this number of standard deviations. With `None`, outliers are kept.

    Attributes
    ----------
    mean, sd
        Centre and scale of each feature, buffers of shape ``(F,)``. They are 0 and 1 before :meth:`fit`. The scale of a
        constant feature is 0.

    Raises
    ------
    ValueError
        If ``clip`` is not above 0.

    Examples
    --------
    >>> scaling = scbd.nn.FeatureScaling(3)
    >>> features = torch.tensor([[1.0, 0.0, 7.0], [2.0, 0.0, 9.0], [3.0, 0.0, 300.0]])
    >>> scaling.fit([features])
    >>> scaling(features)[:, 1]  # was constant
    tensor([0., 0., 0.])
    """

    image_size = None
    intensity = "none"

    def __init__(self, n_features: int, *, standardize: bool = True, clip: float | None = 20.0) -> None:
        super().__init__()
        if clip is not None:
            check_number("clip", clip)
            if clip == 0:
                msg = "clip=0 leaves nothing of any feature: give a number of standard deviations, or None."
                raise ValueError(msg)
        self.standardize, self.clip = standardize, clip
        self.output_shape = (n_features,)
        self.register_buffer("mean", torch.zeros(n_features))
        self.register_buffer("sd", torch.ones(n_features))
        self.register_buffer("fitted", torch.tensor(not standardize))
        self.environments: EnvironmentScaling | None = None

    mean: Tensor
    sd: Tensor
    fitted: Tensor

    def fit(self, batches: Iterable[Tensor], controls: np.ndarray | None = None) -> None:
        """Estimate each feature's centre and scale.

        A warning is logged if there are controls but fewer than 16, if features do not vary among controls, or if
        features are excluded because they do not vary at all.

        Parameters
        ----------
        batches
            Batches of features as stored, ``(B, F)`` each.
        controls
            Which of the rows of all batches are controls, boolean ``(N,)``. If at least 16 rows are controls, only
            controls are used.

        Raises
        ------
        ValueError
            If there are no rows, a row contains NaN or infinite values, or no feature varies.
        """
        parts = [batch.float().numpy() for batch in batches]
        if not parts:
            msg = "FeatureScaling.fit was given no features."
            raise ValueError(msg)
        features = np.concatenate(parts)
        if not np.isfinite(features).all():
            msg = (
                "Some cells have missing or infinite features, from which no scale can be learned: drop them, or fill "
                "the values in (np.isfinite(features).all(axis=1) tells which are fine)."
            )
            raise ValueError(msg)
        reference = features
        if controls is not None and controls.sum() >= _MIN_CONTROLS:
            reference = features[controls]
        elif controls is not None:
            said = "Features are scaled by all training cells: %d of them %s, and scaling by controls takes %d."
            logger.warning(said, controls.sum(), inflect(controls.sum(), "is a control", "are controls"), _MIN_CONTROLS)
        centre = np.median(reference, axis=0)
        spread = _robust_scale(reference, centre)
        if reference is not features and not spread.all():
            still = spread == 0
            spread[still] = _robust_scale(features, np.median(features, axis=0))[still]
            if n := np.count_nonzero(spread[still]):
                still = inflect(
                    n, "feature does not vary among controls, and is", "features do not vary among controls, and are"
                )
                logger.warning("%d %s scaled by all training cells.", n, still)
        if not spread.any():
            msg = (
                "No feature varies among training cells by more than 32 bits can tell from its size: subtract from "
                "each its mean before."
            )
            raise ValueError(msg)
        if n := np.count_nonzero(spread == 0):
            logger.warning(
                "%d of %d features %s not vary among training cells, or by no more than 32 bits can resolve at %s "
                "size, and %s excluded. To keep a feature that does vary, subtract its mean before.",
                *(n, len(spread), inflect(n, "does", "do"), inflect(n, "its", "their"), inflect(n, "is", "are")),
            )
        self.mean.copy_(torch.from_numpy(centre))
        self.sd.copy_(torch.from_numpy(spread))
        self.fitted.fill_(True)

    def forward(self, features: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Scale and clip stored features ``(B, F)`` of any dtype; float32."""
        return self._cut(self.scaled(features))

    def scaled(self, features: Tensor) -> Tensor:
        """Scale features ``(B, F)``, stored or as returned by :meth:`intensities`, without clipping; float32."""
        features = features.to(torch.float32)
        if not self.standardize:
            return features
        # a constant feature is divided by infinity, so that it becomes 0
        return (features - self.mean) / self.sd.masked_fill(self.sd == 0, math.inf)

    # input of the environments' statistics; in Preprocess, the two methods differ, as stored images are no intensities
    scaled_inputs = scaled

    def within(self, prepared: Tensor, features: Tensor, environments: EnvironmentScaling, codes: Tensor) -> Tensor:
        """Standardise stored features ``(B, F)`` per environment, given codes ``(B, K)``, and clip the result.

        ``prepared`` is not used, since its values are clipped already.
        """
        return self._cut(environments(self.scaled(features), codes))

    def _cut(self, scaled: Tensor) -> Tensor:
        if self.clip is None or not self.standardize:
            return scaled
        # infinite values are invalid, not outliers: they become NaN
        return scaled.clamp(-self.clip, self.clip).masked_fill(scaled.isinf(), math.nan)

    def measured(self, features: Tensor) -> Tensor:
        """Return stored features ``(B, F)`` in the units of :meth:`intensities`: unscaled and not clipped; float32."""
        return features.to(torch.float32)

    def intensities(self, features: Tensor) -> Tensor:
        """Undo the scaling of features ``(B, F)``."""
        if not self.standardize:
            return features
        return features * self.sd + self.mean


def _robust_scale(features: np.ndarray, centre: np.ndarray) -> np.ndarray:
    """Compute the scale of each feature, ``(F,)``: 1.4826 MAD, the standard deviation if MAD is 0, or 0 if constant."""
    mad = _SD_PER_MAD * np.median(np.abs(features - centre), axis=0)
    sd = features.std(0, dtype=np.float64)
    kept = [np.where(inverse_deviations(spread, features) > 0, spread, 0) for spread in (mad, sd)]
    return np.where(kept[0] > 0, *kept)


Whitening = Literal["within", "controls", "lda", "plda"]

# shrinkage of the covariance of label means towards a multiple of the identity, since a few hundred labels are too few
# to estimate the covariance in a thousand directions
_SHRINKAGE = 0.1
# variance between labels, in units of the variance within labels, below which label means differ only by rounding
_BETWEEN_VARIANCE_TOLERANCE = 1e-9


class InputTransform(nn.Module):
    r"""Linear map of scaled features, fitted to training rows before the first step and saved with the network.

    Let :math:`S_w` be the covariance of cells around the mean of their label. The map is one of

    ``"within"``
        :math:`(S_w + \gamma S_p + \lambda I)^{-1/2}`, up to a rotation (within-class covariance normalisation).
        Variation that does not depend on labels then has the same variance in all directions. :math:`S_p` is the
        covariance of the means of controls at each plate position. It is used if controls and positions are given. If
        all plates have the same layout, each perturbation always has the same position, and an effect of the position
        looks like an effect of the perturbation.
    ``"controls"``
        :math:`(S_0 + \lambda I)^{-1/2}`, up to a rotation, with :math:`S_0` the covariance of the controls (sphering).
    ``"lda"``
        After ``"within"``, the directions in which the means of labels differ most, scaled equally (linear discriminant
        analysis with shrinkage). With L labels there are L - 1 directions. Further components are 0.
    ``"plda"``
        The same, each direction multiplied by :math:`b / (b + 1 / n)` (probabilistic linear discriminant analysis).
        :math:`b` is the variance between labels in this direction, and :math:`n` is the median number of rows per
        label. The factor is the proportion of the variance of a profile, the mean of n rows, that is due to labels. The
        axes are rotated by a fixed random rotation, so that scaling each axis (as probes and ``scanpy.pp.scale`` do)
        does not undo the weighting.

    The mean of the controls is mapped to 0 if controls are given, otherwise the mean of all cells. If the means of all
    labels are equal, there are no discriminants, and ``"lda"`` and ``"plda"`` do the same as ``"within"``. An example
    is plates as labels, after each plate was standardised.

    Parameters
    ----------
    n_features
        Number of features ``F``.
    kind
        The form of the map, see above.
    n_components
        Number of output dimensions ``K``, at most ``F``. The directions with the largest variance are kept, for the
        discriminants those with the largest variance between labels. Default: ``F``.
    regularization
        :math:`\lambda`, in units of the variance of the scaled features.
    position_weight
        :math:`\gamma`, the weight of the covariance between positions.

    Attributes
    ----------
    matrix, offset
        Buffers ``(F, K)`` and ``(K,)``. The output is ``features @ matrix + offset``.

    Raises
    ------
    ValueError
        If ``kind`` is unknown, or a number is out of range.

    References
    ----------
    Hatch, Kajarekar and Stolcke (2006), Within-class covariance normalization for SVM-based speaker recognition. Ioffe
    (2006), Probabilistic linear discriminant analysis.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> gene = np.repeat(np.arange(4), 50)
    >>> features = (rng.normal(size=(200, 6)) + gene[:, None]).astype(np.float32)
    >>> transform = scbd.nn.InputTransform(6, "plda", n_components=2)
    >>> transform.fit(features, gene)
    >>> transform(torch.from_numpy(features)).shape
    torch.Size([200, 2])
    """

    def __init__(
        self,
        n_features: int,
        kind: Whitening = "plda",
        *,
        n_components: int | None = None,
        regularization: float = 1.0,
        position_weight: float = 1.0,
    ) -> None:
        super().__init__()
        check_choice("whitening", kind, Whitening)
        check_number("regularization", regularization)
        check_number("position_weight", position_weight)
        n_components = n_features if n_components is None else n_components
        check_count("n_components", n_components)
        if n_components > n_features:
            msg = (
                f"n_components={n_components} (n_latent of a linear encoder): there are {n_features} features, and no "
                f"more directions. Give at most {n_features}."
            )
            raise ValueError(msg)
        self.kind, self.regularization, self.position_weight = kind, regularization, position_weight
        self.output_shape = (n_components,)
        self.register_buffer("matrix", torch.eye(n_features, n_components))
        self.register_buffer("offset", torch.zeros(n_components))
        self.register_buffer("fitted", torch.tensor(False))

    matrix: Tensor
    offset: Tensor
    fitted: Tensor

    def fit(
        self,
        features: np.ndarray,
        labels: np.ndarray,
        controls: np.ndarray | None = None,
        positions: np.ndarray | None = None,
    ) -> None:
        """Fit the map to training rows.

        Parameters
        ----------
        features
            Scaled features of training rows, ``(N, F)``.
        labels
            Label of each row, ``(N,)``.
        controls
            Which rows are controls, boolean ``(N,)``.
        positions
            Plate position of each row, ``(N,)``.

        Raises
        ------
        ValueError
            If no label has two rows (unless ``kind`` is ``"controls"``), if all rows have one label (``"lda"`` and
            ``"plda"``), if there are fewer than two controls (``"controls"``), or if ``regularization`` is 0 and the
            covariance has no inverse.
        """
        basis = span_of_rows(features, self.output_shape[0])
        if basis is None:
            matrix = self._matrix(features, labels, controls, positions)
        else:  # far fewer rows than features: the same map, fitted in the span of the rows, which is faster
            centred = features - features.mean(0, dtype=np.float64)
            matrix = basis @ self._matrix(centred @ basis, labels, controls, positions)
        known = controls is not None and controls.any()
        mean = features[controls if known else slice(None)].mean(0, dtype=np.float64)
        self.matrix.copy_(torch.from_numpy(matrix))
        self.offset.copy_(torch.from_numpy(-mean @ matrix))
        self.fitted.fill_(True)

    def forward(self, features: Tensor) -> Tensor:
        """Map features ``(B, F)`` to ``(B, K)``."""
        return features @ self.matrix + self.offset

    def _matrix(
        self,
        features: np.ndarray,
        labels: np.ndarray,
        controls: np.ndarray | None,
        positions: np.ndarray | None,
    ) -> np.ndarray:
        """Compute the matrix ``(D, K)`` of the map for features ``(N, D)``.

        ``D`` is the number of features, or the number of coordinates in the span of few rows.
        """
        spread = self._spread(features, labels, controls, positions)
        matrix = whitening_matrix(spread, self.regularization)
        n_components = self.output_shape[0]
        between = self._between(features, labels, matrix)
        if between is not None:
            # number of rows per profile (profile: mean of the rows of a label)
            rows = float(np.median(np.unique(labels, return_counts=True)[1])) if self.kind == "plda" else None
            matrix = matrix @ discriminant_axes(
                between, shrinkage=_SHRINKAGE, n_components=n_components, rows=rows, n_features=len(self.matrix)
            )
            if rows is None:  # L labels differ in L - 1 directions: further ones are arbitrary
                matrix[:, len(np.unique(labels)) - 1 :] = 0
            else:  # with rotated axes, scaling each axis does not undo the weights
                matrix = matrix @ random_rotation(n_components)
        elif n_components < len(self.matrix):
            # directions with the largest variance of whitened cells, where variance exceeds that within labels
            matrix = matrix @ discriminant_axes(matrix.T @ covariance(features) @ matrix, n_components=n_components)
        return matrix

    def _between(self, features: np.ndarray, labels: np.ndarray, matrix: np.ndarray) -> np.ndarray | None:
        """Compute the covariance of the whitened means of labels, ``(D, D)``.

        The result is `None` if ``kind`` has no discriminants, or if all labels have the same mean.
        """
        if self.kind not in ("lda", "plda"):
            return None
        _, means, _ = label_means(features, labels)
        if len(means) < 2:
            msg = f"whitening={self.kind!r} learns what labels differ in, and all training cells have one label."
            raise ValueError(msg)
        between = matrix.T @ covariance(means) @ matrix
        return between if np.trace(between) > _BETWEEN_VARIANCE_TOLERANCE * len(self.matrix) else None

    def _spread(
        self, features: np.ndarray, labels: np.ndarray, controls: np.ndarray | None, positions: np.ndarray | None
    ) -> np.ndarray:
        """Compute the covariance of variation that does not depend on labels, ``(D, D)``."""
        if self.kind == "controls":
            if controls is None or controls.sum() < 2:
                msg = (
                    "whitening='controls' learns from controls, and there are fewer than two among the training cells: "
                    "name them with control=…, or use another whitening."
                )
                raise ValueError(msg)
            return covariance(features[controls])
        if len(np.unique(labels)) == len(labels):
            msg = (
                f"Each of the {len(labels)} training cells has a label of its own, so that variation within "
                "labels is not known. Use replicates, or whitening=None."
            )
            raise ValueError(msg)
        spread = within_covariance(features, labels)
        if controls is not None and positions is not None and self.position_weight:
            _, means, _ = label_means(features[controls], positions[controls])
            if len(means) > 1:
                spread += self.position_weight * covariance(means)
        return spread


# variance below which a channel is constant up to rounding; standardised channels have a variance of about 1
_VARIANCE_TOLERANCE = 1e-10


class Moments(NamedTuple):
    """Mean and variance of each channel over pixels and cells, with their errors; float64 ``(C,)`` each."""

    mean: Tensor
    variance: Tensor
    """Variance within groups of cells."""
    mean_error: Tensor
    """Squared standard error of the mean. Cells, not pixels, are the independent observations."""
    variance_error: Tensor
    """Squared standard error of the variance, at least as large as for normally distributed values.

    For these, it is the squared variance times the mean squared error of its logarithm, because :func:`align` compares
    logarithms of variances."""


class ChannelSums:
    """Sums over cells, accumulated batch by batch, from which :class:`Moments` are computed.

    Parameters
    ----------
    n_groups
        Number of groups of cells, such as environments. Variances are computed within groups.
    """

    def __init__(self, n_groups: int = 1) -> None:
        self._counts = torch.zeros(n_groups, dtype=torch.float64)
        self._sums: Tensor | None = None

    def add(self, values: Tensor, groups: Tensor | None = None) -> None:
        """Add cells: ``values (B, C)`` or ``(B, C, H, W)``, and the group of each cell, int64 ``(B,)``."""
        pixels = values.detach().float().flatten(2) if values.ndim > 2 else values.detach().float()[:, :, None]
        # means per cell are computed on the device; sums in float64 on the CPU, since not every device supports float64
        mean, square = (part.cpu().double() for part in (pixels.mean(2), pixels.square().mean(2)))
        groups = torch.zeros(len(mean), dtype=torch.int64) if groups is None else groups.cpu()
        powers = torch.stack([mean, square, mean.square(), mean * square, square.square()], 1)
        if self._sums is None:
            self._sums = torch.zeros(len(self._counts), *powers.shape[1:], dtype=torch.float64)
        self._sums.index_add_(0, groups, powers)
        self._counts += torch.bincount(groups, minlength=len(self._counts))

    @property
    def n_cells(self) -> list[int]:
        """Number of cells added so far, per group."""
        return self._counts.long().tolist()

    def of(self, group: int) -> ChannelSums:
        """Return the sums of a single group that contains cells."""
        assert self._sums is not None
        alone = ChannelSums()
        alone._sums, alone._counts = self._sums[group, None], self._counts[group, None]
        return alone

    def moments(self) -> Moments:
        """Compute the moments of all cells added so far.

        The mean is the mean over cells, whatever their group. If groups hold fewer than two cells on average, all cells
        are treated as one group.

        Raises
        ------
        ValueError
            If no cell was added.
        """
        if self._sums is None:
            msg = "There are no cells to take means and variances of."
            raise ValueError(msg)
        sums, counts = self._sums[self._counts > 0], self._counts[self._counts > 0]
        n = counts.sum()
        if 2 * len(counts) > n:
            sums, counts = sums.sum(0, keepdim=True), n[None]
        mean, square, mean2, product, square2 = (sums / counts[:, None, None]).unbind(1)
        share = (counts / n)[:, None]
        within_cells = (share * (square - mean2)).sum(0)
        freedom = (n - len(counts)).clamp(min=1)
        among_cells = (share * (mean2 - mean.square())).sum(0) * n / freedom
        # d: squared distance of a cell's pixels from the mean of the cell's group, averaged over pixels;
        # ``distance`` is the mean of d over cells, ``distance2`` the mean of d squared
        distance = square - mean.square()
        distance2 = square2 + 4 * mean**2 * mean2 + mean**4 - 4 * mean * product + 2 * mean**2 * square - 4 * mean**4
        scatter = (share * (distance2 - distance.square())).sum(0)
        within_cells, among_cells, scatter = (part.clamp(min=0) for part in (within_cells, among_cells, scatter))
        # few cells have similar distances from their mean (two cells have the same), however wrong their variance is;
        # the scatter of the distances would then underestimate the error
        variance_error = torch.maximum(scatter / freedom, among_cells.square() * _log_variance_error(freedom))
        return Moments((share * mean).sum(0), within_cells + among_cells, among_cells / n, variance_error)


def _log_variance_error(freedom: Tensor) -> Tensor:
    """Return the mean squared error of the logarithm of a sample variance of normally distributed values.

    ``freedom`` is the number of degrees of freedom of the sample variance.
    """
    half = freedom / 2
    return torch.polygamma(1, half) + (torch.digamma(half) - half.log()).square()


class Alignment(NamedTuple):
    """Change of a normalisation ``(x - m) / s`` to the centre ``m + s * shift`` and the scale ``s * ratio``."""

    shift: Tensor
    """Shift of the centre in units of the old scale, ``(C,)``, float64."""
    ratio: Tensor
    """New scale divided by the old scale, ``(C,)``, float64."""


def align(reference: Moments, new: Moments, *, scale: bool = True) -> Alignment:
    """Compute how to change a normalisation so that new cells get the mean and the variance of reference cells.

    Let :math:`a, c` be the means and :math:`b, d` the standard deviations of reference and new cells after the original
    normalisation. New values :math:`u` become :math:`a + b (u - c) / d`.

    Before this, the means and variances of new cells are shrunk towards those of the reference (James and Stein, 1961;
    Smyth, 2004). The amount of shrinkage is the proportion of their squared differences over all channels that is
    sampling error. For variances, differences of logarithms are used. A small number of cells, whose estimates are
    imprecise, therefore changes the normalisation only slightly. Channels that do not vary are not changed.

    Parameters
    ----------
    reference, new
        Moments of the same channels, for reference cells and new cells.
    scale
        Whether to align variances as well. With `False`, the ratio is 1.
    """
    varies = (reference.variance > _VARIANCE_TOLERANCE) & (new.variance > _VARIANCE_TOLERANCE)
    known, seen = (torch.where(varies, part.variance, 1.0) for part in (reference, new))
    difference = new.mean - reference.mean
    share = _signal_fraction(difference / known.sqrt(), (new.mean_error + reference.mean_error) / known, varies)
    mean = reference.mean + share * difference
    error = (new.variance_error / seen.square() + reference.variance_error / known.square()) / 4
    share = _signal_fraction((seen / known).log() / 2, error, varies & scale)
    # shrink variances, not their logarithms: the variance of two cells can be arbitrarily small by chance
    ratio = (1 + share * (seen / known - 1)).sqrt()
    return Alignment(torch.where(varies, mean - reference.mean * ratio, 0.0), ratio)


def _signal_fraction(differences: Tensor, errors: Tensor, used: Tensor) -> Tensor:
    """Estimate, per channel, the proportion of squared differences that exceeds sampling error; 0 for unused channels.

    Parameters
    ----------
    differences
        Differences between new and reference cells, ``(C,)``.
    errors
        Squared standard errors of the differences, ``(C,)``.
    used
        Which channels are used, boolean ``(C,)``.
    """
    if not bool(used.any()):
        return torch.zeros_like(differences)
    signal = (differences.square() - errors)[used].mean().clamp(min=0)
    share = signal / (signal + errors).clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(used, share, 0.0)


class EnvironmentScaling(nn.Module):
    """Standardisation per environment, :math:`(x - m_e) / s_e`, to remove effects on all cells of an environment.

    It applies to each channel of preprocessed images, each feature, or each dimension of an embedding. Mean and
    standard deviation of an environment are estimated from its reference cells, such as its controls. After the
    standardisation, the reference cells of every environment have the mean and standard deviation that reference cells
    have over all environments. Estimates from few cells are shrunk towards the mean and standard deviation over all
    environments, in proportion to their sampling error (see :func:`align`). With several columns of environments, such
    as plate and position, one column is standardised after the other.

    Parameters
    ----------
    n_channels
        Number of channels, features or dimensions ``C``.
    n_columns
        Number of columns of environments ``K``.
    scale
        Whether to standardise the standard deviation as well as the mean.

    Attributes
    ----------
    n_cells
        Number of cells from which an environment was estimated, buffer ``(R,)``, int64; 0 if it was not estimated. The
        environment with code ``j`` in column ``k`` is in row ``j * K + k``.
    shift, ratio
        :math:`m_e` and :math:`s_e`, buffers ``(R + 1, C)``. They are 0 and 1 for environments that were not estimated,
        and in the last row, which is used for unknown environments.
    reference
        :class:`Moments` of the reference cells over all environments of a column, buffer ``(K, 4, C)``; 0 if not
        estimated. New environments are standardised to these moments.
    of_controls
        :class:`Moments` of controls after the standardisation, buffer ``(K, 4, C)``. They are used if reference cells
        are other cells than controls; 0 if not estimated.
    """

    n_cells: Tensor
    shift: Tensor
    ratio: Tensor
    reference: Tensor
    of_controls: Tensor

    def __init__(self, n_channels: int, n_columns: int = 1, *, scale: bool = True) -> None:
        super().__init__()
        self.scale = scale
        self.register_buffer("n_cells", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("shift", torch.zeros(1, n_channels))
        self.register_buffer("ratio", torch.ones(1, n_channels))
        for name in ("reference", "of_controls"):
            self.register_buffer(name, torch.zeros(n_columns, len(Moments._fields), n_channels))

    def known(self, codes: Tensor) -> Tensor:
        """Return whether environments with codes ``(B, K)`` were estimated, boolean ``(B, K)``."""
        return torch.cat([self.n_cells, self.n_cells.new_zeros(1)])[self._rows(codes)] > 0

    @torch.no_grad()
    def learn(
        self,
        batches: Callable[[], Iterable[Tensor]],
        codes: Tensor,
        used: Tensor,
        controls: Tensor | None = None,
    ) -> None:
        """Estimate the statistics of environments that were not estimated before.

        The first call also estimates the common moments of all environments (``reference``). An environment with fewer
        than two finite reference cells is not estimated. Cells with values that are not finite are excluded.

        Parameters
        ----------
        batches
            Function that returns an iterator over the values of all ``N`` cells. It is called several times.
        codes
            Environments of the cells, int64 ``(N, K)``; -1 if unknown.
        used
            Which cells are reference cells in each column, boolean ``(N, K)``.
        controls
            Controls that replace the reference cells in environments that were not estimated from these, boolean
            ``(N, K)``. Such an environment is standardised to the moments that the controls of the first call have
            after standardisation.
        """
        if not len(codes):
            return
        device = self.shift.device
        codes, used, controls = codes.to(device), used.to(device), None if controls is None else controls.to(device)
        self._make_room(int(codes.max()) + 1)
        for column in range(len(self.reference)):
            sums = partial(self._sums, column, batches, codes)
            new = sums(used & ~self.known(codes))
            self._first(self.reference[column], new)
            self._align_environments(column, new, self.reference)
            if controls is not None:
                if not self.of_controls[column].any():
                    self._first(self.of_controls[column], sums(controls & self.known(codes)))
                if self.of_controls[column].any():
                    self._align_environments(column, sums(controls & ~self.known(codes)), self.of_controls)

    def _sums(self, column: int, batches: Callable[[], Iterable[Tensor]], codes: Tensor, wanted: Tensor) -> ChannelSums:
        """Sum over selected cells, boolean ``(N, K)``, of a column, per environment.

        Values are standardised by the columns before this one.
        """
        of = codes[:, column]
        chosen, sums, start = wanted[:, column] & (of >= 0), ChannelSums(int(of.max()) + 1), 0
        if not chosen.any():
            return sums
        until = torch.where(torch.arange(codes.shape[1], device=codes.device) <= column, codes, -1)
        for batch in batches():
            part = slice(start, start := start + len(batch))
            finite = chosen[part] & batch.flatten(1).isfinite().all(1).to(codes.device)
            sums.add(self(batch, until[part])[finite], of[part][finite])
        return sums

    @staticmethod
    def _first(reference: Tensor, sums: ChannelSums) -> None:
        """Store the moments of the first cells as the reference for environments that are estimated later."""
        if not reference.any() and any(sums.n_cells):
            reference.copy_(torch.stack(sums.moments()))

    def _align_environments(self, column: int, sums: ChannelSums, references: Tensor) -> None:
        """Estimate shift and ratio that give each environment of a column the moments of its reference."""
        reference = Moments(*references[column].cpu().double())
        for code, n_cells in enumerate(sums.n_cells):
            if n_cells > 1:
                row = code * len(self.reference) + column
                aligned = align(reference, sums.of(code).moments(), scale=self.scale)
                self.n_cells[row] = n_cells
                self.shift[row], self.ratio[row] = aligned.shift.to(self.shift), aligned.ratio.to(self.ratio)

    def forward(self, values: Tensor, codes: Tensor) -> Tensor:
        """Standardise values ``(B, C, H, W)`` or ``(B, C)`` per environment, given codes ``(B, K)``.

        Values are not changed by environments that are unknown (code -1) or were not estimated.
        """
        if not len(self.n_cells):
            return values
        rows = self._rows(codes)
        shift, ratio = self.shift[rows[:, 0]], self.ratio[rows[:, 0]]
        for row in rows.T[1:]:
            shift, ratio = shift + ratio * self.shift[row], ratio * self.ratio[row]
        trailing = [1] * (values.ndim - 2)
        return (values - shift.view(*shift.shape, *trailing)).div_(ratio.view(*ratio.shape, *trailing))

    def _rows(self, codes: Tensor) -> Tensor:
        n_columns = len(self.reference)
        rows = codes * n_columns + torch.arange(n_columns, device=codes.device)
        return torch.where((codes < 0) | (rows >= len(self.n_cells)), len(self.n_cells), rows)

    def _make_room(self, n_codes: int) -> None:
        more = n_codes * len(self.reference) - len(self.n_cells)
        if more > 0:
            self.n_cells = torch.cat([self.n_cells, self.n_cells.new_zeros(more)])
            self.shift = torch.cat([self.shift, self.shift[-1:].expand(more, -1)])
            self.ratio = torch.cat([self.ratio, self.ratio[-1:].expand(more, -1)])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Allocate as many environments as were saved, before loading; older models have no environments to load."""
        if (saved := state_dict.get(prefix + "n_cells")) is not None:
            self._make_room(len(saved) // len(self.reference))
            super()._load_from_state_dict(state_dict, prefix, *args)
