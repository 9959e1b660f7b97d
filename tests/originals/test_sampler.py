"""Compare batches with those of Genentech/SCBD, whose sampler also returns incomplete batches."""

from __future__ import annotations

import numpy as np
from helpers.known_answers import known_answers

from scbd.data import PerturbationSampler


def test_perturbation_sampler_class_frequencies_are_close_to_original():
    known = known_answers("scbd_losses")
    y, size = known["sampler_y"].astype(int), int(known["sampler_batch_size"])
    p = int(known["sampler_y_per_batch"])
    sampler = PerturbationSampler(np.arange(len(y)), size, labels=y, perturbations_per_batch=p, n_steps=4000, seed=1)
    drawn = np.zeros(y.max() + 1)
    for batch in sampler:
        assert len(np.unique(batch)) == size
        drawn[np.unique(y[batch])] += 1
    theirs, n = known["sampler_class_frequency_in_4000_batches"], np.bincount(y)
    lengths = known["sampler_batch_lengths"]
    assert (lengths < size).sum() == 63 and lengths.min() == 20  # 63 of 200 batches of the original are incomplete
    ours = drawn / len(sampler)
    alone = n == 1
    assert alone.sum() == 1 and theirs[alone] > 0.04 and ours[alone] == 0
    # further classes fill the batches of small classes: each class is drawn slightly more often
    assert ((ours - theirs)[~alone] > 0).all() and ((ours - theirs)[~alone] < 0.08).all()
    assert 6 < ours.sum() < 6.5
