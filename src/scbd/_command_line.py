"""What can be said on the command line: a parser for each command. Loads nothing that takes seconds."""

from __future__ import annotations

import argparse
import textwrap
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scbd import _argument_values as values
from scbd._shared_options import add_cells, add_missing, add_model, add_training

# of `scbd reproduce`, in the order of its list, which takes seconds to import; a test compares them
EXPERIMENTS = (
    "cmnist camelyon17 rxrx1 pacs vlcs cmnist-alphas pacs-alphas cmnist-ablations camelyon17-ablations "
    "cmnist-long cmnist-variance cmnist-map screen-map cmnist-systems camelyon17-systems pacs-systems "
    "vlcs-systems screen-systems screen-rivals screen-wells hidden-cmnist hidden-screen hidden-cpjump1 "
    "cmnist-lengths screen-lengths screen-neighbours counterfactuals effect-pictures screen screen-alphas "
    "screen-variance funk22 funk22-systems funk22-cellprofiler cpjump1 cpjump1-settings cpjump1-ablations "
    "breinig2015 new-plates new-plates-cpjump1"
).split()
_SHELLS = ("bash", "zsh", "fish", "tcsh")
_WRITES = """
What it writes to --out: cells.h5ad (the labels and both embeddings of all cells), metrics.csv (how well perturbation
and environment are predicted), umap.png, training_curves.png, history.csv, settings.json, checkpoints and the model.
"""
_HOW_LONG = """
How long a run takes: images without a GPU are learned by the small encoder in 300 steps, about a quarter of an hour on
two CPU cores for 4,000 cells or more of 4 × 64 × 64 pixels. With a GPU the default is a ResNet-18 and 400 passes over
up to 20,000 cells, fewer passes over more. Tables of features take 50 steps with the linear encoder and 400 with the
network. Each run says in its first seconds how long it will take and what would be cheaper; --max-steps shortens it.
"""
_HOW_LONG_SELECT = """
Each alpha is a run of its own, times --seeds: five runs by default (six with another --invariance than variance), times
the groups of environments that --criterion unseen holds out.
"""
_HOW_LONG_DEMO = """
How long it takes: two training runs and a random encoder, some minutes on two CPU cores. --max-steps 100 is a quick
look.
"""
_RESUMES = "If it is killed, call it again in the same way: it goes on where it stopped."


def parser_of_commands() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "scbd", description="Batch-corrected image embeddings by Supervised Contrastive Block Disentanglement."
    )
    parser.add_argument("--version", action="version", version=f"scbd {version('scbd')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_demo, _add_inspect, _add_convert, _add_run, _add_select_alpha, _add_reproduce, _add_completion):
        add(commands)
    for listed in commands._choices_actions:  # each says itself what the list of all says of it
        commands.choices[listed.dest].description = f"scbd {listed.dest}: {listed.help}."
    return parser


def actions_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """All arguments of a parser and of its commands.

    Parameters
    ----------
    parser
        The parser; commands of commands are followed.

    Examples
    --------
    >>> from scbd._command_line import actions_of, parser_of_commands
    >>> "--max-steps" in {option for action in actions_of(parser_of_commands()) for option in action.option_strings}
    True
    """
    found = []
    for action in parser._actions:
        found.append(action)
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                found += actions_of(command)
    return found


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="train on coloured digits, test on white ones (minutes)",
        formatter_class=values.Help,
        epilog=_HOW_LONG_DEMO,
    )
    demo.add_argument("--out", type=Path, default=Path("results/demo"), help="directory for table and pictures")
    demo.add_argument("--alpha", type=values.alpha, default="auto", help="weight of the invariance loss, or 'auto'")
    demo.add_argument("--max-steps", type=int, default=600, help="steps of each training run")
    demo.add_argument("--seed", type=values.seed, default=0, help="seed of everything")
    demo.set_defaults(command="demo")


def _add_inspect(commands: Any) -> None:
    inspect = commands.add_parser(
        "inspect", help="say what a file or folder is, and what to type next", formatter_class=values.Help
    )
    inspect.add_argument("path", type=Path, help="file or folder of any kind")
    inspect.add_argument(
        "--image-key", help="obsm key of the images (single_cell_images; else the first array of four dimensions)"
    )
    inspect.add_argument("--y-key", nargs="+", help="column(s) of the perturbation")
    inspect.add_argument("--e-key", nargs="+", help="column(s) of the environment")
    add_missing(inspect)
    inspect.add_argument("--sheet", type=Path, help="PNG to draw ten cells to")
    inspect.set_defaults(command="inspect")


