"""The command line, built with cyclopts: each command is a function, whose docstring is its help text.

Slow packages, such as torch, are imported inside the functions, so that ``--help`` and mistakes in options are answered
at once.
"""

from __future__ import annotations

import gc
import logging
import os
import shlex
import signal
import sys
import threading
import warnings
import webbrowser
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from pandas import DataFrame

_HELP = """Batch-corrected embeddings of perturbed cells by Supervised Contrastive Block Disentanglement.

Messages name arguments as Python has them: max_steps is --max-steps here.

Exit status: 0 finished; 2 error; 130 interrupted by Ctrl-C (SIGINT); 143 terminated by SIGTERM.
"""
# Time in seconds that a command has to end cleanly after SIGINT or SIGTERM. It is short, because job schedulers kill a
# process 10 to 30 seconds after SIGTERM.
_CLEANUP_SECONDS = 5
_PARAMETER_DEFAULTS = Parameter(negative=(), consume_multiple=True)
app = App("scbd", help=_HELP, version=lambda: f"scbd {version('scbd')}", default_parameter=_PARAMETER_DEFAULTS)
app.register_install_completion_command()


@Parameter(name="*", group="Cells")
@dataclass(frozen=True, kw_only=True)
class CellOptions:
    """Options for the cells: where their images or features are, and which columns hold their labels.

    Parameters
    ----------
    y_key
        Column(s) of the perturbation. If there are several, each combination of values is a perturbation.
    e_key
        Column(s) of the environment, such as the well or the plate.
    e_columns
        If --e-key names several columns: "side_by_side" (default) removes the effect of each column; "crossed" treats
        each combination of values as one environment.
    control
        Label(s) of the controls, such as DMSO.
    position_key
        Column of the position on the plate, such as the well. If the inputs are features and controls are given, the
        effect of the position is removed.
    image_key
        Key of the images in obsm.
    channels
        Channels of the images to use, by name or number. Default: all except masks.
    layer
        Use features of this layer instead of images; "X" for the main matrix.
    obsm_key
        Use features under this key of obsm instead of images.
    features
        For a table of features: prefixes of the names of features. Default: those of CellProfiler's compartments.
    missing
        For a table of features with missing values: "median" replaces them with the median of the feature, "drop"
        removes their rows.
    """

    y_key: list[str]
    e_key: list[str]
    e_columns: Literal["side_by_side", "crossed"] | None = None
    control: list[str] | None = None
    position_key: str | None = None
    image_key: str = "single_cell_images"
    channels: list[str] | None = None
    layer: str | None = None
    obsm_key: str | None = None
    features: list[str] | None = None
    missing: Literal["median", "drop"] = "median"

    def opened(self, path: str) -> dict[str, Any]:
        """Open the cells at ``path``, and return them with their options as keyword arguments for :func:`scbd.run`.

        Call this method before importing modules that import torch, which takes seconds. A missing file or column is
        then reported at once.
        """
        _check_paths(path)
        from scbd._shared.labels import get_obs_column
        from scbd._workflows.inspection import open_cells

        how: dict[str, Any] = {} if self.features is None else {"features": self.features}
        adata, where = open_cells(
            path, image_key=self.image_key, layer=self.layer, obsm_key=self.obsm_key, missing=self.missing, **how
        )
        for column in (*self.y_key, *self.e_key, self.position_key):
            if column is not None:
                get_obs_column(adata.obs, column)
        names = ("e_columns", "position_key", "channels")
        setup = (
            {"control": self.control and _unwrap_single(self.control)}
            | {name: getattr(self, name) for name in names}
            | where
        )
        return {
            "adata": adata,
            "y_key": _unwrap_single(self.y_key),
            "e_key": _unwrap_single(self.e_key),
            "setup_kwargs": {name: value for name, value in setup.items() if value is not None},
        }


