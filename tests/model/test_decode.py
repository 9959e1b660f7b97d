from __future__ import annotations

import numpy as np
import pytest
import scvi
import torch
from conftest import make_cells
from lightning.pytorch.callbacks import Callback
from small_models import QUICK, PressCtrlC, make_model

from scbd import SCBDModel
from scbd.data import ImageDataModule, Split
from scbd.model import TrainingDiverged
from scbd.model._reconstruction import Reconstruction

pytestmark = pytest.mark.filterwarnings("ignore:z_c has collapsed")


@pytest.fixture
def trained() -> SCBDModel:
    model = make_model()
    model.train(**QUICK)
    return model


@pytest.fixture(scope="module")
def decoded() -> SCBDModel:
    """Trained long enough to show brightness (content) and the left edge (style)."""
    model = make_model()
    model.train(**QUICK | {"max_steps": 60, "lr": 1e-3})
    model.train_decoder(**QUICK | {"max_steps": 150, "lr": 3e-3}, width=8, likelihood="gaussian")
    return model


def test_the_decoder_does_not_move_the_embeddings(trained):
    before = {name: value.clone() for name, value in trained.module.state_dict().items()}
    history = dict(trained.history)
    trained.train_decoder(**QUICK, width=4)
    after = trained.module.state_dict()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    assert set(trained.history) - set(history) == {"decoder_train_loss", "decoder_validation_loss"}
    assert len(trained.history["decoder_train_loss"]) > 1
    assert trained.decoder_settings_["likelihood"] == "bernoulli" and trained.decoder_settings_["steps"] == 6
    assert "decoder   bernoulli, width 4, trained on frozen blocks" in repr(trained)


def test_reconstructions_are_near_the_cells(decoded):
    cells, images = decoded.get_intensities(), decoded.reconstruct()
    assert images.shape == (96, 2, 16, 16) and images.dtype == np.float32
    # images of uint8 are intensities between 0 and 1
    np.testing.assert_allclose(cells, decoded.adata.obsm["single_cell_images"] / np.float32(255), atol=1e-6)
    error, variance = np.square(images - cells).mean(), np.square(cells - cells.mean(0)).mean()
    assert error < 0.4 * variance


def test_swapping_moves_what_the_block_holds(decoded):
    """The right half shows the perturbation alone, the left edge less the right half the environment."""
    rng = np.random.default_rng(0)
    content, style = rng.permutation(96), rng.permutation(96)
    swapped, own = decoded.swap_blocks(content, style), decoded.reconstruct()

    def brightness(images):
        return images[..., 8:].mean((1, 2, 3))

    def edge(images):
        return images[..., :3].mean((1, 2, 3)) - brightness(images)

    assert np.corrcoef(brightness(swapped), brightness(own)[content])[0, 1] > 0.6
    assert np.corrcoef(edge(swapped), edge(own)[style])[0, 1] > 0.6
    # with themselves, it is the reconstruction
    np.testing.assert_allclose(decoded.swap_blocks([3, 5], [3, 5]), own[[3, 5]], atol=1e-5)


def test_decoding_embeddings_is_reconstructing(decoded):
    z_c, z_s = (decoded.get_latent_representation(block=block) for block in "cs")
    np.testing.assert_allclose(decoded.decode(z_c, z_s), decoded.reconstruct(), atol=1e-6)
    np.testing.assert_allclose(decoded.decode(z_c, z_s, batch_size=7), decoded.reconstruct(), atol=1e-5)
    new = make_cells(12, seed=5)
    del new.obs["gene"], new.obs["well"]
    assert decoded.reconstruct(new, [4, -1]).shape == (2, 2, 16, 16)
    assert decoded.get_intensities(new).shape == (12, 2, 16, 16)


def test_save_and_load_with_a_decoder(trained, tmp_path):
    trained.train_decoder(**QUICK, width=4, likelihood="gaussian")
    trained.save(str(tmp_path / "model"))
    loaded = SCBDModel.load(str(tmp_path / "model"), adata=trained.adata)
    np.testing.assert_array_equal(loaded.swap_blocks([0, 1], [2, 3]), trained.swap_blocks([0, 1], [2, 3]))
    assert loaded.decoder_settings_ == trained.decoder_settings_


