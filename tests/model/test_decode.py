"""The decoder: pictures of embeddings, exchanged blocks, and cells on their way to another perturbation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scvi
import torch
from conftest import make_cells, make_wells
from helpers.small_models import QUICK, PressCtrlC, make_model
from lightning.pytorch.callbacks import Callback

from scbd import SCBDModel
from scbd.data import ImageDataModule, Split
from scbd.model import TrainingDiverged
from scbd.model._decoder_objective import DecoderObjective

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")


@pytest.fixture
def trained() -> SCBDModel:
    model = make_model()
    model.train(**QUICK)
    return model


@pytest.fixture(scope="module")
def decoded() -> SCBDModel:
    """Trained long enough to show brightness (content) and the left edge (style)."""
    model = make_model(augment=False)
    model.train(**QUICK | {"max_steps": 60, "lr": 1e-3})
    model.train_decoder(**QUICK | {"max_steps": 150, "lr": 3e-3}, width=8, likelihood="gaussian")
    return model


def rows_of(model: SCBDModel, gene: str) -> np.ndarray:
    return np.flatnonzero(model.adata.obs["gene"] == gene)


def blocks_of(model: SCBDModel, *cells: Any, **how: Any) -> list[np.ndarray]:
    return [model.get_latent_representation(*cells, block=block, center=None, **how) for block in "cs"]


def brightness(images: np.ndarray) -> np.ndarray:
    return images[..., 8:].mean((1, 2, 3))


def test_train_decoder_keeps_embeddings(trained, tmp_path):
    before = {name: value.clone() for name, value in trained.module.state_dict().items()}
    history = dict(trained.history)
    trained.train_decoder(**QUICK, width=4)
    after = trained.module.state_dict()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    assert set(trained.history) - set(history) == {"decoder_train_loss", "decoder_validation_loss"}
    assert trained.decoder_settings_["likelihood"] == "bernoulli" and trained.decoder_settings_["steps"] == 6
    assert "on frozen blocks" in repr(trained)
    trained.save(str(tmp_path / "model"))
    loaded = SCBDModel.load(str(tmp_path / "model"), adata=trained.adata)
    np.testing.assert_array_equal(loaded.swap_blocks([0, 1], [2, 3]), trained.swap_blocks([0, 1], [2, 3]))
    assert loaded.decoder_settings_ == trained.decoder_settings_


def test_train_again_removes_decoder(trained, tmp_path):
    class Save(Callback):
        def on_train_end(self, *args):
            trained.save(str(tmp_path / "model"))

    trained.train_decoder(**QUICK, width=4)
    trained.train(**QUICK, callbacks=[Save()])
    for model in (trained, SCBDModel.load(str(tmp_path / "model"), adata=trained.adata)):
        with pytest.raises(ValueError, match="no decoder"):
            model.reconstruct()
    assert not any(name.startswith("decoder_") for name in trained.history)
    assert trained.training_settings_["steps"] == 12


def test_reconstruct_trained_decoder_is_close_to_inputs(decoded):
    cells, images = decoded.get_intensities(), decoded.reconstruct()
    assert images.shape == (96, 2, 16, 16) and images.dtype == np.float32
    error, variance = np.square(images - cells).mean(), np.square(cells - cells.mean(0)).mean()
    assert error < 0.4 * variance
    np.testing.assert_allclose(decoded.decode(*blocks_of(decoded), batch_size=7), images, atol=1e-5)
    new = make_cells(12, seed=5)
    del new.obs["gene"], new.obs["well"]
    assert decoded.reconstruct(new, [4, -1]).shape == (2, 2, 16, 16)


def test_swap_blocks_exchanges_content_of_block(decoded):
    """The right half shows the perturbation alone, the left edge less the right half the environment."""
    rng = np.random.default_rng(0)
    content, style = rng.permutation(96), rng.permutation(96)
    swapped, own = decoded.swap_blocks(content, style), decoded.reconstruct()

    def edge(images):
        return images[..., :3].mean((1, 2, 3)) - brightness(images)

    assert np.corrcoef(brightness(swapped), brightness(own)[content])[0, 1] > 0.6
    assert np.corrcoef(edge(swapped), edge(own)[style])[0, 1] > 0.6
    # with themselves, it is the reconstruction
    np.testing.assert_allclose(decoded.swap_blocks([3, 5], [3, 5]), own[[3, 5]], atol=1e-5)


def test_traverse_starts_at_cell_and_ends_at_perturbation(decoded):
    """Perturbations are brightness: from the darkest to the brightest, each step is brighter than the one before."""
    rows = rows_of(decoded, "gene_0")[:6]
    images = decoded.traverse(rows, "gene_3", n_steps=4)
    assert images.shape == (6, 4, 2, 16, 16) and images.dtype == np.float32
    np.testing.assert_allclose(images[:, 0], decoded.reconstruct(indices=rows), atol=1e-5)
    steps = brightness(images.mean(0))
    assert (np.diff(steps) > 0).all()
    there = brightness(decoded.reconstruct(indices=rows_of(decoded, "gene_3"))).mean()
    assert abs(steps[-1] - there) < 0.25 * (there - steps[0])
    # to its own perturbation nothing changes
    still = decoded.traverse(rows[:2], "gene_0", n_steps=3)
    np.testing.assert_allclose(still, np.repeat(still[:, :1], 3, axis=1), atol=1e-5)
    assert decoded.traverse([], "gene_1", n_steps=3).shape == (0, 3, 2, 16, 16)
    assert decoded.traverse([0, -1], "gene_3", make_cells(24, seed=5)).shape == (2, 5, 2, 16, 16)


def test_traverse_moves_z_c_by_difference_of_means_and_keeps_z_s(decoded):
    row = int(rows_of(decoded, "gene_1")[0])
    z_c, z_s = blocks_of(decoded)
    end = z_c[row] + z_c[rows_of(decoded, "gene_2")].mean(0) - z_c[rows_of(decoded, "gene_1")].mean(0)
    expected = decoded.decode((end / np.linalg.norm(end))[None], z_s[[row]])
    np.testing.assert_allclose(decoded.traverse([row], "gene_2", n_steps=2)[:, -1], expected, atol=1e-5)


@pytest.mark.parametrize("stored", [int, float])
def test_traverse_numeric_label_matches_any_spelling(decoded, stored):
    """A whole number has one name, however it is stored and asked for."""
    expected = decoded.traverse([0, 1], "gene_2", n_steps=2)
    adata = decoded.adata.copy()
    adata.obs["gene"] = adata.obs["gene"].str.removeprefix("gene_").astype(stored)
    for to in (2, 2.0, np.int64(2), "2"):
        np.testing.assert_allclose(decoded.traverse([0, 1], to, adata, n_steps=2), expected, atol=1e-5)


def test_reconstruct_new_wells_decodes_their_embeddings(decoded):
    """Of cells that are standardised by what comes with them, as they are embedded."""
    new = make_cells(30, seed=6)
    new.obsm["single_cell_images"] //= 2
    new.obs["well"] = "dim"
    z_c, z_s = blocks_of(decoded, new)
    pictures = decoded.reconstruct(new)
    np.testing.assert_allclose(pictures, decoded.decode(z_c, z_s), atol=1e-6)
    nowhere = new.copy()
    del nowhere.obs["well"]
    assert np.abs(pictures - decoded.reconstruct(nowhere)).max() > 1e-2
    swapped = decoded.swap_blocks([0, 1], [2, 3], new)
    np.testing.assert_allclose(swapped, decoded.decode(z_c[:2], z_s[2:4]), atol=1e-6)
    path = decoded.traverse([0], "gene_3", new)
    np.testing.assert_allclose(path[0, 0], pictures[0], atol=1e-5)


def test_decoder_model_without_z_s_decodes_z_c_alone():
    model = make_model(style_target=None)
    model.train(**QUICK)
    model.train_decoder(**QUICK, width=4, joint=True)
    assert model.decoder_settings_["cycle"] == 0
    z_c = model.get_latent_representation(center=None)
    assert model.reconstruct().shape == model.decode(z_c).shape == (96, 2, 16, 16)
    assert model.traverse([0], "gene_1").shape == (1, 5, 2, 16, 16)
    with pytest.raises(ValueError, match="single block"):
        model.swap_blocks([0], [1])
    with pytest.raises(ValueError, match="cycle=1"):
        model.train_decoder(**QUICK, width=4, joint=True, cycle=1)


def test_train_decoder_features_reconstructs_features():
    wells = make_wells()
    SCBDModel.setup_anndata(wells, "compound", "plate", control="DMSO")
    model = SCBDModel(wells)
    wells.X[3, 0] = 1e4  # beyond what the encoders see of it, and still what the cell has
    model.train(**QUICK, train_size=1.0)
    model.train_decoder(enable_progress_bar=False, accelerator="cpu", max_steps=200, width=32)
    images, given = model.reconstruct(), model.get_intensities()
    np.testing.assert_array_equal(given, wells.X)
    others = np.delete(images, 3, axis=0), np.delete(given, 3, axis=0)
    assert np.square(others[0] - others[1]).mean() < others[1].var()
    assert model.swap_blocks([0, 1], [20, 21]).shape == (2, 10)


def test_get_intensities_returns_prepared_inputs():
    model = make_model(augment=True)
    pixels = model.adata.obsm["single_cell_images"] / np.float32(255)
    np.testing.assert_allclose(model.get_intensities(), pixels, atol=1e-6)  # not turned, as training images are
    model.train(**QUICK)
    np.testing.assert_allclose(model.get_intensities(), pixels, atol=1e-6)
    floats = make_cells(dtype="float32")
    floats.obsm["single_cell_images"][7] = np.inf
    with pytest.raises(ValueError, match="rows 7"):
        make_model(make_cells(dtype="float32")).get_intensities(floats, [3, 7])


def test_gaussian_decoder_standardises_targets_and_restores_units():
    model = make_model(make_cells(dtype="uint16"))
    model.train(**QUICK)
    model.train_decoder(**QUICK, width=4)
    assert model.decoder_settings_["likelihood"] == "gaussian"
    counts = model.adata.obsm["single_cell_images"].astype(np.float32)
    np.testing.assert_allclose(model.get_intensities(), np.arcsinh(counts), rtol=1e-5, atol=1e-5)
    # a decoder that knows nothing gives about the mean, in the units of the intensities
    assert model.reconstruct().mean() == pytest.approx(model.get_intensities().mean(), abs=0.5)


@pytest.mark.parametrize(
    ("dtype", "divisor", "likelihood"),
    [("uint16", 1, "bernoulli"), ("float32", 1, "gaussian"), ("float32", 255, "bernoulli")],
)
def test_choose_likelihood_auto_follows_range_of_intensities(dtype, divisor, likelihood):
    """Scaled floats are what they were, and may be beyond 1; rows of all parts of a table are looked at."""
    cells = make_cells(600, dtype=dtype)
    if divisor > 1:
        cells.obsm["single_cell_images"] /= divisor
    model = make_model(cells, intensity="scale")
    model.is_trained_ = True
    assert model._choose_likelihood("auto") == likelihood
    cells.obsm["single_cell_images"] = cells.obsm["single_cell_images"].astype("float32")
    if likelihood == "gaussian":
        cells.obsm["single_cell_images"][:520] /= 255
        with pytest.raises(ValueError, match="likelihood='bernoulli'"):
            model._choose_likelihood("bernoulli")


@pytest.mark.parametrize("invariance", ["listing", "variance"])
def test_train_decoder_joint_updates_encoders_and_decoder(invariance):
    model = make_model(invariance=invariance, smoothing=0, alpha=0.5)
    before = {name: value.clone() for name, value in model.module.content.state_dict().items()}
    model.train_decoder(**QUICK, width=4, joint=True, weight=2.0, cycle=0.5)
    assert model.is_trained_ and model.decoder_settings_["joint"] and model.decoder_settings_["weight"] == 2
    name = "encoder.0.weight"
    assert not torch.equal(before[name], model.module.content.state_dict()[name])
    for part in ("train", "validation"):
        parts = ("supervised_c", "supervised_s", "invariance_c", "reconstruction", "cycle")
        one, two, invariance_, nats, missed = (model.history[f"{part}_{p}"].iloc[-1, 0] for p in parts)
        expected = one + two + model.module.alpha * invariance_ + 2 * nats + 0.5 * missed
        assert model.history[f"{part}_loss"].iloc[-1, 0] == pytest.approx(expected, rel=1e-5)
    assert "with the encoders" in repr(model)


@pytest.mark.parametrize("weight", [None, 1.0])
def test_reconstruction_gradient_reaches_encoders_only_in_joint_training(trained, weight):
    objective = DecoderObjective(trained.module, trained.module.make_decoder("bernoulli", 4), weight).train()
    assert trained.module.training == (weight is not None)
    cells = trained.adata
    source, y, e = trained._source(cells), trained._codes(cells, "y"), trained._codes(cells, "e")
    batch = next(iter(ImageDataModule(source, y, e, Split(np.arange(24))).train_dataloader()))
    losses = objective(**batch)
    (losses.loss if weight is None else losses.parts["reconstruction"]).backward()
    parameters = dict(trained.module.named_parameters())
    reached = {name for name, p in parameters.items() if p.grad is not None and p.grad.abs().sum() > 0}
    assert ("content.encoder.0.weight" in reached and "style.encoder.0.weight" in reached) == (weight is not None)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in objective.decoder.pixels.parameters())


@pytest.mark.parametrize("style_target", ["e", "ye"])
def test_cycle_loss_equals_distance_of_embeddings_of_exchanged_pictures(style_target):
    """Without a generator the first quarter of the batch gets z_s of the last, and is a picture of their environments.

    No such picture is of z_s's own pair.
    """
    model = make_model(style_target=style_target)
    model.train(**QUICK)
    model.train_decoder(**QUICK, width=4)
    module = model.module.eval()
    images = torch.from_numpy(model.adata.obsm["single_cell_images"][:24])
    e = torch.from_numpy(model._codes(model.adata, "e")[:24])
    z_c, z_s = module.blocks(module.prepare(images, e)).z
    assert module.decoder is not None
    loss = DecoderObjective(module, module.decoder, None, cycle=1.0).cycle_loss
    found = loss(z_c, z_s, e)
    pictures = model.decode(z_c[:6].detach().numpy(), z_s[-6:].detach().numpy())
    again = module.preprocess.scaled(torch.from_numpy(pictures))
    environments: Any = module.preprocess.environments
    within = environments(again, e[-6:, None])
    missed = (module.content(within) - z_c[:6]).square().sum(1).mean()
    if style_target == "e":
        missed = (missed + (module.style(again) - z_s[-6:]).square().sum(1).mean()) / 2
    torch.testing.assert_close(found, missed, atol=1e-5, rtol=1e-4)
    assert 1e-4 < found < 4
    generator = torch.Generator().manual_seed(0)  # pairs are drawn anew
    assert loss(z_c, z_s, e, generator=generator) != loss(z_c, z_s, e, generator=generator)


def test_cycle_loss_keeps_encoders_frozen(trained):
    """The decoder learns from them; encoders do through what was decoded alone, and keep mode and statistics."""
    module, decoder = trained.module.train(), trained.module.make_decoder("bernoulli", 4)
    before = {name: value.clone() for name, value in module.named_buffers()}
    z_c, z_s = (
        torch.nn.functional.normalize(torch.randn(8, block.n_latent), dim=1).requires_grad_()
        for block in (module.content, module.style)
    )
    DecoderObjective(module, decoder, 1.0, cycle=1.0).cycle_loss(z_c, z_s).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in decoder.pixels.parameters())
    assert z_c.grad is not None and z_c.grad.abs().sum() > 0
    assert all(p.grad is None and p.requires_grad for p in module.parameters())
    assert module.content.training and module.style.training
    assert all(torch.equal(value, before[name]) for name, value in module.named_buffers())


def test_train_decoder_cycle_lowers_cycle_loss(trained):
    module, decoder = trained.module.eval(), trained.module.make_decoder("bernoulli", 4)
    images, e = (
        torch.from_numpy(part)
        for part in (trained.adata.obsm["single_cell_images"], trained._codes(trained.adata, "e"))
    )
    z_c, z_s = (block.detach() for block in module.blocks(module.prepare(images, e)).z)
    optimizer, missed = torch.optim.Adam(decoder.parameters(), 1e-2), []
    for _ in range(60):
        loss = DecoderObjective(module, decoder, None, cycle=1.0).cycle_loss(z_c, z_s, e)
        missed.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert missed[-1] < 0.5 * missed[0]


def test_train_decoder_uses_split_of_encoders():
    model = make_model()
    model.train(**QUICK, train_size=0.5, validation_size=0.2)
    rows = model.train_indices
    model.train_decoder(**QUICK, width=4, cycle=2)
    np.testing.assert_array_equal(model.train_indices, rows)
    assert {"decoder_train_cycle", "decoder_train_reconstruction"} <= set(model.history or {})
    model.train_decoder(**QUICK, width=4, joint=True)
    np.testing.assert_array_equal(model.train_indices, rows)
    assert model.decoder_settings_["cycle"] == 1


@pytest.mark.parametrize(
    ("settings", "error", "named"),
    [
        ({"joint": True, "weight": 0}, ValueError, "weight=0"),
        ({"likelihood": "poisson"}, ValueError, "likelihood='poisson'"),
        ({"batch_size": 1000}, ValueError, "1000"),
        *(({"cycle": cycle}, ValueError, "cycle") for cycle in (-1, float("nan"), "much")),
    ],
)
def test_train_decoder_invalid_setting_raises_and_keeps_earlier_decoder(decoded, settings, error, named):
    images = decoded.reconstruct(indices=[0])
    with pytest.raises(error, match=named):
        decoded.train_decoder(**QUICK | settings, width=8)
    np.testing.assert_array_equal(decoded.reconstruct(indices=[0]), images)


def off_the_sphere(z: list[np.ndarray]) -> list[np.ndarray]:
    z[0][[4, 9]] -= z[0].mean(0)
    return z


def with_nan(z: list[np.ndarray]) -> list[np.ndarray]:
    z[1][[4, 9]] = np.nan
    return z


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (off_the_sphere, "rows .4, 9"),
        (with_nan, "rows .4, 9"),
        (lambda z: z[:1], r"\(96, 6\)\."),
        (lambda z: [z[0], z[1][1:]], r"\(95, 6\)"),
    ],
    ids=["lengths", "NaN", "one block", "rows"],
)
def test_decode_invalid_embeddings_raises(decoded, change, named):
    z = blocks_of(decoded)
    rounded = [block.astype(np.float16) for block in z]
    np.testing.assert_allclose(decoded.decode(*rounded), decoded.reconstruct(), atol=1e-2)
    with pytest.raises(ValueError, match=named):
        decoded.decode(*change(z))


def test_decode_methods_invalid_arguments_raise(decoded):
    requests: list[tuple[Any, type[Exception], str]] = [
        (lambda: make_model().train_decoder(**QUICK), ValueError, "not trained"),
        (lambda: make_model().reconstruct(), ValueError, "no decoder"),
        (lambda: decoded.swap_blocks([0, 1], [2]), ValueError, "equally many"),
        (lambda: decoded.swap_blocks([0], [96]), ValueError, "from 96 to 96"),
        (lambda: decoded.reconstruct(batch_size=0), ValueError, "batch_size=0"),
        (lambda: decoded.traverse([0], "gene_9"), KeyError, "'gene_9'"),
        (lambda: decoded.traverse([0], "gene_1", n_steps=1), ValueError, "n_steps=1"),
    ]
    for request, error, named in requests:
        with pytest.raises(error, match=named):
            request()


@pytest.mark.parametrize("joint", [False, True])
def test_train_decoder_interrupted_keeps_partly_trained_decoder(trained, joint):
    trained.train_decoder(**QUICK, width=8)
    scvi.settings.seed = 1
    same_lr: dict[str, Any] = {"plan_kwargs": {"lr_decay": False}}  # in runs of different lengths
    with pytest.raises(KeyboardInterrupt):
        trained.train_decoder(**QUICK | same_lr | {"max_steps": 30}, width=4, joint=joint, callbacks=[PressCtrlC(4)])
    steps = trained.decoder_settings_["steps"] - (QUICK["max_steps"] if joint else 0)
    assert 3 <= steps <= 4
    same = make_model()
    same.train(**QUICK)
    scvi.settings.seed = 1
    same.train_decoder(**QUICK | same_lr | {"max_steps": steps}, width=4, joint=joint)
    assert trained.decoder_settings_ == same.decoder_settings_
    np.testing.assert_array_equal(trained.reconstruct(), same.reconstruct())
    with pytest.raises(TrainingDiverged):  # before it was validated once
        trained.train_decoder(**QUICK | {"lr": 1e30}, validate_every=6, width=8, joint=joint)
    np.testing.assert_array_equal(trained.reconstruct(), same.reconstruct())


def test_train_decoder_interrupted_can_be_resumed(trained, tmp_path):
    whole: dict[str, Any] = QUICK | {"max_steps": 8, "validate_every": 4, "width": 4}
    scvi.settings.seed = 1
    with pytest.raises(KeyboardInterrupt):
        trained.train_decoder(**whole, checkpoint_dir=tmp_path / "run", callbacks=[PressCtrlC(5)])
    trained.train_decoder(**whole, checkpoint_dir=tmp_path / "run", resume=True)
    resumed = trained.reconstruct()
    scvi.settings.seed = 1
    trained.train_decoder(**whole)
    np.testing.assert_allclose(trained.reconstruct(), resumed, atol=1e-6)
    with pytest.raises(ValueError, match="width"):
        trained.train_decoder(**whole | {"width": 8}, checkpoint_dir=tmp_path / "run", resume=True)