@Parameter(name="*", group="Model")
@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options for the model, which computes the embeddings z_c (perturbation) and z_s (environment).

    An option that is not given has the value of the preset.

    Parameters
    ----------
    preset
        Settings of one use case: "screen" embeds the cells of a perturbation screen, "domain_generalization" classifies
        images of an environment that is not in the training data, and "paper" is the published method.
    encoder
        For images: "small", "resnet18", "resnet50" or "densenet121". For features: "linear" or "mlp". "auto" chooses by
        the kind and size of the inputs.
    n_latent
        Number of dimensions of z_c and of z_s.
    style_target
        Label by which z_s is clustered: "e" for the environment, "ye" for the combination of perturbation and
        environment. With "none", the model has no z_s.
    invariance
        Form of the invariance loss; "listing" is the form of the published method. The scale of --alpha differs between
        forms.
    smoothing
        Label smoothing in the supervised loss of z_c, at least 0 and below 1.
    image_size
        Resize images to squares with this number of pixels per side.
    augment
        Rotate training images by right angles and flip them, at random.
    standardize_by
        Inputs are standardised per environment, with mean and deviation estimated from these cells: "controls", all
        "cells", or chosen automatically ("auto"). "none" standardises over all environments together.
    whitening
        For features: whitening transform that is applied before the encoder.
    """

    preset: Literal["screen", "domain_generalization", "paper"] = "screen"
    encoder: str | None = None
    n_latent: int | None = None
    style_target: Literal["e", "ye", "none"] | None = None
    invariance: Literal["variance", "listing", "formula"] | None = None
    smoothing: float | None = None
    image_size: int | None = None
    augment: Annotated[bool | None, Parameter(negative="--no-augment")] = None
    standardize_by: Literal["auto", "controls", "cells", "none"] | None = None
    whitening: Literal["auto", "within", "controls", "lda", "plda", "none"] | None = None

    def kwargs(self) -> dict[str, Any]:
        """Return the given options by name, as arguments of :class:`scbd.SCBDModel`; "none" becomes `None`."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return {name: None if value == "none" else value for name, value in given.items()}


