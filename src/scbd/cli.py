"""The command line: ``scbd run`` and what else :mod:`scbd._command_line` lists."""

from __future__ import annotations

import logging
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scbd import _progress
from scbd._argument_values import path_or_url
from scbd._command_line import EXPERIMENTS, actions_of, parser_of_commands
from scbd._files import check_distinct
from scbd._option_names import in_options, options_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    import pandas as pd


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; errors of the user's become one sentence and exit code 2."""
    parser = parser_of_commands()
    arguments = parser.parse_args(argv)
    # what is said names arguments, for those who use Python
    options = options_of(parser, arguments.command.replace("_", "-"))
    if arguments.command in ("inspect", "convert"):  # which say what to type next
        options = options_of(parser, "convert") | options_of(parser, "run") | options
    said = partial(in_options, options=options)
    warnings.formatwarning = lambda message, *args, **kwargs: f"scbd: warning: {said(str(message))}\n"
    _progress.wording = said
    try:
        return _COMMANDS[arguments.command](arguments)
    except _mistakes() as error:
        message = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
        print(f"scbd: {' '.join(said(message).split()) or type(error).__name__}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("scbd: interrupted; what was finished is kept.", file=sys.stderr)
        return 130
    finally:
        _progress.wording = str


def _mistakes() -> tuple[type[Exception], ...]:
    """What a user can do something about: settings, files, packages and devices that are not there."""
    own: list[type[Exception]] = [OSError, ImportError, KeyError, TypeError, ValueError]
    others = {
        "lightning.fabric.utilities.exceptions": "MisconfigurationException",
        "scbd.model._divergence": "TrainingDiverged",
    }
    # what has not been imported raises nothing
    own += [getattr(sys.modules[module], name) for module, name in others.items() if module in sys.modules]
    return tuple(own)


def _demo(arguments: argparse.Namespace) -> int:
    from scbd.paper import demo

    table = demo(arguments.out, alpha=arguments.alpha, seed=arguments.seed, max_steps=arguments.max_steps)
    _print(table)
    print(
        "\nThe colour tells the digit in training; white digits have none. r_c: linear head; z_c: nearest class mean;\n"
        "e: accuracy of the environment (chance 0.5). z_c has learned something only if its supervised loss is below\n"
        "that of a collapsed embedding (ceiling), and r_c only if it beats the random encoder.\n"
        f"Table, pictures and model: {arguments.out}/"
    )
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    from scbd.workflows import UNREADABLE, inspect

    told = inspect(arguments.path, **_named(arguments, "image_key y_key e_key missing sheet"))
    facts, unreadable, why = told.partition(UNREADABLE)
    print(facts + unreadable + _progress.wording(why))
    return 2 if unreadable else 0


def _convert(arguments: argparse.Namespace) -> int:
    from scbd.data import read_crops, verify_screen, write_screen

    if arguments.table is not None and len(arguments.plates) > 1:
        msg = "--table has the rows of one plate: convert plates one by one, then together."
        raise ValueError(msg)
    check_distinct(arguments.plates)
    reading = _named(arguments, "table image_key file_columns root channels fit")
    adata = write_screen(
        arguments.out,
        [read_crops(plate, **reading) for plate in arguments.plates],
        y_key=_one_or_several(arguments.y_key),
        **_named(arguments, "image_key image_size dtype intensity_range compression seed shard n_workers"),
    )
    if arguments.image_key not in adata.obsm:
        print(f"Share {arguments.shard[0]} of {arguments.shard[1]} is written; others are missing.")
        return 0
    if arguments.verify:
        verify_screen(arguments.out, image_key=arguments.image_key)
    shape = " × ".join(map(str, adata.obsm[arguments.image_key].shape[1:]))
    print(f"{adata.n_obs:,} cells of {shape} {adata.obsm[arguments.image_key].dtype}: {arguments.out}")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    from scbd.workflows import run

    style = {"style_target": None if arguments.style_target == "none" else arguments.style_target}
    table = run(
        **_cells(arguments),
        model_kwargs=_named(arguments, f"{_MODEL} alpha") | style,
        train_kwargs=_train_kwargs(arguments) | _named(arguments, "train_size"),
        resume=arguments.resume,
        seed=arguments.seed,
    )
    _print(table.set_index(["label", "embedding"]))
    print(f"\nEmbeddings, model, table and pictures: {arguments.out}/")
    return 0


def _select_alpha(arguments: argparse.Namespace) -> int:
    from scbd.workflows import select_alpha

    found = select_alpha(
        **_cells(arguments),
        alphas=arguments.alphas,
        criterion=arguments.criterion,
        n_folds=arguments.folds,
        n_seeds=arguments.seeds,
        model_kwargs=_named(arguments, _MODEL),
        **_train_kwargs(arguments),
    )
    print(f"\n{found}\n\nRuns, curve and picture: {arguments.out}/")
    return 0


# arguments that are passed on under their own names
_MODEL = (
    "encoder norm n_latent temperature smoothing positives invariance image_size intensity standardize augment clip "
    "whitening"
)
_TRAINING = (
    "max_steps max_epochs batch_size perturbations_per_batch lr encoder_lr weight_decay split load_best early_stopping "
    "accelerator precision preload compile"
)
# of a table of features, these are none
_LABELS = "y_key e_key continuous_covariate_keys position_key split"


def _cells(arguments: argparse.Namespace) -> dict[str, Any]:
    from scbd.workflows import open_cells

    given = [key for key in _named(arguments, _LABELS).values() if key is not None]
    labels = [column for key in given for column in ([key] if isinstance(key, str) else key)]
    cells, where = open_cells(
        arguments.cells,
        obs_columns=arguments.obs_columns or (),
        labels=labels,
        y_key=arguments.y_key,
        **_named(arguments, "image_key layer obsm_key missing"),
    )
    if "image_key" in where:
        where |= _named(arguments, "channels")
    setup = _named(arguments, "e_columns continuous_covariate_keys position_key") | where
    setup |= {"control": arguments.control and _one_or_several(arguments.control)}
    setup = {name: value for name, value in setup.items() if value is not None}
    keys = {"y_key": _one_or_several(arguments.y_key), "e_key": _one_or_several(arguments.e_key)}
    return {"adata": cells, "setup_kwargs": setup, "out": arguments.out} | keys


def _one_or_several(values: list[str]) -> str | list[str]:
    """A list of one as that one, which is how settings are kept."""
    return values[0] if len(values) == 1 else values


def _train_kwargs(arguments: argparse.Namespace) -> dict[str, Any]:
    return _named(arguments, _TRAINING) | {"plan_kwargs": {"n_steps_alpha_warmup": arguments.alpha_warmup}}


def _named(arguments: argparse.Namespace, names: str) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in names.split()}