def test_training_the_encoders_again_forgets_the_decoder(trained):
    trained.train_decoder(**QUICK, width=4)
    trained.train(**QUICK)
    with pytest.raises(ValueError, match=r"There is no decoder: call train_decoder\(\) first .and again after train"):
        trained.reconstruct()
    assert not any(name.startswith("decoder_") for name in trained.history)
    assert trained.training_settings_["steps"] == 12


@pytest.mark.parametrize("invariance", ["listing", "variance"])
def test_joint_training_moves_both(invariance):
    model = make_model(invariance=invariance, smoothing=0, alpha=0.5)
    before = {name: value.clone() for name, value in model.module.content.state_dict().items()}
    model.train_decoder(**QUICK, width=4, joint=True, weight=2.0, cycle=0.5)
    assert model.is_trained_ and model.decoder_settings_["joint"] and model.decoder_settings_["weight"] == 2
    name = "encoder.0.weight"
    assert not torch.equal(before[name], model.module.content.state_dict()[name])
    frame = model.history
    for part in ("train", "validation"):
        parts = ("supervised_c", "supervised_s", "invariance_c", "reconstruction", "cycle")
        supervised_c, supervised_s, invariance, nats, missed = (frame[f"{part}_{p}"].iloc[-1, 0] for p in parts)
        expected = supervised_c + supervised_s + model.module.alpha * invariance + 2 * nats + 0.5 * missed
        assert frame[f"{part}_loss"].iloc[-1, 0] == pytest.approx(expected, rel=1e-5)
    assert "trained with the encoders" in repr(model)
    assert model.reconstruct(indices=[0]).shape == (1, 2, 16, 16)


@pytest.mark.parametrize("weight", [None, 1.0])
def test_the_picture_reaches_the_encoders_when_joint_and_only_then(trained, weight):
    objective = Reconstruction(trained.module, trained.module.make_decoder("bernoulli", 4), weight).train()
    assert trained.module.training == (weight is not None)
    source, y, e = trained._training_inputs()
    batch = next(iter(ImageDataModule(source, y, e, Split(np.arange(24))).train_dataloader()))
    losses = objective(**batch)
    (losses.loss if weight is None else losses.parts["reconstruction"]).backward()
    parameters = dict(trained.module.named_parameters())
    reached = {name for name, p in parameters.items() if p.grad is not None and p.grad.abs().sum() > 0}
    assert ("content.encoder.0.weight" in reached and "style.encoder.0.weight" in reached) == (weight is not None)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in objective.decoder.pixels.parameters())


@pytest.mark.parametrize("style_target", ["e", "ye"])
def test_the_cycle_is_the_distance_of_what_exchanged_pictures_are_embedded_as(style_target):
    """Without a generator the first quarter of the batch gets z_s of the last. No such picture is of z_s's own pair."""
    model = make_model(style_target=style_target)
    model.train(**QUICK)
    model.train_decoder(**QUICK, width=4)
    module = model.module.eval()
    z_c, z_s = module.blocks(module.preprocess(torch.from_numpy(model.adata.obsm["single_cell_images"][:24]))).z
    assert module.decoder is not None
    found = Reconstruction(module, module.decoder, None, cycle=1.0).cycle_loss(z_c, z_s)
    pictures = model.decode(z_c[:6].detach().numpy(), z_s[-6:].detach().numpy())
    again = module.preprocess.scaled(torch.from_numpy(pictures))
    missed = (module.content(again) - z_c[:6]).square().sum(1).mean()
    if style_target == "e":
        missed = (missed + (module.style(again) - z_s[-6:]).square().sum(1).mean()) / 2
    torch.testing.assert_close(found, missed, atol=1e-5, rtol=1e-4)
    assert 1e-4 < found < 4


def test_pairs_of_the_cycle_are_drawn_anew_with_a_generator(trained):
    z = trained.module.blocks(trained.module.preprocess(torch.from_numpy(trained.adata.obsm["single_cell_images"]))).z
    decoder = trained.module.make_decoder("bernoulli", 4)
    loss = Reconstruction(trained.module.eval(), decoder, None, cycle=1.0).cycle_loss
    generator = torch.Generator().manual_seed(0)
    assert loss(*z) == loss(*z) and loss(*z, generator=generator) != loss(*z, generator=generator)