@Parameter(name="*", group="Training")
@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Options for the training of the model.

    Parameters
    ----------
    max_steps
        Number of training steps. Default: depends on the encoder and the number of cells.
    max_epochs
        Number of passes over the training cells, instead of --max-steps.
    batch_size
        Number of cells per training batch. Default: depends on the encoder.
    lr
        Learning rate. Default: depends on the encoder.
    split
        Column that contains "train", "validation" or "test" for each cell.
    train_size
        Fraction of the cells that are used for training, drawn at random.
    load_best
        Keep the weights with the lowest validation loss instead of the weights of the last step.
    early_stopping
        Stop training when the validation loss no longer decreases.
    accelerator
        Device to train on: "cpu", "gpu", "mps" or "auto".
    precision
        Floating-point precision of the training: "32-true", or "bf16-mixed" on a GPU.
    """

    max_steps: int | None = None
    max_epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    split: str | None = None
    train_size: float | None = None
    load_best: bool = False
    early_stopping: bool = False
    accelerator: str = "auto"
    precision: str = "32-true"

    def kwargs(self) -> dict[str, Any]:
        """Return the options by name, as arguments of :meth:`scbd.SCBDModel.train`."""
        return asdict(self)


@app.command
def inspect(path: str, /, *, image_key: str = "single_cell_images") -> None:
    """Describe the content of a file or folder, and propose the command to convert or analyse it.

    Parameters
    ----------
    path
        File or folder of any kind.
    image_key
        Key of the images in obsm of an AnnData file, or in an .npz file.
    """
    _check_paths(path)
    from scbd._workflows.inspection import describe_path

    print(describe_path(path, image_key=image_key))


@app.command
def benchmark(
    path: str,
    /,
    *,
    cells: CellOptions,
    model: ModelOptions = ModelOptions(),
    training: TrainingOptions = TrainingOptions(),
) -> None:
    """Measure how fast this machine reads cells, trains on them and embeds them; takes about a minute.

    The options for cells, model and training are those of "scbd run". The trained model is not kept.

    Parameters
    ----------
    path
        Cells: a screen (.zarr), an .h5ad file with images or features, or a table of features.
    """
    job = cells.opened(path)
    from scbd._workflows.speed import measure_speed

    print(f"\n{measure_speed(**job, model_kwargs=model.kwargs(), train_kwargs=training.kwargs())}")


@app.command
def convert(
    *plates: str,
    out: Path,
    y_key: list[str],
    table: Path | None = None,
    image_key: str = "single_cell_images",
    file_columns: list[str] | None = None,
    root: Path | None = None,
    channels: list[str] | None = None,
    fit: Literal["pad", "crop"] | int | None = None,
    image_size: int | None = None,
    dtype: str | None = None,
    intensity_range: tuple[float, float] | None = None,
    compression: Literal["lz4", "zstd"] | None = None,
    seed: int = 0,
    verify: bool = False,
) -> None:
    """Convert crops (images of single cells) to one screen: a .zarr folder from which models are trained.

    The screen may be larger than memory. An interrupted conversion continues when the same command is called again.

    Parameters
    ----------
    plates
        Files or folders of crops: AnnData, scPortrait, Zarr, arrays, tables or folders of image files, LMDB.
    out
        Screen to write, a .zarr folder.
    y_key
        Column(s) of the perturbation. Cells are sorted by perturbation, so that training batches are read fast.
    table
        Table with the labels of the cells, one row per image, for crops that are stored without labels.
    image_key
        Key of the images in obsm.
    file_columns
        For a table of image files: columns with the file names, one column per channel.
    root
        For a table of image files: folder to which the file names are relative. Default: the folder of the table.
    channels
        Channels of the images to use, by name or number. Default: all except masks.
    fit
        For crops that differ in size or are not square: "pad" or "crop" them to squares of equal size; a number is the
        side of the square in pixels.
    image_size
        Resize images to squares with this number of pixels per side.
    dtype
        Number type of the stored pixels, such as "uint8".
    intensity_range
        Two pixel values, which become the lowest and the highest value of --dtype. Default: percentiles of each
        channel.
    compression
        Compression of the screen: "lz4" is read faster from a slow disk, "zstd" makes a smaller file. Default: no
        compression.
    seed
        Seed of the random order of cells within each perturbation.
    verify
        Read the whole screen at the end, and compare it with its checksums.
    """
    _check_paths(*plates, *([] if table is None else [table]))
    if table is not None and len(plates) > 1:
        msg = (
            f"--table {table} describes the cells of one plate, and there are {len(plates)}: convert each plate with "
            "its own table, then the new screens together (scbd convert plate_1.zarr plate_2.zarr …)."
        )
        raise ValueError(msg)
    from scbd.data._readers import read_crops
    from scbd.data._screens import verify_screen, write_screen

    reading: dict[str, Any] = {"table": table, "root": root, "channels": channels, "fit": fit}
    reading |= {} if file_columns is None else {"file_columns": file_columns}
    crops = [read_crops(plate, image_key=image_key, **reading) for plate in plates]
    how: dict[str, Any] = {"image_key": image_key, "image_size": image_size, "dtype": dtype, "seed": seed}
    how |= {"intensity_range": intensity_range, "compression": compression}
    adata = write_screen(out, crops, y_key=_unwrap_single(y_key), **how)
    if verify:
        verify_screen(out)
    shape = " × ".join(map(str, adata.obsm[image_key].shape[1:]))
    print(f"{adata.n_obs:,} cells of {shape} {adata.obsm[image_key].dtype}: {out}")


@app.command
def run(
    path: str,
    /,
    *,
    out: Path,
    alpha: float | Literal["auto"] | None = None,
    mechanism_key: list[str] | None = None,
    guide_key: str | None = None,
    erm: Annotated[bool | None, Parameter(negative="--no-erm")] = None,
    seed: int = 0,
    resume: bool = False,
    open_report: Annotated[bool, Parameter(name="--open")] = False,
    cells: CellOptions,
    model: ModelOptions = ModelOptions(),
    training: TrainingOptions = TrainingOptions(),
) -> None:
    """Train a model, embed all cells, name the best embedding, and write a report and all results to a folder.

    The embedding z_c is compared with simple batch corrections of the inputs. In the best embedding, held-out cells
    retrieve the same perturbation in other environments with the highest average precision.

    By default, a fifth of the cells is held out of training. With 30 or more perturbations, a fifth of the
    perturbations (never controls) is also held out with all of their cells. Change this with --train-size or --split.
    With --train-size 1, all cells are trained on, and no embedding is called best.

    After an interruption, call the same command with --resume to continue.

    Parameters
    ----------
    path
        Cells: a screen (.zarr), an .h5ad file with images or features, or a table of features.
    out
        Folder for the results; created if it is missing.
    alpha
        Weight of the invariance loss, or "auto" to choose it during training. Default: that of --preset, which is
        "auto" except for "paper".
    mechanism_key
        Column(s) with a label that several perturbations share, such as the mechanism of action. Used to compare
        embeddings if perturbations do not repeat across environments.
    guide_key
        Column of the reagent, such as the guide RNA. Used to compare embeddings if perturbations do not repeat across
        environments.
    erm
        Also train a plain classifier of the perturbation, and compare its embedding with z_c. Default: yes for
        features, where it takes seconds; no for images, where it takes about as long as the model.
    seed
        Seed of all random numbers.
    resume
        Continue an interrupted run in the folder --out.
    open_report
        Open report.html in a browser at the end.
    """
    job = cells.opened(path)
    from scbd import run

    settings = model.kwargs() | ({} if alpha is None else {"alpha": alpha})
    how: dict[str, Any] = {"model_kwargs": settings, "train_kwargs": training.kwargs()}
    how |= {"mechanism_key": mechanism_key and _unwrap_single(mechanism_key), "guide_key": guide_key, "erm": erm}
    table = run(**job, out=out, resume=resume, seed=seed, **how)
    _print_result(table, out)
    if open_report:
        webbrowser.open((out / "report.html").resolve().as_uri())


@app.command
def select_alpha(
    path: str,
    /,
    *,
    out: Path,
    alphas: list[float] | None = None,
    criterion: Literal["kept", "unseen"] = "kept",
    n_folds: int | None = None,
    n_seeds: int = 1,
    cells: CellOptions,
    model: ModelOptions = ModelOptions(),
    training: TrainingOptions = TrainingOptions(),
) -> None:
    """Train with several weights of the invariance loss (alpha), and choose the best weight without a test set.

    Parameters
    ----------
    path
        Cells: a screen (.zarr), an .h5ad file with images or features, or a table of features.
    out
        Folder for the trained models and the table of scores. If the command is called again, finished models are kept.
    alphas
        Weights to compare, at least two. Default: five or six weights, depending on --invariance.
    criterion
        "kept" chooses the largest weight at which the perturbation of validation cells is predicted almost as well as
        at the best weight. "unseen" predicts the perturbation of cells in held-out environments, and chooses the
        largest weight that is as good as the best one within the standard error.
    n_folds
        With --criterion unseen: number of groups of environments, which are held out in turn. Default: one group per
        environment.
    n_seeds
        Number of models to train with each weight.
    """
    job = cells.opened(path)
    from scbd import select_alpha

    how: dict[str, Any] = {"alphas": alphas, "criterion": criterion, "n_folds": n_folds, "n_seeds": n_seeds}
    print(f"\n{select_alpha(**job, out=out, model_kwargs=model.kwargs(), **how, **training.kwargs())}")
    print(f"\nRuns, curve and picture: {out}/")


def _print_result(table: DataFrame, out: Path) -> None:
    """Print the scores of the embeddings, the verdict which of them is best, and the path of the report.

    ``table`` is the result of :func:`scbd.run`, and ``out`` its directory.
    """
    scores = table.attrs["scores"]
    if len(scores):
        wide = scores.pivot_table(index="embedding", columns="measure", values="value", sort=False)
        for number, measure in enumerate(wide, start=1):
            print(f"({number}) {measure}")
        wide.columns = [f"({number})" for number in range(1, wide.shape[1] + 1)]
        print(wide.to_string(float_format="{:.3f}".format))
    print(f"\n{table.attrs['verdict']}")
    print(f"\nReport: {out}/report.html")


@app.command
def demo(
    what: Literal["screen", "digits"] = "screen",
    /,
    *,
    out: Path = Path("results/demo"),
    alpha: float | Literal["auto"] = "auto",
    max_steps: int | None = None,
    seed: int = 0,
) -> None:
    """Run a demonstration on a small simulated screen, or on coloured digits.

    Parameters
    ----------
    what
        "screen" writes cells of a simulated screen as images with a table, converts them, trains a model and writes the
        report, in a few minutes. "digits" trains on coloured digits and tests on white digits, with and without the
        invariance loss, and with a random encoder for comparison.
    out
        Folder for the results. If the command is called again, an interrupted demonstration "screen" continues.
    alpha
        Weight of the invariance loss, or "auto" to choose it during training.
    max_steps
        Number of training steps of each model.
    seed
        Seed of all random numbers.
    """
    from scbd._workflows.demo import demo_digits, demo_screen

    if what == "screen":
        _print_result(demo_screen(out, alpha=alpha, seed=seed, max_steps=max_steps), out)
        return
    table = demo_digits(out, alpha=alpha, seed=seed, **({} if max_steps is None else {"max_steps": max_steps}))
    print("\n" + table.to_string(float_format="{:.3f}".format))
    print(
        "\nIn training, the colour predicts the digit; white digits have no colour. r_c: linear head; z_c: nearest "
        "class mean;\n"
        "e: accuracy of the environment (chance 0.5). z_c has learned something only if its supervised loss is below\n"
        "that of a collapsed embedding (ceiling), and r_c only if it beats the random encoder.\n"
        f"Table, pictures and model: {out}/"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command of the command line, and return its exit status.

    After SIGINT (Ctrl-C) or SIGTERM, a sentence that explains how to continue is printed, and the exit status is 130 or
    143, even if the command was still completed after the signal.

    Parameters
    ----------
    argv
        Words of the command, such as ``["inspect", "cells.h5ad"]``. Default: ``sys.argv``, without the name of the
        program.
    """
    tokens = sys.argv[1:] if argv is None else list(argv)
    with _signals_raised(tokens) as received:
        status = _run_command(tokens)
    if not received:
        return status
    # The garbage collection at the exit of the interpreter takes three seconds; gc.freeze excludes all objects from it.
    gc.freeze()
    return 128 + received[0]


