"""The batch sampler of Genentech/SCBD makes short batches; ours fills them."""

from __future__ import annotations

import numpy as np
from helpers.known_answers import known_answers

from scbd.data import PerturbationSampler


def test_classes_are_drawn_as_often_but_for_those_of_one_cell():
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
    assert (lengths < size).sum() == 63 and lengths.min() == 20  # of 200; ours are full
    ours = drawn / len(sampler)
    alone = n == 1
    assert alone.sum() == 1 and theirs[alone] > 0.04 and ours[alone] == 0
    # further classes fill what small ones leave: each is drawn a little more often
    assert ((ours - theirs)[~alone] > 0).all() and ((ours - theirs)[~alone] < 0.08).all()
    assert 6 < ours.sum() < 6.5