def test_encoders_only_look_at_exchanged_pictures(trained):
    """The decoder learns from them; encoders do through what was decoded alone, and keep mode and statistics."""
    module, decoder = trained.module.train(), trained.module.make_decoder("bernoulli", 4)
    before = {name: value.clone() for name, value in module.named_buffers()}
    z_c, z_s = (
        torch.nn.functional.normalize(torch.randn(8, block.n_latent), dim=1).requires_grad_()
        for block in (module.content, module.style)
    )
    Reconstruction(module, decoder, 1.0, cycle=1.0).cycle_loss(z_c, z_s).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in decoder.pixels.parameters())
    assert z_c.grad is not None and z_c.grad.abs().sum() > 0
    assert all(p.grad is None and p.requires_grad for p in module.parameters())
    assert module.content.training and module.style.training
    assert all(torch.equal(value, before[name]) for name, value in module.named_buffers())


def test_a_decoder_learns_to_draw_what_is_embedded_where_it_came_from(trained):
    module, decoder = trained.module.eval(), trained.module.make_decoder("bernoulli", 4)
    images = module.preprocess(torch.from_numpy(trained.adata.obsm["single_cell_images"]))
    z = [block.detach() for block in module.blocks(images).z]
    optimizer, missed = torch.optim.Adam(decoder.parameters(), 1e-2), []
    for _ in range(60):
        loss = Reconstruction(module, decoder, None, cycle=1.0).cycle_loss(*z)
        missed.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert missed[-1] < 0.5 * missed[0]


def test_the_cycle_is_on_when_joint_and_needs_two_blocks(trained):
    trained.train_decoder(**QUICK, width=4)
    assert trained.decoder_settings_["cycle"] == 0 and "decoder_train_cycle" not in trained.history
    trained.train_decoder(**QUICK, width=4, cycle=2)
    assert {"decoder_train_cycle", "decoder_train_reconstruction"} <= set(trained.history)
    trained.train_decoder(**QUICK, width=4, joint=True)
    assert trained.decoder_settings_["cycle"] == 1 and {"train_cycle", "validation_cycle"} <= set(trained.history)
    single = make_model(style_target=None)
    with pytest.raises(ValueError, match="cycle=1 needs two blocks, and this SCBDModel has z_c alone"):
        single.train_decoder(**QUICK, width=4, joint=True, cycle=1)
    single.train_decoder(**QUICK, width=4, joint=True)
    assert single.decoder_settings_["cycle"] == 0


@pytest.mark.parametrize("cycle", [-1, float("nan"), "much"])
def test_a_weight_of_the_cycle_is_a_number(trained, cycle):
    with pytest.raises(ValueError, match="cycle weighs pictures with exchanged blocks: give a number that is 0 or"):
        trained.train_decoder(**QUICK, width=4, cycle=cycle)


def test_the_decoder_learns_from_the_cells_the_encoders_learned_from():
    model = make_model()
    model.train(**QUICK, train_size=0.5, validation_size=0.2)
    rows = model.train_indices
    model.train_decoder(**QUICK, width=4)
    np.testing.assert_array_equal(model.train_indices, rows)
    assert model.training_settings_["n_train"] == len(rows)


def test_a_decoder_of_a_single_block():
    model = make_model(style_target=None)
    model.train(**QUICK)
    model.train_decoder(**QUICK, width=4)
    assert model.reconstruct().shape == (96, 2, 16, 16)
    with pytest.raises(ValueError, match="has a single block: there is nothing to swap"):
        model.swap_blocks([0], [1])
    assert model.decode(model.get_latent_representation()).shape == (96, 2, 16, 16)


def test_gaussian_targets_are_standardised_and_come_back():
    cells = make_cells(dtype="uint16")
    model = make_model(cells)
    model.train(**QUICK)
    model.train_decoder(**QUICK, width=4)
    assert model.decoder_settings_["likelihood"] == "gaussian"
    np.testing.assert_allclose(
        model.get_intensities(), np.arcsinh(cells.obsm["single_cell_images"].astype(np.float32)), rtol=1e-5, atol=1e-5
    )
    # a decoder that knows nothing gives about the mean, in the units of the intensities
    assert model.reconstruct().mean() == pytest.approx(model.get_intensities().mean(), abs=0.5)


@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_by_default_the_likelihood_is_one_of_the_intensities(dtype):
    """Scaled floats are what they were, and may be beyond 1."""
    model = make_model(make_cells(dtype=dtype), intensity="scale")
    model.train(**QUICK)
    model.train_decoder(**QUICK, width=4)
    assert model.decoder_settings_["likelihood"] == {"uint16": "bernoulli", "float32": "gaussian"}[dtype]