def _run_command(tokens: Sequence[str]) -> int:
    """Run a command and return its exit status: 0, or 2 after an error that the user can correct.

    Such errors, and warnings, are printed as one sentence, without a traceback or a line of code.
    """
    notes, shown = logging.getLogger("scbd"), logging.StreamHandler()
    level, in_python = notes.level, warnings.formatwarning
    # By default, Python prints a warning together with the line of code that raised it.
    warnings.formatwarning = lambda message, *_, **__: f"scbd: {message}\n"
    notes.addHandler(shown)
    notes.setLevel(logging.INFO)
    try:
        app(tokens, exit_on_error=False, result_action="return_value")
    except CycloptsError:
        # The message of the error is not printed here, because cyclopts has printed it.
        return 2
    except (OSError, ImportError, KeyError, TypeError, ValueError, RuntimeError) as error:
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        print(f"scbd: {message}", file=sys.stderr)
        return 2
    finally:
        notes.removeHandler(shown)
        notes.setLevel(level)
        warnings.formatwarning = in_python
    return 0


@contextmanager
def _signals_raised(tokens: Sequence[str]) -> Iterator[list[int]]:
    """Interrupt the ``with`` block on SIGINT or SIGTERM by a ``SystemExit``, and print at its end how to continue.

    After a signal, any exception that the block raises is suppressed. The process is ended at once

    - on a second signal,
    - if Python discards the ``SystemExit``, or
    - if the block has not ended after :data:`_CLEANUP_SECONDS` seconds.

    No complete result is lost in this way, because files get their final name only when they are complete.

    Earlier signal handlers are restored at the end of the block. In a thread other than the main thread, no handler is
    changed, because only the main thread receives signals.

    Yields
    ------
    An initially empty list, to which the number of the signal is appended when it is received.
    """
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        if received:
            end_now()
        received.append(number)
        # signal.alarm does not exist on Windows
        if hasattr(signal, "alarm"):
            signal.alarm(_CLEANUP_SECONDS)
        raise SystemExit(128 + number)

    def end_now() -> None:
        # os.write is used because print raises an error in a signal handler if the signal has interrupted another print
        os.write(2, f"\n{_how_to_continue(tokens, received[0])}\n".encode())
        os._exit(128 + received[0])

    def end_if_lost(unraisable: Any) -> None:
        # Python discards exceptions that are raised in destructors and in callbacks of weak references. If the
        # discarded exception is the SystemExit of a signal, the process is ended here.
        if received and isinstance(unraisable.exc_value, SystemExit):
            end_now()
        hook(unraisable)

    names = ("SIGINT", "SIGTERM", "SIGALRM") if threading.current_thread() is threading.main_thread() else ()
    earlier = {number: signal.getsignal(number) for name in names if (number := getattr(signal, name, None))}
    # Two kinds of signal handlers are not replaced. SIG_IGN: shells make background jobs ignore Ctrl-C. None: the
    # handler was set outside Python, and could not be restored.
    earlier = {number: handler for number, handler in earlier.items() if handler not in (signal.SIG_IGN, None)}
    hook = sys.unraisablehook
    try:
        sys.unraisablehook = end_if_lost
        for number in earlier:
            signal.signal(number, end)
        try:
            yield received
        except BaseException:
            if not received:
                raise
        if received:
            from scbd._shared.progress import print_above_bar

            print_above_bar(_how_to_continue(tokens, received[0]))
    finally:
        if received and hasattr(signal, "alarm"):
            signal.alarm(0)
        for number, handler in earlier.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook


