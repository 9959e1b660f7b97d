"""The command line, made by cyclopts: each command is a function below, and its help is the docstring.

Slow packages, such as torch, are imported inside the functions, so that mistakes and ``--help`` are answered at once.
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
# seconds for cleaning up after a signal; job schedulers kill a process 10 to 30 seconds after SIGTERM
_CLEANUP_SECONDS = 5
_PARAMETER_DEFAULTS = Parameter(negative=(), consume_multiple=True)
app = App("scbd", help=_HELP, version=lambda: f"scbd {version('scbd')}", default_parameter=_PARAMETER_DEFAULTS)
app.register_install_completion_command()


@Parameter(name="*", group="Cells")
@dataclass(frozen=True, kw_only=True)
class CellOptions:
    """Options that select the inputs and the columns of the cells.

    Parameters
    ----------
    y_key
        Column(s) of the perturbation. If there are several, each combination of values is a perturbation.
    e_key
        Column(s) of the environment, such as the well or the plate.
    e_columns
        With several columns of the environment: side_by_side (default) removes the effect of each column; crossed
        treats each combination of values as one environment.
    control
        Label(s) of the controls, such as DMSO.
    position_key
        Column of the position on the plate. For features with controls: the effect of the position is removed.
    continuous_covariate_keys
        Columns of numbers of which z_c should also be independent, such as row, time or number of cells.
    image_key
        Key of the images in obsm.
    channels
        Channels to use, by name or number. Default: all but masks.
    layer
        Use features instead of images: name of a layer, or X.
    obsm_key
        Use features instead of images: key in obsm.
    features
        For tables of features: prefixes of the names of features. Default: those of CellProfiler's compartments.
    missing
        For tables of features with missing values: median fills in the median of the feature; drop removes the rows.
    """

    y_key: list[str]
    e_key: list[str]
    e_columns: Literal["side_by_side", "crossed"] | None = None
    control: list[str] | None = None
    position_key: str | None = None
    continuous_covariate_keys: list[str] | None = None
    image_key: str = "single_cell_images"
    channels: list[str] | None = None
    layer: str | None = None
    obsm_key: str | None = None
    features: list[str] | None = None
    missing: Literal["median", "drop"] = "median"

    def opened(self, path: str) -> dict[str, Any]:
        """Open the cells, and return them with the arguments that describe them, as :func:`scbd.run` takes them.

        Call this method before anything that imports torch, which takes seconds: a missing file or column is then
        reported at once.
        """
        _check_paths(path)
        from scbd._shared.labels import get_obs_column
        from scbd._workflows.inspection import open_cells

        how: dict[str, Any] = {} if self.features is None else {"features": self.features}
        adata, where = open_cells(
            path, image_key=self.image_key, layer=self.layer, obsm_key=self.obsm_key, missing=self.missing, **how
        )
        for column in (*self.y_key, *self.e_key, self.position_key, *(self.continuous_covariate_keys or ())):
            if column is not None:
                get_obs_column(adata.obs, column)
        names = ("e_columns", "position_key", "continuous_covariate_keys", "channels")
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
    """Options of the model.

    Parameters
    ----------
    encoder
        For images: small, resnet18, resnet50 or densenet121. For features: linear or mlp. auto chooses by the inputs.
    n_latent
        Dimension of z_c and of z_s.
    style_target
        Label by which z_s is clustered: e is the environment, ye the pair of perturbation and environment. none trains
        no z_s.
    invariance
        Form of the invariance loss; listing is the published one. The scale of alpha differs between forms.
    smoothing
        Label smoothing of z_c, at least 0 and below 1.
    image_size
        Resize images to squares of this many pixels per side.
    augment
        Rotate (by right angles) and flip training images at random.
    standardize_by
        Cells from which the mean and deviation of each environment are estimated, to standardise the inputs per
        environment. none standardises over all cells.
    whitening
        For features: whitening transform before the encoder.
    """

    encoder: str = "auto"
    n_latent: int | None = None
    style_target: Literal["e", "ye", "none"] = "e"
    invariance: Literal["variance", "listing", "formula", "mean", "mass"] = "variance"
    smoothing: float = 2 / 3
    image_size: int | None = None
    augment: Annotated[bool, Parameter(negative="--no-augment")] = True
    standardize_by: Literal["auto", "controls", "cells", "none"] = "auto"
    whitening: Literal["auto", "within", "controls", "lda", "plda", "none"] = "auto"

    def kwargs(self) -> dict[str, Any]:
        """Return the options as arguments of :class:`scbd.SCBDModel`."""
        return {name: None if value == "none" else value for name, value in asdict(self).items()}


@Parameter(name="*", group="Training")
@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Options of the training.

    Parameters
    ----------
    max_steps
        Number of training steps.
    max_epochs
        Number of passes over the training cells, instead of max_steps.
    batch_size
        Number of cells per batch. Default: chosen by the encoder.
    lr
        Learning rate. Default: chosen by the encoder.
    split
        Column that contains train, validation or test for each cell.
    train_size
        Fraction of the cells used for training, drawn at random.
    load_best
        Keep the weights with the lowest validation loss, not the last ones.
    early_stopping
        Stop when the validation loss no longer decreases.
    accelerator
        Device: cpu, gpu, mps or auto.
    precision
        Floating-point precision: 32-true, or bf16-mixed on a GPU.
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
        """Return the options as arguments of :meth:`scbd.SCBDModel.train`."""
        return asdict(self)


@app.command
def inspect(path: str, /, *, image_key: str = "single_cell_images") -> None:
    """Describe a file or folder, and propose the next command.

    Parameters
    ----------
    path
        File or folder of any kind.
    image_key
        Key of the images in obsm.
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
    """Measure how fast this machine reads, trains and embeds, in about a minute.

    The options are those of run, without --out.

    Parameters
    ----------
    path
        Cells: a screen (.zarr) or an .h5ad of images or features, or a table of features.
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
    """Convert crops of cells to one screen, which may be larger than memory.

    An interrupted conversion continues when the same command is called again.

    Parameters
    ----------
    plates
        Files or folders of crops: AnnData, scPortrait, Zarr, arrays, tables or folders of image files, LMDB.
    out
        Screen to write, a .zarr folder.
    y_key
        Column(s) of the perturbation. Cells are sorted by perturbation, so that training batches are read fast.
    table
        Table with one row of labels per image, for crops without labels of their own.
    image_key
        Key of the images in obsm.
    file_columns
        For a table of image files: columns with the file names, one column per channel.
    root
        For a table of image files: folder to which the file names are relative. Default: the folder of the table.
    channels
        Channels to use, by name or number. Default: all but masks.
    fit
        For crops that differ in size or are not square: pad or crop them to squares of the same size; a number is the
        side of the square in pixels.
    image_size
        Resize images to squares of this many pixels per side.
    dtype
        Type of the stored pixels, such as uint8.
    intensity_range
        Pixel values that become the lowest and highest value of the dtype. Default: percentiles of each channel.
    compression
        lz4 reads faster from a slow disk, zstd makes a smaller file. Default: no compression.
    seed
        Seed of the order of the cells of a perturbation.
    verify
        Read the whole screen at the end, and compare it with its checksums.
    """
    _check_paths(*plates, *([] if table is None else [table]))
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
    alpha: float | Literal["auto"] = "auto",
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
    """Train, embed all cells, name the best embedding, and write a report and all results to a folder.

    The best embedding retrieves held-out cells of the same perturbation in other environments with the highest average
    precision.

    By default, a fifth of the cells is held out of training. With 30 or more perturbations, a fifth of these (never
    controls) is also held out with all of their cells. --train-size and --split change this. With --train-size 1, all
    cells are trained on, and no embedding is called best.

    After an interruption, call the same command with --resume to continue.

    Parameters
    ----------
    path
        Cells: a screen (.zarr) or an .h5ad of images or features, or a table of features.
    out
        Folder for the results; created if it is missing.
    alpha
        Weight of the invariance loss.
    mechanism_key
        Column(s) with a label that several perturbations share, such as the mechanism of action. The verdict uses it
        if perturbations do not repeat across environments.
    guide_key
        Column of the reagent, such as the guide RNA. The verdict uses it in the same case.
    erm
        Also train a plain classifier, to be compared with z_c. Default: yes for features, where it takes seconds; no
        for images, where it takes about as long as the model.
    seed
        Seed of all random numbers.
    resume
        Continue an interrupted run.
    open_report
        Open report.html in a browser at the end.
    """
    job = cells.opened(path)
    from scbd import run

    how: dict[str, Any] = {"model_kwargs": model.kwargs() | {"alpha": alpha}, "train_kwargs": training.kwargs()}
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
    """Train with several weights of the invariance loss (alpha), and choose one without a test set.

    Parameters
    ----------
    path
        Cells: a screen (.zarr) or an .h5ad of images or features, or a table of features.
    out
        Folder for the runs. If the command is called again, finished runs are kept.
    alphas
        Weights to compare.
    criterion
        kept chooses the strongest invariance that preserves the information on the perturbation; unseen chooses the
        weight that is best in held-out environments.
    n_folds
        With unseen: number of groups of environments, which are held out in turn. Default: one group per environment.
    n_seeds
        Number of runs with each weight.
    """
    job = cells.opened(path)
    from scbd import select_alpha

    how: dict[str, Any] = {"alphas": alphas, "criterion": criterion, "n_folds": n_folds, "n_seeds": n_seeds}
    print(f"\n{select_alpha(**job, out=out, model_kwargs=model.kwargs(), **how, **training.kwargs())}")
    print(f"\nRuns, curve and picture: {out}/")


def _print_result(table: DataFrame, out: Path) -> None:
    """Print the scores behind the verdict, the verdict, and the path of the report."""
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
        screen: write cells of a simulated screen as images with a table, convert them, train on them and write the
        report, in a few minutes. digits: train on coloured digits and test on white ones, with and without the
        invariance loss, and with a random encoder.
    out
        Folder for the results. If the command is called again, an interrupted screen continues.
    alpha
        Weight of the invariance loss.
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
        "\nThe colour tells the digit in training; white digits have none. r_c: linear head; z_c: nearest class mean;\n"
        "e: accuracy of the environment (chance 0.5). z_c has learned something only if its supervised loss is below\n"
        "that of a collapsed embedding (ceiling), and r_c only if it beats the random encoder.\n"
        f"Table, pictures and model: {out}/"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command of the command line, and return its exit status.

    After SIGINT or SIGTERM, a sentence explains how to continue, and the status is 130 or 143. This holds even if the
    command still finished after the signal.

    Parameters
    ----------
    argv
        Words of the command. Default: ``sys.argv``, without the name of the program.
    """
    tokens = sys.argv[1:] if argv is None else list(argv)
    with _signals_raised(tokens) as received:
        status = _run_command(tokens)
    if not received:
        return status
    gc.freeze()  # skip the interpreter's garbage collection at exit, which takes 3 seconds
    return 128 + received[0]


