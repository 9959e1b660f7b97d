"""Tables that are far wider than long: the map before a linear encoder, learned where rows differ."""

from __future__ import annotations

from functools import partial
from unittest import mock

import numpy as np
from _compare import Row, interleaved, largest_difference
from _scale import Scale

from scbd._shared.linear_maps import random_rotation
from scbd.nn import InputTransform, _input_transform

# compounds and their wells, and as many components as a linear encoder keeps
_LABELS, _REPLICATES, _COMPONENTS = 48, 3, 300


def fitted(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """What the rows are mapped to, in the axes in which labels differ, before these are turned; their signs are any."""
    transform = InputTransform(features.shape[1], "plda", n_components=min(_COMPONENTS, features.shape[1]))
    transform.fit(features, labels)
    z = features @ transform.matrix.numpy() + transform.offset.numpy()
    return np.abs(z @ random_rotation(z.shape[1]).T)[:, : _LABELS - 1]


def among_all_features(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The same from covariances of all features."""
    with mock.patch.object(_input_transform, "span_of_rows", return_value=None):
        return fitted(features, labels)


def rows(scale: Scale) -> list[Row]:
    """A row a number of features."""
    found, rng = [], np.random.default_rng(0)
    labels = np.repeat(np.arange(_LABELS), _REPLICATES)
    for n_features in scale.of((1000, 3000), (700,)):
        features = rng.normal(size=(len(labels), n_features)) + rng.normal(size=(_LABELS, n_features))[labels]
        table = features.astype(np.float32)
        forms = (partial(form, table, labels) for form in (among_all_features, fitted))
        row, naive, ours = interleaved(*forms, min(scale.repeats, 3))
        claim = f"learn the map of {len(labels)} wells × {n_features:,} features"
        found.append({"claim": claim} | row | {"difference": largest_difference(ours, naive)})
    return found