def _add_convert(commands: Any) -> None:
    convert = commands.add_parser(
        "convert",
        help="write crops of any kind into one screen that is read by row",
        formatter_class=values.Help,
        epilog=_RESUMES,
    )
    convert.add_argument(
        "plates",
        nargs="+",
        type=Path,
        help=".h5ad, .h5sc, .zarr, .npz, .npy, a table (.csv, .tsv, .parquet) that names image files, a folder of "
        "images (their folders are the labels), or that of an LMDB",
    )
    convert.add_argument(
        "--out", type=values.path_or_url, required=True, help=".h5ad, .zarr, or the URL of a Zarr store"
    )
    convert.add_argument("--y-key", required=True, nargs="+", help="column(s) of the perturbation, to sort by")
    convert.add_argument(
        "--image-key", default="single_cell_images", help="key of the images, where they are read and written"
    )
    convert.add_argument("--table", type=Path, help="table with one row per image, for a single plate")
    convert.add_argument("--file-columns", nargs="+", default=["path"], help="columns of a table that name image files")
    convert.add_argument("--root", type=Path, help="folder that paths in a table are relative to (that of the table)")
    convert.add_argument("--channels", nargs="+", help="channels to take, by name or number; or names for unnamed ones")
    convert.add_argument(
        "--fit",
        type=values.fit,
        metavar="pad|crop|SIDE|HxW",
        help="pad or cut crops of different sizes around their middle: to the largest, the smallest, or this size",
    )
    convert.add_argument("--image-size", type=values.image_size, metavar="SIDE|HxW", help="resize to this many pixels")
    convert.add_argument("--dtype", choices=["uint8", "uint16", "float16", "float32"], help="type of the stored images")
    convert.add_argument(
        "--intensity-range",
        type=float,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="values of pixels that become the lowest and the highest of --dtype (percentiles of each channel)",
    )
    convert.add_argument("--compression", choices=["lz4", "zstd"], help="compression of a Zarr store")
    convert.add_argument("--seed", type=values.seed, default=0, help="seed of the order")
    convert.add_argument("--workers", dest="n_workers", type=int, metavar="N", help="blocks at once (one core each)")
    convert.add_argument("--shard", type=values.shard, default=(1, 1), metavar="I/N", help="the I-th of N processes")
    convert.add_argument("--verify", action="store_true", help="read what was written, and compare with its checksums")
    convert.set_defaults(command="convert")


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="train on your cells, embed, evaluate, write",
        formatter_class=values.Help,
        epilog=f"{_WRITES}{_HOW_LONG}\nIf it is killed, call it again with --resume: it goes on where it stopped.",
    )
    add_cells(run)
    run.add_argument("--resume", action="store_true", help="go on with an interrupted run in --out")
    model = add_model(run)
    model.add_argument("--alpha", type=values.alpha, default="auto", help="weight of the invariance loss, or 'auto'")
    model.add_argument(
        "--style-target",
        choices=["e", "ye", "none"],
        default="e",
        help="what z_s is clustered by: environment, the pair with the perturbation, or 'none' for no z_s",
    )
    train = add_training(run)
    train.add_argument(
        "--train-size",
        type=float,
        help="share of the cells to train on, where there is no --split; scores are of the others (0.9; of linear 1)",
    )
    train.add_argument("--seed", type=values.seed, default=0, help="seed of everything")
    run.set_defaults(command="run")


def _add_select_alpha(commands: Any) -> None:
    select = commands.add_parser(
        "select-alpha",
        help="train at several alphas, choose one without test cells",
        formatter_class=values.Help,
        epilog=f"{_HOW_LONG}{_HOW_LONG_SELECT}\n{_RESUMES}",
    )
    add_cells(select)
    select.add_argument(
        "--alphas", type=values.number, nargs="+", help="values to try (default: some that suit --invariance)"
    )
    select.add_argument(
        "--criterion",
        choices=["kept", "unseen"],
        default="kept",
        help="accuracy on cells of the same environments, or on environments held out in turn",
    )
    select.add_argument("--folds", type=int, help="for 'unseen': number of groups of environments to hold out")
    select.add_argument("--seeds", type=int, default=1, help="runs of each alpha")
    add_model(select)
    add_training(select)
    select.set_defaults(command="select_alpha")


def _add_reproduce(commands: Any) -> None:
    again = commands.add_parser(
        "reproduce",
        help="run an experiment of the paper, make its tables and figures",
        formatter_class=values.Help,
        epilog=f"{_experiments()}\n\nHow long it takes: on two CPU cores minutes at --budget smoke and hours at small; "
        f"paper is meant for a GPU. {_RESUMES}",
    )
    again.add_argument("name", metavar="NAME", help="an experiment (below), or 'list' for a sentence about each")
    again.add_argument("--budget", default="smoke", help="smoke (minutes), small (hours) or paper (GPU)")
    again.add_argument(
        "--protocol", default="ours", help="ours, or authors: trained as the code of the paper's authors"
    )
    again.add_argument("--data", type=Path, help="files of the data set, where it is not downloaded")
    again.add_argument("--weights", type=Path, help="state dict of torchvision's network, to start encoders from")
    again.add_argument("--out", type=Path, help="directory; results/NAME-BUDGET without it")
    again.add_argument("--seeds", type=int, help="number of seeds, in place of the budget's")
    again.add_argument("--shard", type=values.shard, default=(1, 1), metavar="I/N", help="the I-th of N processes")
    again.add_argument("--report", action="store_true", help="run nothing, make tables and figures of what is there")
    again.set_defaults(command="reproduce")


def _add_completion(commands: Any) -> None:
    completion = commands.add_parser(
        "completion",
        help="print what lets your shell complete commands and options",
        formatter_class=values.Help,
        epilog="""
Needs the package shtab: pip install "scbd[completion]". Then, once:

  bash   scbd completion bash > ~/.local/share/bash-completion/completions/scbd
  zsh    scbd completion zsh > "${fpath[1]}/_scbd"
  fish   scbd completion fish > ~/.config/fish/completions/scbd.fish
  tcsh   scbd completion tcsh > ~/.scbd.tcsh, and source that file in ~/.tcshrc
""",
    )
    completion.add_argument("shell", choices=_SHELLS, help="shell that will read it")
    completion.set_defaults(command="completion")


def _experiments() -> str:
    """Names of experiments, those of one data set or question on a line."""
    families: dict[str, list[str]] = {}
    for name in EXPERIMENTS:
        families.setdefault(name.partition("-")[0], []).append(name)
    lines = (textwrap.wrap("  ".join(names), 76, break_on_hyphens=False) for names in families.values())
    return "Experiments:\n\n" + "\n".join(f"  {line}" for family in lines for line in family)
