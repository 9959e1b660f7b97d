"""The command line, made by cyclopts of the functions below and their docstrings. Loads nothing that takes seconds."""

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

_ABOUT = """Batch-corrected embeddings of perturbed cells by Supervised Contrastive Block Disentanglement.

Messages name arguments as Python has them: max_steps is --max-steps here.

Exit status: 0 finished; 2 error; 130 interrupted by Ctrl-C (SIGINT); 143 terminated by SIGTERM.
"""
# time for cleaning up after a signal; schedulers kill a process 10 to 30 seconds after SIGTERM
_CLEANUP_SECONDS = 5
_settings = Parameter(negative=(), consume_multiple=True)
app = App("scbd", help=_ABOUT, version=lambda: f"scbd {version('scbd')}", default_parameter=_settings)
app.register_install_completion_command()


@Parameter(name="*", group="Cells")
@dataclass(frozen=True, kw_only=True)
class Cells:
    """What is read, and what its columns mean.

    Parameters
    ----------
    y_key
        Column(s) of the perturbation; several are crossed.
    e_key
        Column(s) of the environment.
    e_columns
        Of several: each is an environment of its own (the default), or each combination is one.
    control
        Label(s) of the controls, such as DMSO.
    position_key
        Of features, with controls: column of the position on the plate, whose effect is taken away.
    continuous_covariate_keys
        Columns of numbers that z_c is to know nothing of, too: row, time, number of cells.
    image_key
        Key of the images in obsm.
    channels
        Channels to take, by name or number.
    layer
        Features in place of images: a layer, or X.
    obsm_key
        Features in place of images: a key of obsm.
    features
        Of a table of features: beginnings of their names; by default those of CellProfiler's compartments.
    missing
        Of a table of features: fill in the feature's median where values are missing, or leave out such rows.
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
        """Open the cells, and return the arguments of a job: the cells, their columns, and how they are set up.

        Call it before importing anything that loads torch: a missing file or column is then reported at once.
        """
        _check_paths(path)
        from scbd._anndata import obs_column
        from scbd._inspect import open_cells

        how: dict[str, Any] = {} if self.features is None else {"features": self.features}
        adata, where = open_cells(
            path, image_key=self.image_key, layer=self.layer, obsm_key=self.obsm_key, missing=self.missing, **how
        )
        for column in (*self.y_key, *self.e_key, self.position_key, *(self.continuous_covariate_keys or ())):
            if column is not None:
                obs_column(adata.obs, column)
        names = ("e_columns", "position_key", "continuous_covariate_keys", "channels")
        setup = (
            {"control": self.control and _one_or_several(self.control)}
            | {name: getattr(self, name) for name in names}
            | where
        )
        return {
            "adata": adata,
            "y_key": _one_or_several(self.y_key),
            "e_key": _one_or_several(self.e_key),
            "setup_kwargs": {name: value for name, value in setup.items() if value is not None},
        }


@Parameter(name="*", group="Model")
@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained.

    Parameters
    ----------
    encoder
        small, resnet18, resnet50 or densenet121 of images; linear or mlp of features; auto: what suits the cells.
    n_latent
        Dimension of both embeddings.
    style_target
        What z_s is clustered by: the environment, the pair of perturbation and environment; none leaves z_s out.
    invariance
        Form of the invariance loss; listing is the published one. Each has a scale of alpha of its own.
    smoothing
        Label smoothing, at least 0 and below 1.
    image_size
        Resize images to so many pixels a side.
    augment
        Turn and flip images at random.
    standardize_by
        By which cells inputs of each environment are standardised.
    whitening
        Of features: what is whitened before the encoder.
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
        """Arguments of the model."""
        return {name: None if value == "none" else value for name, value in asdict(self).items()}


@Parameter(name="*", group="Training")
@dataclass(frozen=True, kw_only=True)
class Training:
    """How it is trained.

    Parameters
    ----------
    max_steps
        Length in updates.
    max_epochs
        Length in passes over the training cells.
    batch_size
        Cells a batch; by default what suits the encoder.
    lr
        Learning rate.
    split
        Column that says train, validation or test.
    train_size
        Share of the cells that is trained on, drawn at random.
    load_best
        End with the weights of the lowest validation loss.
    early_stopping
        Stop when the validation loss stops falling.
    accelerator
        cpu, gpu, mps or auto.
    precision
        32-true, or bf16-mixed on a GPU.
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
        """Arguments of ``train``."""
        return asdict(self)


