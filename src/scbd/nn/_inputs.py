"""From integer images to what an encoder takes, on the device, saved with the model."""

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

from scbd._checks import check_choice, check_count, check_number, inflect, resized_to
from scbd._linear_maps import (
    covariance,
    discriminants,
    inverse_of_varying,
    label_means,
    span_of_few,
    turn,
    whitening,
    within_covariance,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from scbd._checks import ImageSize

Intensity = Literal["auto", "scale", "arcsinh", "none"]

_N_UINT16 = 2**16
# of the size of a channel's values
_ROUNDING = 1e-6


class Preprocess(nn.Module):
    r"""Float, resize, intensity transform, standardise; flips and right-angle rotations while training.

    Parameters
    ----------
    image_shape
        ``(C, H, W)`` of the images as stored.
    dtype
        Name of their numpy dtype, for example ``"uint8"``.
    image_size
        Resize to this many pixels a side (bilinear, antialiased); images that are not square want a pair
        ``(height, width)``, which may stretch them. `None` keeps the size.
    intensity
        ``"scale"`` divides integers by their largest value; ``"arcsinh"`` takes :math:`\operatorname{arcsinh}(x)`,
        which tames the long tail of fluorescence counts (paper, appendix A); ``"none"`` leaves values as they are;
        ``"auto"`` is ``"arcsinh"`` for uint16, ``"scale"`` for uint8 and ``"none"`` for floats.
    standardize
        Subtract each channel's mean and divide by its standard deviation, both learned by :meth:`fit`.
    augment
        While training, put each image into one of its eight orientations (four when it is not square).

    Attributes
    ----------
    mean, sd
        Buffers of shape ``(C, 1, 1)``: 0 and 1 until :meth:`fit`.

    Raises
    ------
    ValueError
        If an argument is not known, or a number of pixels a side would squash images that are not square.

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
        self.output_shape = (channels, *resized_to(image_size, height, width))
        self.register_buffer("mean", torch.zeros(channels, 1, 1))
        self.register_buffer("sd", torch.ones(channels, 1, 1))
        self.register_buffer("fitted", torch.tensor(not standardize))
        self._table: tuple[Tensor, Tensor] | None = None  # statistics, and what they make of every value
        self.environments: EnvironmentScaling | None = None

    mean: Tensor
    sd: Tensor
    fitted: Tensor

    def fit(self, batches: Iterable[Tensor], controls: np.ndarray | None = None) -> None:
        """Learn each channel's mean and standard deviation over all pixels of some batches of stored images.

        Parameters
        ----------
        batches
            Images as stored, ``(B, C, H, W)`` each.
        controls
            Not looked at: a channel has one scale, whatever was done to a cell.

        Raises
        ------
        ValueError
            If there is no image to learn from, or one holds a NaN or an infinity.
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
        # a channel of one value, which varies by rounding, stays at zero rather than becoming noise
        sd = torch.where(sd > _ROUNDING * (squares / n).sqrt(), sd, 1.0)
        self.mean.copy_(mean[:, None, None])
        self.sd.copy_(sd[:, None, None])
        self.fitted.fill_(True)

    def forward(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Prepare stored images ``(B, C, H, W)`` of any dtype; float32, channels last in memory.

        Parameters
        ----------
        images
            As stored.
        generator
            Source of the random orientations (on the CPU).
        """
        images = self.scaled_inputs(images)
        if self.augment and self.training and generator is not None:
            images = random_orientation(images, generator)
        return images.contiguous(memory_format=torch.channels_last)

    def within(self, prepared: Tensor, images: Tensor, environments: EnvironmentScaling, codes: Tensor) -> Tensor:
        """Prepared images ``(B, C, H, W)`` standardised within environments ``codes (B, K)``."""
        return environments(prepared, codes)

    def measured(self, images: Tensor) -> Tensor:
        """Stored images ``(B, C, H, W)`` in the units of :meth:`intensities`, as they lie; float32."""
        return self.intensities(self.scaled_inputs(images))

    def intensities(self, images: Tensor) -> Tensor:
        """What prepared images ``(B, C, H, W)`` were before they were standardised."""
        return images * self.sd + self.mean if self.standardize else images

    def scaled(self, intensities: Tensor) -> Tensor:
        """Intensities ``(B, C, H, W)``, as :meth:`intensities` returns them, standardised again."""
        return self._standardized(intensities.clone())

    def scaled_inputs(self, images: Tensor) -> Tensor:
        """Stored images as :meth:`forward` makes them, without what is random: what environments are learned from."""
        return self._looked_up(images) if self._worth_a_table(images) else self._standardized(self._transform(images))

    def _standardized(self, images: Tensor) -> Tensor:
        return images.sub_(self.mean).div_(self.sd) if self.standardize else images

    def _worth_a_table(self, images: Tensor) -> bool:
        """Whether each value of each channel is better computed once: on a processor, arcsinh is slow."""
        resized = images.shape[-2:] != self.output_shape[1:]
        slow = self.intensity == "arcsinh" and images.dtype == torch.uint16 and images.device.type == "cpu"
        return slow and not resized and images.numel() > len(self.mean) * _N_UINT16

    def _looked_up(self, images: Tensor) -> Tensor:
        """The same numbers from a table of all 65,536 values of each channel."""
        statistics = torch.cat([self.mean, self.sd])
        if self._table is None or not torch.equal(self._table[0], statistics):
            values = torch.arange(_N_UINT16, dtype=torch.int32).to(torch.uint16).view(1, 1, 1, -1)
            values = self._standardized(self._transform(values.repeat(1, len(self.mean), 1, 1)))
            self._table = statistics, values.flatten()
        offsets = torch.arange(len(self.mean), dtype=torch.int32) * _N_UINT16
        pixels = images.permute(0, 2, 3, 1).to(torch.int32, memory_format=torch.contiguous_format).add_(offsets)
        return self._table[1].index_select(0, pixels.view(-1)).view(pixels.shape).permute(0, 3, 1, 2)

    def _transform(self, images: Tensor) -> Tensor:
        """A copy in float32, free to be changed in place, and changed in place: these tensors are large."""
        images = images.to(torch.float32, memory_format=torch.channels_last, copy=True)
        if self.image_size is not None and images.shape[-2:] != self.output_shape[1:]:
            images = F.interpolate(images, self.output_shape[1:], mode="bilinear", antialias=True, align_corners=False)
        if self.intensity == "scale":
            return images.div_(self.scale)
        if self.intensity == "arcsinh":
            return images.arcsinh_()
        return images


def random_orientation(images: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Put each image of a batch ``(B, C, H, W)`` into a random one of its eight (not square: four) orientations."""
    choice = torch.rand(3, len(images), generator=generator).lt(0.5)
    if images.shape[-1] != images.shape[-2]:
        choice[2] = False
    turned = torch.empty_like(images)
    # each image is copied once: to flip the whole batch for each choice takes three times as long
    for orientation in itertools.product((False, True), repeat=3):
        rows = (choice == torch.tensor(orientation)[:, None]).all(0).nonzero()[:, 0].to(images.device)
        if not len(rows):
            continue
        across, down, transposed = orientation
        some = images[rows].flip([axis for axis, wanted in ((-1, across), (-2, down)) if wanted])
        turned[rows] = some.transpose(-1, -2) if transposed else some
    return turned


logger = logging.getLogger(__name__)

# standard deviations of a normal distribution in its median absolute deviation
_MAD = 1.4826
# controls that are enough to take the scale from
_CONTROLS = 16


class FeatureScaling(nn.Module):
    r"""Robust scaling and clipping of features: :math:`(x - \mathrm{median}) / (1.4826\, \mathrm{MAD})`.

    Median and median absolute deviation (MAD) are those of the controls, where these are known, else of all training
    cells: what controls vary by has the same size in every feature. A feature whose MAD is 0, being mostly one value,
    is scaled by its standard deviation; one that controls do not vary in, by what all training cells vary by; and one
    that is constant there, too, becomes 0. Differences of a millionth of a feature's largest value are rounding.

    Parameters
    ----------
    n_features
        Number of features ``F``.
    standardize
        Whether to scale; `False` leaves values as they are.
    clip
        Scaled values are cut off at so many standard deviations; `None` leaves outliers in.

    Attributes
    ----------
    mean, sd
        Buffers of shape ``(F,)``: centre and scale, 0 and 1 until :meth:`fit`; the scale of what is constant is 0.

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
        """Learn each feature's centre and scale from some rows.

        Parameters
        ----------
        batches
            Features as stored, ``(B, F)`` each.
        controls
            Which of all their rows are controls, boolean ``(N,)``; they count alone if they are at least 16. A log
            message says so if they are fewer.

        Raises
        ------
        ValueError
            If there is no row to learn from, one holds a NaN or an infinity, or no feature varies. A log message says
            how many do not, if some do.
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
        if controls is not None and controls.sum() >= _CONTROLS:
            reference = features[controls]
        elif controls is not None:
            said = "Features are scaled by all training cells: %d of them %s, and scaling by controls takes %d."
            logger.warning(said, controls.sum(), inflect(controls.sum(), "is a control", "are controls"), _CONTROLS)
        centre = np.median(reference, axis=0)
        spread = _spread(reference, centre)
        if reference is not features and not spread.all():
            still = spread == 0
            spread[still] = _spread(features, np.median(features, axis=0))[still]
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
        """Prepare stored features ``(B, F)`` of any dtype, float32."""
        return self._cut(self.scaled(features))

    def scaled(self, features: Tensor) -> Tensor:
        """Features ``(B, F)``, stored or as :meth:`intensities` returns them, scaled and not cut off; float32."""
        features = features.to(torch.float32)
        if not self.standardize:
            return features
        # divided by infinity, what was constant stays out of everything
        return (features - self.mean) / self.sd.masked_fill(self.sd == 0, math.inf)

    # what environments are learned from; of images, what is stored is no intensity yet
    scaled_inputs = scaled

    def within(self, prepared: Tensor, features: Tensor, environments: EnvironmentScaling, codes: Tensor) -> Tensor:
        """Stored features ``(B, F)`` standardised within environments ``codes (B, K)``, and cut off only then."""
        return self._cut(environments(self.scaled(features), codes))

    def _cut(self, scaled: Tensor) -> Tensor:
        if self.clip is None or not self.standardize:
            return scaled
        # an infinite value is no outlier
        return scaled.clamp(-self.clip, self.clip).masked_fill(scaled.isinf(), math.nan)

    def measured(self, features: Tensor) -> Tensor:
        """Stored features ``(B, F)`` in the units of :meth:`intensities`, which are their own: not clipped; float32."""
        return features.to(torch.float32)

    def intensities(self, features: Tensor) -> Tensor:
        """What prepared features ``(B, F)`` were before they were scaled."""
        if not self.standardize:
            return features
        return features * self.sd + self.mean


def _spread(features: np.ndarray, centre: np.ndarray) -> np.ndarray:
    """MAD in standard deviations, else the standard deviation, else 0, of each feature ``(F,)``."""
    mad = _MAD * np.median(np.abs(features - centre), axis=0)
    sd = features.std(0, dtype=np.float64)
    kept = [np.where(inverse_of_varying(spread, features) > 0, spread, 0) for spread in (mad, sd)]
    return np.where(kept[0] > 0, *kept)


Whitening = Literal["within", "controls", "lda", "plda"]

# of the covariance of label means towards the identity: a few hundred labels say little of a thousand directions
_SHRINKAGE = 0.1
# variance between labels, in units of that within, below which it is the rounding of means that are alike
_ALIKE = 1e-9


class InputTransform(nn.Module):
    r"""A linear map of scaled features, learned from training rows before the first step, and saved with the network.

    With :math:`S_w` the covariance of cells around the mean of their label,

    ``"within"``
        :math:`(S_w + \gamma S_p + \lambda I)^{-1/2}`, which makes variation that has nothing to do with labels alike in
        all directions (within-class covariance normalisation). :math:`S_p` is the covariance of the controls' means by
        position, where both are known: where every plate has one layout, a position repeats as a perturbation does, and
        would be taken for one.
    ``"controls"``
        The same of the controls alone (sphering).
    ``"lda"``
        After ``"within"``, the directions in which the means of labels differ most, alike in length (linear
        discriminants, shrunken); of L labels there are L - 1, and what is asked for beyond is 0.
    ``"plda"``
        The same, each times :math:`b / (b + 1 / n)`: of the variance of a profile, the mean of as many rows as a label
        has in the middle (n), the share that belongs to labels (probabilistic discriminants). Axes are turned at
        random, so that scaling each of them leaves the weights alone.

    The mean of the controls, where they are known, else of all cells, is mapped to 0. Where the means of all labels are
    the same, as those of plates that were standardised one by one, the discriminants have no direction to choose, and
    do what ``"within"`` does.

    Parameters
    ----------
    n_features
        Number of features ``F``.
    kind
        The form, see above.
    n_components
        Dimension ``K`` of what comes out, at most ``F``: the directions of the largest variance, of labels for the
        discriminants.
    regularization
        :math:`\lambda`, in units of the scaled features' variance.
    position_weight
        :math:`\gamma`.

    Attributes
    ----------
    matrix, offset
        Buffers ``(F, K)`` and ``(K,)``.

    Raises
    ------
    ValueError
        If an argument is not known, or out of range.

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
        """Learn the map.

        Parameters
        ----------
        features
            Scaled features of training rows, ``(N, F)``.
        labels
            Label of each, ``(N,)``.
        controls
            Which of them are controls, boolean ``(N,)``.
        positions
            Position of each on its plate, ``(N,)``.

        Raises
        ------
        ValueError
            If no label has two rows, all rows have one label, or ``"controls"`` has fewer than two controls.
        """
        basis = span_of_few(features, self.output_shape[0])
        if basis is None:
            matrix = self._matrix(features, labels, controls, positions)
        else:  # the same map, learned where there is something to learn: a cube of the rows, not of the features
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
        """The map of features ``(N, D)``, be it in coordinates of their own, ``(D, K)``."""
        spread = self._spread(features, labels, controls, positions)
        matrix = whitening(spread, self.regularization)
        n_components = self.output_shape[0]
        between = self._between(features, labels, matrix)
        if between is not None:
            # of which a profile is the mean
            rows = float(np.median(np.unique(labels, return_counts=True)[1])) if self.kind == "plda" else None
            matrix = matrix @ discriminants(
                between, shrinkage=_SHRINKAGE, n_components=n_components, rows=rows, n_features=len(self.matrix)
            )
            if rows is None:  # beyond what so many labels differ in, directions are of nothing, and as long as others
                matrix[:, len(np.unique(labels)) - 1 :] = 0
            else:  # whoever scales each axis, as probes do, would undo the weights: axes are to mean nothing
                matrix = matrix @ turn(n_components)
        elif n_components < len(self.matrix):
            # of whitened cells, the directions in which there is more than variation within labels
            matrix = matrix @ discriminants(matrix.T @ covariance(features) @ matrix, n_components=n_components)
        return matrix

    def _between(self, features: np.ndarray, labels: np.ndarray, matrix: np.ndarray) -> np.ndarray | None:
        """Covariance of the whitened means of labels, if discriminants are asked for and labels differ in anything."""
        if self.kind not in ("lda", "plda"):
            return None
        _, means, _ = label_means(features, labels)
        if len(means) < 2:
            msg = f"whitening={self.kind!r} learns what labels differ in, and all training cells have one label."
            raise ValueError(msg)
        between = matrix.T @ covariance(means) @ matrix
        return between if np.trace(between) > _ALIKE * len(self.matrix) else None

    def _spread(
        self, features: np.ndarray, labels: np.ndarray, controls: np.ndarray | None, positions: np.ndarray | None
    ) -> np.ndarray:
        """Covariance of what has nothing to do with labels."""
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


# of a variance of order 1, what is rounding
_CONSTANT = 1e-10


class Moments(NamedTuple):
    """Of each channel of some cells, over pixels and cells, float64 ``(C,)`` each."""

    mean: Tensor
    variance: Tensor
    """Within groups of cells."""
    mean_error: Tensor
    """Squared standard error of the mean; what varies at random is a cell, not a pixel."""
    variance_error: Tensor
    """That of the variance; at least what it is of normal values, in units of whose logarithm it is used."""


class ChannelSums:
    """Sums over cells, batch by batch, from which their :class:`Moments` are made.

    Parameters
    ----------
    n_groups
        Number of groups of cells, such as environments: variances are those within.
    """

    def __init__(self, n_groups: int = 1) -> None:
        self._counts = torch.zeros(n_groups, dtype=torch.float64)
        self._sums: Tensor | None = None

    def add(self, values: Tensor, groups: Tensor | None = None) -> None:
        """Count cells in: ``values (B, C)`` or ``(B, C, H, W)``, and the group of each cell, int64 ``(B,)``."""
        pixels = values.detach().float().flatten(2) if values.ndim > 2 else values.detach().float()[:, :, None]
        # per cell on its device; sums in float64, which not every device has
        mean, square = (part.cpu().double() for part in (pixels.mean(2), pixels.square().mean(2)))
        groups = torch.zeros(len(mean), dtype=torch.int64) if groups is None else groups.cpu()
        powers = torch.stack([mean, square, mean.square(), mean * square, square.square()], 1)
        if self._sums is None:
            self._sums = torch.zeros(len(self._counts), *powers.shape[1:], dtype=torch.float64)
        self._sums.index_add_(0, groups, powers)
        self._counts += torch.bincount(groups, minlength=len(self._counts))

    @property
    def n_cells(self) -> list[int]:
        """How many so far, of each group."""
        return self._counts.long().tolist()

    def of(self, group: int) -> ChannelSums:
        """Those of one group of which there are cells."""
        assert self._sums is not None
        alone = ChannelSums()
        alone._sums, alone._counts = self._sums[group, None], self._counts[group, None]
        return alone

    def moments(self) -> Moments:
        """Of all cells so far. The mean is that of cells; where groups hold fewer than two on average, all are one.

        Raises
        ------
        ValueError
            If there are none.
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
        # of a cell, its pixels' mean squared distance from the mean of its group
        distance = square - mean.square()
        distance2 = square2 + 4 * mean**2 * mean2 + mean**4 - 4 * mean * product + 2 * mean**2 * square - 4 * mean**4
        scatter = (share * (distance2 - distance.square())).sum(0)
        within_cells, among_cells, scatter = (part.clamp(min=0) for part in (within_cells, among_cells, scatter))
        # distances from a mean of few cells are alike (of two, the same), however far off their variance is
        variance_error = torch.maximum(scatter / freedom, among_cells.square() * _log_variance_error(freedom))
        return Moments((share * mean).sum(0), within_cells + among_cells, among_cells / n, variance_error)


def _log_variance_error(freedom: Tensor) -> Tensor:
    """Mean squared error of the logarithm of a variance of normal values, with so many degrees of freedom."""
    half = freedom / 2
    return torch.polygamma(1, half) + (torch.digamma(half) - half.log()).square()


class Alignment(NamedTuple):
    """How a normalisation ``(x - m) / s`` must change, in its own units: ``m + s * shift`` and ``s * ratio``."""

    shift: Tensor
    """``(C,)``, float64."""
    ratio: Tensor
    """``(C,)``, float64."""


def align(reference: Moments, new: Moments, *, scale: bool = True) -> Alignment:
    r"""Change a normalisation such that new cells leave it as those of the reference do: in mean, and in variance.

    With means :math:`a, c` and standard deviations :math:`b, d` of reference and new cells, both behind the
    normalisation as it was, new values :math:`u` become :math:`a + b (u - c) / d`. Before, means and variances of new
    cells are drawn towards those of the reference, by what share of their squared differences over all channels (of
    variances, of their logarithms) is sampling (James and Stein, 1961; Smyth, 2004): a few cells, which tell little,
    change little. Channels that do not vary stay.

    Parameters
    ----------
    reference, new
        Of the same channels.
    scale
        Whether variances are aligned, too; `False` leaves the ratio 1.
    """
    varies = (reference.variance > _CONSTANT) & (new.variance > _CONSTANT)
    known, seen = (torch.where(varies, part.variance, 1.0) for part in (reference, new))
    difference = new.mean - reference.mean
    share = _more_than_sampling(difference / known.sqrt(), (new.mean_error + reference.mean_error) / known, varies)
    mean = reference.mean + share * difference
    error = (new.variance_error / seen.square() + reference.variance_error / known.square()) / 4
    share = _more_than_sampling((seen / known).log() / 2, error, varies & scale)
    # not of logarithms: a variance of two cells may be as small as any number by chance
    ratio = (1 + share * (seen / known - 1)).sqrt()
    return Alignment(torch.where(varies, mean - reference.mean * ratio, 0.0), ratio)


def _more_than_sampling(differences: Tensor, errors: Tensor, used: Tensor) -> Tensor:
    """What share of differences ``(C,)`` is more than sampling error, by their squares; 0 of channels not used."""
    if not bool(used.any()):
        return torch.zeros_like(differences)
    signal = (differences.square() - errors)[used].mean().clamp(min=0)
    share = signal / (signal + errors).clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(used, share, 0.0)


class EnvironmentScaling(nn.Module):
    r"""What an environment does to all of its cells alike, taken out of their values: :math:`(x - m_e) / s_e`.

    Of each channel of prepared images, each feature, or each dimension of an embedding. Mean and standard deviation of
    some cells of an environment, such as its controls, become those that such cells have over all environments. What
    few cells say is drawn towards these by what is sampling, see :func:`align`. Of several columns of environments,
    such as plate and position, one comes after the other.

    Parameters
    ----------
    n_channels
        Number of channels, features or dimensions ``C``.
    n_columns
        Number of columns of environments ``K``.
    scale
        Whether standard deviations are made alike, too.

    Attributes
    ----------
    n_cells
        Buffer ``(R,)``, int64: from how many cells an environment was learned, 0 if it was not; that of code ``j`` in
        column ``k`` is in row ``j * K + k``.
    shift, ratio
        Buffers ``(R + 1, C)``: :math:`m_e` and :math:`s_e`, 0 and 1 of those that were not learned, as in the last row.
    reference, of_controls
        Buffers ``(K, 4, C)``: the :class:`Moments` that the environments of a column are brought to, and those that
        controls have then, where environments are known by other cells; 0 where none were there to learn from.
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
        """Whether environments ``(B, K)`` were learned, boolean ``(B, K)``."""
        return torch.cat([self.n_cells, self.n_cells.new_zeros(1)])[self._rows(codes)] > 0

    @torch.no_grad()
    def learn(
        self,
        batches: Callable[[], Iterable[Tensor]],
        codes: Tensor,
        used: Tensor,
        controls: Tensor | None = None,
    ) -> None:
        """Learn environments that are not known yet; the first time, what all are brought to as well.

        An environment with fewer than two cells to learn from is not learned; those that are not finite are left out.

        Parameters
        ----------
        batches
            Reads values of some cells, as often as it is called.
        codes
            Their environments, int64 ``(N, K)``.
        used
            Which of them an environment is known by, boolean ``(N, K)``.
        controls
            Which of them are controls that an environment is known by where there are no others, boolean ``(N, K)``:
            they are brought to what the controls of the first time had become.
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
            self._bring(column, new, self.reference)
            if controls is not None:
                if not self.of_controls[column].any():
                    self._first(self.of_controls[column], sums(controls & self.known(codes)))
                if self.of_controls[column].any():
                    self._bring(column, sums(controls & ~self.known(codes)), self.of_controls)

    def _sums(self, column: int, batches: Callable[[], Iterable[Tensor]], codes: Tensor, wanted: Tensor) -> ChannelSums:
        """Of the environments of a column, over wanted cells, boolean ``(N, K)``, as the columns before leave them."""
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
        """Keep what the first cells have, to which those of new environments are brought."""
        if not reference.any() and any(sums.n_cells):
            reference.copy_(torch.stack(sums.moments()))

    def _bring(self, column: int, sums: ChannelSums, references: Tensor) -> None:
        """Bring environments of a column to its reference."""
        reference = Moments(*references[column].cpu().double())
        for code, n_cells in enumerate(sums.n_cells):
            if n_cells > 1:
                row = code * len(self.reference) + column
                aligned = align(reference, sums.of(code).moments(), scale=self.scale)
                self.n_cells[row] = n_cells
                self.shift[row], self.ratio[row] = aligned.shift.to(self.shift), aligned.ratio.to(self.ratio)

    def forward(self, values: Tensor, codes: Tensor) -> Tensor:
        """Values ``(B, C, H, W)`` or ``(B, C)`` of cells of environments ``codes (B, K)``; -1 for one not known."""
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
        """Make room for as many environments as were saved; a model of before has none."""
        if (saved := state_dict.get(prefix + "n_cells")) is not None:
            self._make_room(len(saved) // len(self.reference))
            super()._load_from_state_dict(state_dict, prefix, *args)