def _run_command(tokens: Sequence[str]) -> int:
    """Run a command and return its exit status: 0, or 2 after an error that the user can correct.

    Errors and warnings are printed as one sentence, without a traceback or a line of code.
    """
    notes, shown = logging.getLogger("scbd"), logging.StreamHandler()
    level, in_python = notes.level, warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"scbd: {message}\n"  # without the line of code
    notes.addHandler(shown)
    notes.setLevel(logging.INFO)
    try:
        app(tokens, exit_on_error=False, result_action="return_value")
    except CycloptsError:  # cyclopts has printed the message
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
    """Raise ``SystemExit`` in the block on SIGINT or SIGTERM, and print at its end how to continue.

    After a signal, any exception of the block is suppressed. The process is ended at once

    - on a second signal,
    - if Python discards the ``SystemExit``, or
    - if the block has not ended after :data:`_CLEANUP_SECONDS`.

    This loses no result, since files appear under their name only when they are complete. Earlier signal handlers are
    restored at the end. Outside the main thread, which alone receives signals, no handler is changed.

    Yields
    ------
    An initially empty list, to which the number of the signal is appended when it is received.
    """
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        if received:
            end_now()
        received.append(number)
        if hasattr(signal, "alarm"):  # missing on Windows
            signal.alarm(_CLEANUP_SECONDS)
        raise SystemExit(128 + number)

    def end_now() -> None:
        # print could raise an error here, if the signal has interrupted another print; os.write cannot
        os.write(2, f"\n{_how_to_continue(tokens, received[0])}\n".encode())
        os._exit(128 + received[0])

    def end_if_lost(unraisable: Any) -> None:
        # Python discards exceptions that are raised in destructors and in callbacks of weak references
        if received and isinstance(unraisable.exc_value, SystemExit):
            end_now()
        hook(unraisable)

    names = ("SIGINT", "SIGTERM", "SIGALRM") if threading.current_thread() is threading.main_thread() else ()
    earlier = {number: signal.getsignal(number) for name in names if (number := getattr(signal, name, None))}
    # SIG_IGN: shells make background jobs ignore Ctrl-C. None: a handler set outside Python, which cannot be restored.
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

            print_above_bar(_how_to_continue(tokens, received[0]))  # does not break a progress bar
    finally:
        if received and hasattr(signal, "alarm"):
            signal.alarm(0)
        for number, handler in earlier.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook


def _how_to_continue(tokens: Sequence[str], number: int) -> str:
    """Return the sentence that explains how to continue a command that was ended by a signal."""
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
    """Raise ``FileNotFoundError`` if a file or folder is missing; addresses (``://``) are not checked here."""
    from scbd._shared.files import existing_path

    for path in paths:
        if "://" not in str(path):
            existing_path(path)


def _unwrap_single(values: list[str]) -> str | list[str]:
    """Return the value of a list with one value, otherwise the list, as settings are stored."""
    return values[0] if len(values) == 1 else values