def test_intensities_are_looked_at_in_all_parts_of_a_table():
    cells = make_cells(700, dtype="float32")
    cells.obsm["single_cell_images"] /= 255
    cells.obsm["single_cell_images"][520:] *= 900
    model = make_model(cells)
    model.train(**QUICK | {"max_steps": 1})
    with pytest.raises(ValueError, match="likelihood='bernoulli' needs intensities between 0 and 1, these reach from"):
        model.train_decoder(**QUICK, likelihood="bernoulli")


def test_bad_requests_of_a_decoder(trained, decoded):
    with pytest.raises(ValueError, match="The encoders are not trained: call train.. first, or train both together"):
        make_model().train_decoder(**QUICK)
    with pytest.raises(ValueError, match="There is no decoder"):
        trained.reconstruct()
    with pytest.raises(ValueError, match="weight=0: the reconstruction needs a positive weight"):
        trained.train_decoder(**QUICK, joint=True, weight=0)
    with pytest.raises(ValueError, match="likelihood='poisson' is not known"):
        trained.train_decoder(**QUICK, likelihood="poisson")
    with pytest.raises(TypeError, match=r"train\(\) has no argument 'depth'"):
        trained.train_decoder(**QUICK, depth=3)
    with pytest.raises(ValueError, match="Give equally many rows for content and for style"):
        decoded.swap_blocks([0, 1], [2])
    with pytest.raises(ValueError, match="reach from 96 to 96, there are 96 cells"):
        decoded.swap_blocks([0], [96])
    z = decoded.get_latent_representation()
    with pytest.raises(ValueError, match=r"takes \(N, 6\) and \(N, 6\), the embeddings are \(96, 6\)\."):
        decoded.decode(z)
    with pytest.raises(ValueError, match=r"the embeddings are \(96, 6\) and \(95, 6\)"):
        decoded.decode(z, z[1:])


def test_pictures_of_new_plates_are_those_of_adapted_embeddings(trained):
    trained.train_decoder(**QUICK, width=4)
    new = make_cells(30, seed=5)
    new.obsm["single_cell_images"] //= 2
    new.obs["plate"] = "dim"
    with pytest.raises(KeyError, match="was not adapted to any value of 'plate'"):
        trained.reconstruct(new, adapt_key="plate")
    trained.adapt(new, "plate", using="all")
    z_c, z_s = (trained.get_latent_representation(new, block=block, adapt_key="plate") for block in "cs")
    pictures = trained.reconstruct(new, adapt_key="plate")
    np.testing.assert_allclose(pictures, trained.decode(z_c, z_s), atol=1e-6)
    assert np.abs(pictures - trained.reconstruct(new)).max() > 1e-3
    swapped = trained.swap_blocks([0, 1], [2, 3], new, adapt_key="plate")
    np.testing.assert_allclose(swapped, trained.decode(z_c[:2], z_s[2:4]), atol=1e-6)
    gene = new.obs["gene"].to_numpy()
    end = z_c[0] + z_c[gene == "gene_3"].mean(0) - z_c[gene == gene[0]].mean(0)
    path = trained.traverse([0], "gene_3", new, adapt_key="plate")
    np.testing.assert_allclose(path[0, 0], pictures[0], atol=1e-5)
    np.testing.assert_allclose(path[0, -1], trained.decode([end / np.linalg.norm(end)], z_s[:1])[0], atol=1e-5)


def test_what_lies_off_the_sphere_is_not_decoded(decoded):
    z_c, z_s = (decoded.get_latent_representation(block=block) for block in "cs")
    centred = z_c.copy()
    centred[[4, 9]] -= z_c.mean(0)
    said = r"other lengths than 1 in 2 rows \(4, 9; from .*\): take those of cells with center=None, and divide points"
    for wrong in ((centred, z_s), (z_s, centred)):
        with pytest.raises(ValueError, match=said):
            decoded.decode(*wrong)
    rounded = [z.astype(np.float16) for z in (z_c, z_s)]
    np.testing.assert_allclose(decoded.decode(*rounded), decoded.reconstruct(), atol=1e-2)
    between = (z_c[[0]] + z_c[[1]]) / 2
    assert decoded.decode(between / np.linalg.norm(between), z_s[:1]).shape == (1, 2, 16, 16)


