"""Preprocessing of images on the device: resizing, intensity transform, standardisation, flips and rotations."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scbd._shared.checks import check_choice, size_after_resizing
from scbd.nn._environment_scaling import EnvironmentScaling
from scbd.nn._groups import copy_to

if TYPE_CHECKING:
    from collections.abc import Iterable

    from scbd._shared.checks import ImageSize

Intensity = Literal["auto", "scale", "arcsinh", "none"]

# number of values that the dtype uint16 can represent
_N_UINT16 = 2**16
# largest standard deviation of a constant channel that can be due to rounding, relative to the root mean square of the
# channel's values
_RELATIVE_SD_TOLERANCE = 1e-6


class Preprocess(nn.Module):
    r"""Preprocessing of images: conversion to float, resizing, intensity transform and standardisation.

    Optionally, images are augmented during training by flips and by rotations by multiples of 90 degrees.

    Parameters
    ----------
    image_shape
        Shape ``(C, H, W)`` of the images as stored.
    dtype
        Name of the NumPy dtype of the images as stored, for example ``"uint8"``.
    image_size
        Side of the resized images in pixels (bilinear interpolation with antialiasing). Images that are not square
        require a pair ``(height, width)``, which may change their aspect ratio. By default (`None`) images are not
        resized.
    intensity
        Transform of the values of pixels:

        - ``"scale"`` divides integers by the largest value of their dtype.
        - ``"arcsinh"`` computes :math:`\operatorname{arcsinh}(x)`, which compresses the long tail of fluorescence
          counts (paper, appendix A).
        - ``"none"`` does not change the values.
        - ``"auto"`` (default) is ``"arcsinh"`` for uint16, ``"scale"`` for uint8 and ``"none"`` for floating-point
          numbers.
    standardize
        Whether to subtract each channel's mean and divide by its standard deviation. Both are estimated by :meth:`fit`.
    augment
        Whether to augment images during training. Each image is flipped and rotated at random into one of its eight
        orientations, or one of four if images are not square.

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
        # look-up table of the outputs for all uint16 values of each channel, and the mean and sd for which it was
        # computed
        self._table: tuple[Tensor, Tensor] | None = None
        self.environments: EnvironmentScaling | None = None

    mean: Tensor
    sd: Tensor
    fitted: Tensor

    def fit(self, batches: Iterable[Tensor], controls: np.ndarray | None = None) -> None:
        """Estimate the mean and standard deviation of each channel over all pixels of all images.

        Parameters
        ----------
        batches
            Batches of images as stored, ``(B, C, H, W)`` each.
        controls
            Not used: a channel is standardised by all images, whether they show controls or not.

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
                "Some cells have NaN or infinite pixels, from which no mean of a channel can be estimated: drop them, "
                "or repair their images (np.isfinite(images).all(axis=(1, 2, 3)) is True for valid cells)."
            )
            raise ValueError(msg)
        mean = total / n
        sd = (squares / n - mean.square()).clamp(min=0).sqrt()
        # the sd of a constant channel is only rounding error; it is replaced by 1, so that the channel becomes zero
        # instead of amplified noise
        sd = torch.where(sd > _RELATIVE_SD_TOLERANCE * (squares / n).sqrt(), sd, 1.0)
        self.mean.copy_(mean[:, None, None])
        self.sd.copy_(sd[:, None, None])
        self.fitted.fill_(True)

    def forward(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Resize, transform and standardise images ``(B, C, H, W)`` as stored, and augment them during training.

        Parameters
        ----------
        images
            Images as stored, of any dtype.
        generator
            Random generator (on the CPU) for the orientations of augmented images. Without it, images are not
            augmented.

        Returns
        -------
        Preprocessed images, ``(B, C, *output_shape[1:])``, float32, in the channels-last memory layout.
        """
        images = self.scaled_inputs(images)
        if self.augment and self.training and generator is not None:
            images = random_orientation(images, generator)
        return images.contiguous(memory_format=torch.channels_last)

    def within(self, prepared: Tensor, images: Tensor, environments: EnvironmentScaling, codes: Tensor) -> Tensor:
        """Standardise preprocessed images ``(B, C, H, W)`` per environment, given codes of environments ``(B, K)``.

        The argument ``images``, the images as stored, is not used. It exists because :meth:`FeatureScaling.within`,
        which is called in the same way, uses the features as stored.
        """
        return environments(prepared, codes)

    def measured(self, images: Tensor) -> Tensor:
        """Preprocess images ``(B, C, H, W)`` as stored, without standardisation and without augmentation; float32.

        The result has the units of :meth:`intensities`.
        """
        return self.intensities(self.scaled_inputs(images))

    def intensities(self, images: Tensor) -> Tensor:
        """Undo the standardisation of preprocessed images ``(B, C, H, W)``.

        The result is in units of transformed intensities: the intensity transform (such as arcsinh) is not undone.
        """
        return images * self.sd + self.mean if self.standardize else images

    def scaled(self, intensities: Tensor) -> Tensor:
        """Standardise images ``(B, C, H, W)`` whose standardisation was undone by :meth:`intensities`."""
        return self._standardized(intensities.clone())

    def scaled_inputs(self, images: Tensor) -> Tensor:
        """Preprocess images as stored like :meth:`forward`, but without augmentation.

        The statistics of environments are estimated from the resulting images.
        """
        return (
            self._transform_with_table(images)
            if self._is_table_faster(images)
            else self._standardized(self._transform(images))
        )

    def _standardized(self, images: Tensor) -> Tensor:
        return images.sub_(self.mean).div_(self.sd) if self.standardize else images

    def _is_table_faster(self, images: Tensor) -> bool:
        """Return whether preprocessing is faster with a look-up table of all values of each channel.

        This is the case for many uint16 pixels on a CPU, where computing arcsinh is slow, unless images are resized.
        """
        resized = images.shape[-2:] != self.output_shape[1:]
        slow = self.intensity == "arcsinh" and images.dtype == torch.uint16 and images.device.type == "cpu"
        return slow and not resized and images.numel() > len(self.mean) * _N_UINT16

    def _transform_with_table(self, images: Tensor) -> Tensor:
        """Preprocess uint16 images with a look-up table of the outputs for all 65,536 values of each channel.

        The result is the same as that of the computation without a table.
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
        """Return a float32 copy of the images, resized and with transformed intensities, but not standardised.

        To save memory, the operations change this copy in place. The caller may change the copy in place as well.
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
    """Flip and rotate each image of a batch ``(B, C, H, W)`` at random into one of its eight orientations.

    Images that are not square have four orientations.
    """
    n, channels, height, width = images.shape
    across, down, transposed = torch.rand(3, n, generator=generator).numpy() < 0.5
    orientation = across + 2 * down + 4 * transposed * (height == width)
    # the number, within the batch, of the pixel that each pixel of the result is copied from
    pixels = _orientations(height, width, images.device).index_select(0, copy_to(images.device, orientation))
    pixels += torch.arange(0, n * height * width, height * width, device=images.device)[:, None]
    flat = images.permute(0, 2, 3, 1).reshape(-1, channels).index_select(0, pixels.flatten())
    return flat.view(n, height, width, channels).permute(0, 3, 1, 2)


@lru_cache(maxsize=8)
def _orientations(height: int, width: int, device: torch.device) -> Tensor:
    """Return, for each of eight orientations, the number of the pixel that is copied to each pixel, ``(8, H * W)``."""
    pixels = torch.arange(height * width, device=device).view(height, width)
    flipped = [pixels.flip(axes) for axes in ([], [1], [0], [0, 1])]
    return torch.stack([image.flatten() for image in (*flipped, *(image.T for image in flipped))])