@app.command
def inspect(path: str, /, *, image_key: str = "single_cell_images") -> None:
    """Say what a file or folder is, and which command takes it.

    Parameters
    ----------
    path
        File or folder of any kind.
    image_key
        Key of the images in obsm.
    """
    _check_paths(path)
    from scbd._inspect import inspect

    print(inspect(path, image_key=image_key))


@app.command
def benchmark(path: str, /, *, cells: Cells, model: Model = Model(), training: Training = Training()) -> None:
    """Say in a minute how fast this machine reads, trains and embeds: call it as run, without --out.

    Parameters
    ----------
    path
        A screen or an .h5ad of images or features, or a table of features.
    """
    job = cells.opened(path)
    from scbd._speed import measure_speed

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
    """Write crops of cells as one screen, larger than memory; an interrupted job goes on where it stopped.

    Parameters
    ----------
    plates
        Files or folders of crops: AnnData, scPortrait, Zarr, arrays, tables or folders of image files, LMDB.
    out
        Screen to make, a .zarr.
    y_key
        Column(s) of the perturbation: cells are stored such that batches of perturbations are read fast.
    table
        Of arrays without labels: a table with a row a cell.
    image_key
        Key of the images in obsm.
    file_columns
        Of a table of image files: the columns that name them, one a channel.
    root
        Of a table of image files: the folder that their names begin in.
    channels
        Channels to take, by name or number.
    fit
        Of image files that differ in size: pad or crop them to squares of one size, or say how many pixels a side.
    image_size
        Resize to so many pixels a side.
    dtype
        Store pixels as this type, such as uint8.
    intensity_range
        What becomes its lowest and highest value; by default percentiles of each channel.
    compression
        lz4 for a slow disk, zstd for a small one; by default none.
    seed
        Seed of the order of cells.
    verify
        Read everything again in the end, and compare it with its checksums.
    """
    _check_paths(*plates, *([] if table is None else [table]))
    from scbd.data._readers import read_crops
    from scbd.data._screens import verify_screen, write_screen

    reading: dict[str, Any] = {"table": table, "root": root, "channels": channels, "fit": fit}
    reading |= {} if file_columns is None else {"file_columns": file_columns}
    crops = [read_crops(plate, image_key=image_key, **reading) for plate in plates]
    how: dict[str, Any] = {"image_key": image_key, "image_size": image_size, "dtype": dtype, "seed": seed}
    how |= {"intensity_range": intensity_range, "compression": compression}
    adata = write_screen(out, crops, y_key=_one_or_several(y_key), **how)
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
    cells: Cells,
    model: Model = Model(),
    training: Training = Training(),
) -> None:
    """Train, embed all cells, name the best embedding, and write a report, pictures and everything else to a folder.

    The best embedding retrieves held-out cells of the same perturbation in other environments with the highest average
    precision. A fifth of the cells, and of 30 perturbations or more a fifth of these (never controls), are held out of
    training. --train-size and --split choose otherwise; with --train-size 1 all cells are trained on, and no embedding
    is called best. After an interruption, the same command with --resume continues.

    Parameters
    ----------
    path
        A screen or an .h5ad of images or features, or a table of features.
    out
        Folder to make.
    alpha
        Weight of the invariance loss.
    mechanism_key
        Column(s) with a label that several perturbations share, such as the mechanism of action. The verdict uses it
        where perturbations lie in one environment each.
    guide_key
        Column of the reagent, such as the guide RNA, for the same case.
    erm
        Also train a plain classifier as a rival of z_c: by default for features, where it takes seconds. For images it
        takes about as long as the model.
    seed
        Seed of everything.
    resume
        Continue an interrupted run.
    open_report
        Open report.html in a browser at the end.
    """
    job = cells.opened(path)
    from scbd import run

    how: dict[str, Any] = {"model_kwargs": model.kwargs() | {"alpha": alpha}, "train_kwargs": training.kwargs()}
    how |= {"mechanism_key": mechanism_key and _one_or_several(mechanism_key), "guide_key": guide_key, "erm": erm}
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
    cells: Cells,
    model: Model = Model(),
    training: Training = Training(),
) -> None:
    """Train at several weights of the invariance loss, and choose one without a test set.

    Parameters
    ----------
    path
        A screen or an .h5ad of images or features, or a table of features.
    out
        Folder of the runs; called again, it goes on with what is there.
    alphas
        Weights to compare.
    criterion
        The most invariance that keeps what is learned of the perturbation, or what is best in environments held out.
    n_folds
        With unseen: groups of environments that are held out in turn; by default each by itself.
    n_seeds
        Runs at each weight.
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
    """Analyse a small simulated screen, from images to the report; or show on coloured digits what invariance does.

    Parameters
    ----------
    what
        screen: cells of a simulated screen are written as images with a table, converted, trained on and scored
        (minutes). digits: train on coloured digits and test on white ones, with invariance, without, and with a random
        encoder.
    out
        Folder of the results. Called again, an interrupted screen continues.
    alpha
        Weight of the invariance loss.
    max_steps
        Updates of each run.
    seed
        Seed of everything.
    """
    from scbd._demo import demo, demo_digits

    if what == "screen":
        _print_result(demo(out, alpha=alpha, seed=seed, max_steps=max_steps), out)
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
    """Run a command and return its exit status.

    SIGINT and SIGTERM become one sentence and status 130 and 143, even if the command came to its end after the signal.
    """
    tokens = sys.argv[1:] if argv is None else list(argv)
    with _signals_raised(tokens) as received:
        status = _run_command(tokens)
    if not received:
        return status
    gc.freeze()  # the interpreter would search for garbage before it exits, which takes 3 seconds
    return 128 + received[0]


def _run_command(tokens: Sequence[str]) -> int:
    """Run a command; an error of the user becomes one sentence and status 2, a warning one sentence."""
    notes, shown = logging.getLogger("scbd"), logging.StreamHandler()
    level, in_python = notes.level, warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"scbd: {message}\n"  # the line of code says nothing here
    notes.addHandler(shown)
    notes.setLevel(logging.INFO)
    try:
        app(tokens, exit_on_error=False, result_action="return_value")
    except CycloptsError:  # which has said what is wrong
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
    """Raise ``SystemExit`` in the block on SIGINT or SIGTERM, and state at its end how to continue.

    After a signal the block ends without an exception, whatever was raised. The process ends at once on a second
    signal, if the exception is lost, or if the block has not ended :data:`_CLEANUP_SECONDS` later. No result is lost by
    that, since a file takes its name when it is complete. Earlier handlers are restored. Outside the main thread, which
    alone receives signals, nothing is changed.

    Yields
    ------
    A list that holds the number of the signal as soon as one was received.
    """
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        if received:
            end_now()
        received.append(number)
        if hasattr(signal, "alarm"):  # not on Windows
            signal.alarm(_CLEANUP_SECONDS)
        raise SystemExit(128 + number)

    def end_now() -> None:
        # unlike print, os.write may interrupt a print
        os.write(2, f"\n{_how_to_continue(tokens, received[0])}\n".encode())
        os._exit(128 + received[0])

    def end_if_lost(unraisable: Any) -> None:
        # Python drops exceptions in destructors and in callbacks of weak references
        if received and isinstance(unraisable.exc_value, SystemExit):
            end_now()
        hook(unraisable)

    names = ("SIGINT", "SIGTERM", "SIGALRM") if threading.current_thread() is threading.main_thread() else ()
    earlier = {number: signal.getsignal(number) for name in names if (number := getattr(signal, name, None))}
    # a shell lets jobs in the background ignore Ctrl-C; a handler that is not Python's could not be restored
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
            from scbd._files import say

            say(_how_to_continue(tokens, received[0]))  # on a line of its own, where a progress bar is shown
    finally:
        if received and hasattr(signal, "alarm"):
            signal.alarm(0)
        for number, handler in earlier.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook


def _how_to_continue(tokens: Sequence[str], number: int) -> str:
    """Return the sentence for a command that was ended by a signal."""
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
    """Raise ``FileNotFoundError`` if a file or folder is missing; addresses of stores are checked when opened."""
    from scbd._files import existing_path

    for path in paths:
        if "://" not in str(path):
            existing_path(path)


def _one_or_several(values: list[str]) -> str | list[str]:
    """A list of one as that one, which is how settings are kept."""
    return values[0] if len(values) == 1 else values
