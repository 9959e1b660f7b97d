"""The chance that is in the authors' Colored MNIST: one draw for all of their runs."""

from __future__ import annotations

import numpy as np

# of the training digits; the rest validate
TRAIN_SHARE = 0.8


def authors_draw(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Environments of the training digits, and which of them are trained on, as the paper's authors drew them.

    Parameters
    ----------
    n
        How many there are.

    Returns
    -------
    Codes, int64 ``(n,)``: an independent fair coin each, the first draw of torch's generator with seed 0; and a boolean
    ``(n,)``: four fifths without replacement, by NumPy's older generator with seed 0.
    """
    import torch  # data are read without it

    codes = torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(0)).numpy()
    is_train = np.zeros(n, dtype=bool)
    is_train[np.random.RandomState(0).choice(n, round(TRAIN_SHARE * n), replace=False)] = True
    return codes, is_train