@pytest.mark.parametrize("batch_size", [-1, 0, 2.5])
def test_a_batch_size_that_is_none_gets_a_sentence(decoded, batch_size):
    z = [decoded.get_latent_representation(block=block) for block in "cs"]
    for call in (
        lambda: decoded.decode(*z, batch_size=batch_size),
        lambda: decoded.reconstruct(batch_size=batch_size),
        lambda: decoded.swap_blocks([0], [1], batch_size=batch_size),
    ):
        with pytest.raises(ValueError, match=f"batch_size={batch_size}: give a whole number, 1 or larger"):
            call()


def test_what_is_not_finite_makes_no_picture(decoded):
    z = [decoded.get_latent_representation(block=block) for block in "cs"]
    z[1][[4, 9]] = np.nan
    with pytest.raises(ValueError, match=r"to decode are NaN or infinite in 2 rows \(4, 9\)"):
        decoded.decode(*z)


def test_bernoulli_needs_the_unit_interval():
    cells = make_cells(dtype="float32")
    model = make_model(cells)
    model.train(**QUICK)
    with pytest.raises(ValueError, match="needs intensities between 0 and 1, these reach from .*use likelihood='gauss"):
        model.train_decoder(**QUICK, likelihood="bernoulli")
    cells.obsm["single_cell_images"] /= 255
    model = make_model(cells)
    model.train(**QUICK)
    model.train_decoder(**QUICK, likelihood="bernoulli", width=4)
    assert 0 <= model.reconstruct().min() and model.reconstruct().max() <= 1


def test_a_failed_request_keeps_the_decoder_there_is(trained):
    trained.train_decoder(**QUICK, width=4)
    images = trained.reconstruct()
    with pytest.raises(ValueError, match="batch_size=1000 is larger"):
        trained.train_decoder(**QUICK | {"batch_size": 1000}, width=8)
    np.testing.assert_array_equal(trained.reconstruct(), images)


@pytest.mark.parametrize("joint", [False, True])
def test_a_decoder_is_kept_as_far_as_its_run_came(trained, joint):
    trained.train_decoder(**QUICK, width=8)
    same = make_model()
    same.train(**QUICK)
    scvi.settings.seed = 1
    same.train_decoder(**QUICK | {"max_steps": 4}, width=4, joint=joint)
    scvi.settings.seed = 1
    with pytest.raises(KeyboardInterrupt):
        trained.train_decoder(**QUICK | {"max_steps": 30}, width=4, joint=joint, callbacks=PressCtrlC(4))
    assert trained.decoder_settings_ == same.decoder_settings_
    assert trained.decoder_settings_["steps"] == (10 if joint else 4)
    np.testing.assert_array_equal(trained.reconstruct(), same.reconstruct())
    with pytest.raises(TrainingDiverged):  # before it was validated once
        trained.train_decoder(**QUICK | {"lr": 1e30}, validate_every=6, width=8, joint=joint)
    np.testing.assert_array_equal(trained.reconstruct(), same.reconstruct())


def test_a_model_that_is_saved_while_it_is_trained_on_has_no_decoder(trained, tmp_path):
    class Save(Callback):
        def on_train_end(self, *args):
            trained.save(str(tmp_path / "model"))

    trained.train_decoder(**QUICK, width=4)
    trained.train(**QUICK, callbacks=Save())
    with pytest.raises(ValueError, match="There is no decoder"):
        SCBDModel.load(str(tmp_path / "model"), adata=trained.adata).reconstruct()


def test_a_decoder_s_run_can_be_resumed(trained, tmp_path):
    whole = QUICK | {"max_steps": 8, "validate_every": 4, "load_best": False, "width": 4}
    scvi.settings.seed = 1
    trained.train_decoder(**whole | {"max_steps": 4}, checkpoint_dir=tmp_path / "run")
    trained.train_decoder(**whole, checkpoint_dir=tmp_path / "run", ckpt_path="last")
    resumed = trained.reconstruct()
    scvi.settings.seed = 1
    trained.train_decoder(**whole)
    np.testing.assert_allclose(trained.reconstruct(), resumed, atol=1e-6)
    with pytest.raises(ValueError, match="other settings .width: 4 → 8"):
        trained.train_decoder(**whole | {"width": 8}, checkpoint_dir=tmp_path / "run", ckpt_path="last")