def _how_to_continue(tokens: Sequence[str], number: int) -> str:
    """Return the sentence that explains how to continue a command (``tokens``) after a signal (``number``) ended it."""
    command, typed = tokens[0] if tokens else "", shlex.join(["scbd", *tokens])
    how = {
        "run": f"To continue, call: {typed}{'' if '--resume' in tokens else ' --resume'}",
        "convert": "To continue, call the same command again; if the screen is there, it is complete.",
        "select-alpha": "To continue, call the same command again.",
        "demo": "Call the same command again.",
    }
    stopped = f"scbd: terminated by {signal.Signals(number).name}."
    return f"{stopped} {how.get(command, 'Called again, the command starts from the beginning.')}"


def _check_paths(*paths: str | Path) -> None:
    """Raise ``FileNotFoundError`` if a file or folder given by the user does not exist.

    Addresses (with ``://``) are not checked, because functions that open files raise an error with advice for them.
    """
    from scbd._shared.files import existing_path

    for path in paths:
        if "://" not in str(path):
            existing_path(path)


def _unwrap_single(values: list[str]) -> str | list[str]:
    """Return the only value of a list with one value, and any other list unmodified.

    A single column or label is thus stored in the settings in the same form as if it was given in Python.
    """
    return values[0] if len(values) == 1 else values
