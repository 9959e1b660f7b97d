"""The probe of the well as the authors' code has it, for the column beside ours."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def unstandardised_f1(embedding: np.ndarray, labels: np.ndarray) -> float:
    """Macro F1 of a label by logistic regression on the components *as they are*.

    Its penalty is on raw weights, so that of two embeddings that tell the same, the smaller one seems to tell less:
    :func:`scbd.metrics.label_probe`, whose components are standardised, does not depend on scale.

    Parameters
    ----------
    embedding
        ``(N, D)``.
    labels
        ``(N,)``.

    Returns
    -------
    The score on 40 % of the cells, the same ones in all runs; scikit-learn's defaults, a hundred iterations.

    References
    ----------
    Makino et al. (2025), appendix, batch prediction.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import f1_score
    from sklearn.model_selection import train_test_split

    train, test, known, asked = train_test_split(embedding, labels, train_size=0.6, random_state=0)
    with warnings.catch_warnings():  # a hundred iterations are the protocol, whether they are enough or not
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted = LogisticRegression(max_iter=100).fit(train, known)
    return float(f1_score(asked, fitted.predict(test), average="macro"))
