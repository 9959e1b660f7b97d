"""Compare each term of the evidence lower bound with ilkhem/iVAE.

The original has other priors and posteriors, see the notes in originals.md.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.known_answers import Known, known_answers
from torch import Tensor, nn

from scbd.baselines._latent import Gaussian, LatentDecoder


def gaussian(known: Known, mean: str, variance: str) -> Gaussian:
    return Gaussian(known.tensor(mean), known.tensor(variance).log())


def test_divergence_equals_monte_carlo_estimate_of_original():
    known = known_answers("ivae")
    q, p = (gaussian(known, f"gauss_{name}_mean", f"gauss_{name}_var") for name in "qp")
    error = (q.divergence(p).sum(1) - known.tensor("gauss_kl_monte_carlo")) / known.tensor("gauss_kl_monte_carlo_se")
    assert float(error.abs().max()) < 2.5


def log_density(of: Gaussian, z: Tensor) -> Tensor:
    return torch.distributions.Normal(of.mean, (0.5 * of.log_variance).exp()).log_prob(z).sum(1)


def test_gaussian_log_density_is_equal_to_original():
    known = known_answers("ivae")
    for name in "qp":
        found = log_density(gaussian(known, f"gauss_{name}_mean", f"gauss_{name}_var"), known.tensor("gauss_z"))
        torch.testing.assert_close(found, known.tensor(f"gauss_log_{name}"), rtol=1e-6, atol=1e-5)


def test_evidence_lower_bound_exact_divergence_replaces_one_sample():
    known = known_answers("ivae")
    decoder = LatentDecoder((3,), (7,), "gaussian")
    decoder.network = nn.Identity()  # type: ignore[assignment]  # the known answers are already decoded
    with torch.no_grad():
        decoder.log_scale.fill_(0.5 * float(np.log(known["model_decoder_var"][0])))
        nats = decoder.negative_log_likelihood(known.tensor("model_x"), known.tensor("model_decoded"))
    torch.testing.assert_close(-nats, known.tensor("model_log_px"), rtol=2e-6, atol=1e-4)
    q, p = gaussian(known, "model_q_mean", "model_q_var"), gaussian(known, "model_p_mean", "model_p_var")
    sampled = known.tensor("model_log_p") - known.tensor("model_log_q")
    theirs = float(known["model_elbo"])
    assert float((sampled - nats).mean()) == pytest.approx(theirs, abs=1e-3)
    assert float(-(nats + q.divergence(p).sum(1)).mean()) == pytest.approx(-956.215, abs=1e-3)
    assert -956.215 - theirs == pytest.approx(0.607, abs=1e-3)
