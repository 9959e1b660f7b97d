"""How a model is trained: one object that ``train`` makes, ``train_decoder`` changes and the run reads."""

from __future__ import annotations

import inspect
import math
from dataclasses import Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from scbd._checks import check_count, check_number
from scbd.model._arguments import known_arguments, lightning_arguments

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from scbd.data import Split

Method = TypeVar("Method", bound="Callable[..., Any]")

# of networks of images
_LR = 1e-4
# those that leave the weights in float32, and Lightning's short names of them
_PRECISIONS = ("auto", "32-true", "bf16-mixed", "16-mixed")
_SHORT_PRECISIONS = {None: "32-true", 32: "32-true", "32": "32-true", "bf16": "bf16-mixed"} | dict.fromkeys(
    (16, "16"), "16-mixed"
)
_PLAN_CHECKS: dict[str, Callable[..., None]] = {
    "lr": check_number,
    "weight_decay": check_number,
    "n_steps_alpha_warmup": partial(check_count, least=0),
}


def _count(default: Any, least: int = 1, also: tuple[type, ...] = ()) -> Any:
    """A whole number; values of other types, and `None` where that is the default, are looked at elsewhere."""
    return field(default=default, metadata={"check": partial(check_count, least=least), "also": also})


def _number(default: Any, most: float = math.inf) -> Any:
    """A number from 0 on."""
    return field(default=default, metadata={"check": partial(check_number, most=most), "also": ()})


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Arguments of :meth:`scbd.SCBDModel.train`, checked: names, values, and what does not go together.

    To add one: a field here with its check and its line below, and the place that reads it.

    Parameters
    ----------
    max_steps, max_epochs
        Length of the run, in updates or in passes over the training cells (not both). By default scvi-tools'
        heuristic: 400 epochs up to 20,000 cells, fewer beyond. With the encoder ``"small"`` 300 steps: minutes on a
        processor; of features 50 steps with ``"linear"``, 400 with others.
    lr, weight_decay
        Learning rate and weight decay of AdamW. The rate is 0.0001 by default, 0.001 with ``"small"``, and for features
        0.001 with others than ``"linear"``.
    encoder_lr
        The rate of the encoders, where what is behind them (projections, heads) should learn faster, as behind an
        encoder that has learned elsewhere: a tenth of ``lr``, say. 0 freezes them, the running statistics of batch
        normalisation included, and spares their backward pass. By default ``lr``.
    batch_size
        Cells a batch; larger batches hold more pairs and are better, up to memory. By default 2,048, or all
        training cells if they are fewer.
    perturbations_per_batch
        Draw P perturbations with equally many cells each; `None` shuffles plainly. By default plain shuffling
        where it gives a cell about eight partners of its perturbation, P × 8 otherwise.
    neighbours
        Of P perturbations draw cells in stretches that follow each other in the table, which a disk reads at once.
        By default for images that are not in memory, where rows are sorted by perturbation and shuffled inside, as
        :func:`scbd.data.write_screen` writes them.
    split
        A :class:`~scbd.data.Split`, or a column of ``obs`` that holds ``train``, ``validation`` and ``test``.
        By default a random split, stratified by y and e; or that of the model's earlier run on the same cells.
    train_size, validation_size
        Fractions of a random split, 0.9 and the rest by default, and all of features with ``"linear"``; what they
        leave is the test part.
    validate_every
        Steps between validations and checkpoints. By default a twentieth of the run, or more where validation
        would take more than about a tenth of the time. A validation is of whole batches of ``batch_size``, or of one
        of all validation cells if they are fewer: of 3,000 it sees 2,048 by default, the same each time.
    load_best
        End with the weights of the lowest validation loss rather than the last, if the run is interrupted, too. A
        contrastive loss counts overconfidence: on a screen it was seen to rise while complexes were found better and
        wells worse. With ``alpha="auto"``, each validation weighs invariance by the alpha of its time.
    online_head
        Train a linear head of the perturbation on r_c beside the encoder, as the paper's authors do: on each training
        batch as the encoder has just embedded it, by cross-entropy, with an AdamW of the same rate and decay. It
        changes nothing of the training. ``predict`` asks it, as it was at the weights that are kept. Classifiers have
        a head already, and get no other.
    early_stopping, early_stopping_patience
        Stop after so many validations without improvement of the validation loss; with ``load_best``, at its best. A
        run that had stopped goes on only with more patience.
    checkpoint_dir
        Where to keep ``last.ckpt``, the state before it (``previous.ckpt``), ``history.csv`` and, with
        ``load_best``, ``best.ckpt``. Without it, an interrupted run cannot be resumed.
    ckpt_path
        Resume, optimiser included: ``"last"`` for the last state in ``checkpoint_dir`` (or the one before, if that
        cannot be read), or a checkpoint, beside which history and best weights are looked for. Cells, labels and
        settings must be those of the run.
    accelerator, devices
        See :class:`lightning.pytorch.Trainer`.
    precision
        ``"32-true"``, or ``"bf16-mixed"``, which computes the encoders in bfloat16 and the losses in float32
        (``"16-mixed"``: in float16); weights are float32. By default bfloat16 where it was seen to do no harm and to be
        faster: for the encoders ``"small"`` and ``"resnet18"`` on processors with instructions for it. Embeddings are
        float32 either way.
    preload
        ``"device"`` puts all images on the device before training. By default they are read batch by batch, in
        the background.
    compile
        Run both blocks through :func:`torch.compile`. It takes a C++ compiler and a minute.
    seed
        Seed of the split, the batches and the augmentation; by default ``scvi.settings.seed``, from which the
        weights are drawn when the model is made, or 0.
    enable_progress_bar
        Show steps, rate, time left and losses.
    plan_kwargs
        Further arguments of the training plan: ``n_steps_alpha_warmup``, over which alpha rises from 0; ``lr`` and
        ``weight_decay`` may be given here, too.
    trainer_kwargs
        Further arguments of :class:`lightning.pytorch.Trainer`. Callbacks and loggers come beside our own.

    Raises
    ------
    TypeError
        If there is no such argument.
    ValueError
        If a value cannot be, or does not go with another.

    Examples
    --------
    >>> settings = scbd.model.TrainSettings(max_steps=2000)
    >>> settings.batch_size is None, settings.precision  # None: what suits the data
    (True, 'auto')
    """

    max_steps: int | None = _count(None)
    max_epochs: int | None = _count(None)
    lr: float | None = _number(None)
    weight_decay: float = _number(0.01)
    encoder_lr: float | None = _number(None)
    batch_size: int | None = _count(None, least=2)
    perturbations_per_batch: int | str | None = _count("auto", also=(str, type(None)))
    neighbours: bool | Literal["auto"] = "auto"
    split: str | Split | None = None
    train_size: float | None = _number(None, most=1.0)
    validation_size: float | None = _number(None, most=1.0)
    validate_every: int | None = _count(None)
    load_best: bool = False
    online_head: bool = False
    early_stopping: bool = False
    early_stopping_patience: int = _count(10)
    checkpoint_dir: str | os.PathLike[str] | None = None
    ckpt_path: str | os.PathLike[str] | None = None
    accelerator: str = "auto"
    devices: int | list[int] | str = "auto"
    precision: str = "auto"
    preload: Literal["device"] | None = None
    compile: bool = False
    seed: int | None = _count(None, least=0)
    enable_progress_bar: bool = True
    plan_kwargs: Mapping[str, Any] | None = None
    trainer_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for option in _options():
            _check(option.name, getattr(self, option.name), option)
        if self.max_steps is not None and self.max_epochs is not None:
            msg = "Give max_steps or max_epochs, not both."
            raise ValueError(msg)
        precision = _SHORT_PRECISIONS.get(self.precision, self.precision)
        if precision not in _PRECISIONS:
            msg = (
                f"precision={precision!r} would leave other weights than float32: use one of {', '.join(_PRECISIONS)}."
            )
            raise ValueError(msg)
        plan = known_arguments(self.plan_kwargs or {}, _PLAN_CHECKS, "plan_kwargs")
        for name, value in plan.items():
            _PLAN_CHECKS[name](name, value)
        own = [option.name for option in _options()]
        trainer = lightning_arguments(self.trainer_kwargs or {}, own, "train()")
        if trainer.pop("enable_checkpointing", None) and not (self.checkpoint_dir or trainer.get("callbacks")):
            msg = "enable_checkpointing=True needs a place: give checkpoint_dir."
            raise ValueError(msg)
        # as they are passed on: without what asks for what is done anyway
        object.__setattr__(self, "precision", precision)
        object.__setattr__(self, "plan_kwargs", plan)
        object.__setattr__(self, "trainer_kwargs", trainer)

    @classmethod
    def of(cls, given: Mapping[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})) -> TrainSettings:
        """From the arguments of a call, and a model's own defaults: names that are not ours are Lightning's."""
        own = {option.name for option in _options()}
        ours = {name: value for name, value in given.items() if name in own}
        for name, value in defaults.items():
            if ours.get(name) is None and not (name == "max_steps" and ours.get("max_epochs")):
                ours[name] = value
        return cls(**ours, trainer_kwargs={name: value for name, value in given.items() if name not in own})

    @property
    def directory(self) -> Path | None:
        """Where states are kept."""
        return Path(self.checkpoint_dir) if self.checkpoint_dir else None

    @property
    def plan(self) -> dict[str, Any]:
        """Arguments of the training plan, with the learning rates wherever they were given."""
        rates = {"lr": _LR if self.lr is None else self.lr, "weight_decay": self.weight_decay}
        if self.encoder_lr is not None:
            rates["encoder_lr"] = self.encoder_lr
        return rates | dict(self.plan_kwargs or {})


def _options() -> list[Field[Any]]:
    return [option for option in fields(TrainSettings) if option.name != "trainer_kwargs"]


def _check(name: str, value: Any, option: Field[Any]) -> None:
    left_open = value is None and option.default is None
    if "check" in option.metadata and not left_open and not isinstance(value, option.metadata["also"]):
        option.metadata["check"](name, value)


def takes_settings(method: Method) -> Method:
    """Show a method that makes :class:`TrainSettings` of its arguments with these, in help and documentation.

    Its docstring has ``{arguments}`` in the place of their descriptions.
    """
    shown = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for option in _options():
        kind = inspect.Parameter.KEYWORD_ONLY
        shown.append(inspect.Parameter(option.name, kind, default=option.default, annotation=option.type))
    shown.append(inspect.Parameter("trainer_kwargs", inspect.Parameter.VAR_KEYWORD, annotation="Any"))
    method.__signature__ = inspect.Signature(shown, return_annotation="None")  # type: ignore[attr-defined]
    if method.__doc__ and TrainSettings.__doc__:  # python -OO has neither
        described = inspect.cleandoc(TrainSettings.__doc__).split("----------\n")[1].split("\n\nRaises")[0]
        described = described.replace("\ntrainer_kwargs\n", "\n**trainer_kwargs\n")
        method.__doc__ = inspect.cleandoc(method.__doc__).replace("{arguments}", described)
    return method
