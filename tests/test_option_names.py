from __future__ import annotations

import pytest

from scbd._command_line import actions_of, parser_of_commands
from scbd._option_names import _OTHER_NAMES, in_options, options_of

RUN, SELECT, CONVERT, REPRODUCE = (
    options_of(parser_of_commands(), command) for command in ("run", "select-alpha", "convert", "reproduce")
)


@pytest.mark.parametrize(
    ("options", "said", "read"),
    [
        (RUN, "max_steps=0: give more.", "--max-steps 0: give more."),
        (RUN, "Give max_steps or max_epochs, not both.", "Give --max-steps or --max-epochs, not both."),
        (RUN, "go on with that run (resume=True).", "go on with that run (--resume)."),
        (RUN, "use style_target=None, or whitening=None", "use --style-target none, or --whitening none"),
        (RUN, "leave out standardize=False", "leave out --no-standardize"),
        (RUN, "keep image_size=(32, 64), or image_size=8.", "keep --image-size 32x64, or --image-size 8."),
        (RUN, "leave it out: channels=['DNA', 'ER stain'].", "leave it out: --channels DNA 'ER stain'."),
        (RUN, "name them with control=…; try lr=1e-05.", "name them with --control …; try --lr 1e-05."),
        (RUN, "a coarser e_key, or n_steps_alpha_warmup", "a coarser --e-key, or --alpha-warmup"),
        (CONVERT, "n_workers=0, intensity_range=[0, 9]", "--workers 0, --intensity-range 0 9"),
        (SELECT, "n_folds=9; n_seeds=0: run one", "--folds 9; --seeds 0: run one"),
        (REPRODUCE, "give the files (path=…)", "give the files (--data …)"),
    ],
)
def test_arguments_become_options(options, said, read):
    assert in_options(said, options) == read


@pytest.mark.parametrize(
    "said",
    [
        "There is no file /data/max_steps/e_key.csv.",
        "obs has no 'e_key' (its keys: y_key, e_key). Look at adata.obs['y_key'].",
        "read it with scbd.data.read_crops(path, file_columns=…)",
        "the split leaves no channels to compile: lower validation_size",
        "standardize=True, compile=False, n_latent=None, preload=None",
        "train(online_head=True), max_steps_of=3",
    ],
)
def test_what_has_no_option_stays(said):
    assert in_options(said, RUN) == said


def test_options_of_other_names_exist():
    """One that was renamed would be passed over, and its argument said as it is."""
    known = {option for action in actions_of(parser_of_commands()) for option in action.option_strings}
    assert set(_OTHER_NAMES.values()) <= known