def _reproduce(arguments: argparse.Namespace) -> int:
    from scbd.paper import EXPERIMENTS, default_out, reproduce

    if arguments.name == "list":
        for name, experiment in EXPERIMENTS.items():
            print(f"{name:22}{experiment.about}")
        return 0
    logging.basicConfig(format="scbd: %(message)s")
    logging.getLogger("scbd").setLevel(logging.INFO)
    out = arguments.out or default_out(arguments.name, arguments.budget, arguments.protocol)
    reproduce(
        arguments.name,
        budget=arguments.budget,
        protocol=arguments.protocol,
        weights=arguments.weights,
        path=arguments.data,
        out=out,
        n_seeds=arguments.seeds,
        shard=arguments.shard,
        report_only=arguments.report,
    )
    print("\n" + (out / "table.md").read_text(encoding="utf-8"))
    print(f"Rows, tables and figures: {out}/")
    return 0


def _completion(arguments: argparse.Namespace) -> int:
    print(completion_script(arguments.shell))
    return 0


def completion_script(shell: str) -> str:
    """What a shell reads to complete commands, options, choices and files of ``scbd``.

    Parameters
    ----------
    shell
        ``"bash"``, ``"zsh"``, ``"fish"`` or ``"tcsh"``.

    Raises
    ------
    ImportError
        If shtab is not installed.
    ValueError
        If the shell is another one.

    Examples
    --------
    >>> from scbd.cli import completion_script
    >>> "select-alpha" in completion_script("bash")
    True
    """
    try:
        import shtab
    except ImportError as error:
        msg = 'Completion needs the package shtab: pip install "scbd[completion]"'
        raise ImportError(msg) from error
    if shell not in shtab.SUPPORTED_SHELLS:
        msg = f"{shell!r} is not a shell that scbd can complete in: give one of {', '.join(shtab.SUPPORTED_SHELLS)}."
        raise ValueError(msg)
    parser = parser_of_commands()
    for action in actions_of(parser):
        if action.type in (Path, path_or_url):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        if action.dest == "name":
            action.choices = [*EXPERIMENTS, "list"]
    return shtab.complete(parser, shell)


def _print(table: pd.DataFrame) -> None:
    print("\n" + table.to_string(float_format=lambda value: f"{value:.3f}"))


_COMMANDS = {
    "demo": _demo,
    "inspect": _inspect,
    "convert": _convert,
    "run": _run,
    "select_alpha": _select_alpha,
    "reproduce": _reproduce,
    "completion": _completion,
}
