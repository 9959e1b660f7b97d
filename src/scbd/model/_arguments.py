"""What may be said to ``train``: names and values, looked at before any work is done."""

from __future__ import annotations

import difflib
import inspect
import math
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

# whole numbers, and the least that each may be
_WHOLE = {
    "max_steps": 1,
    "max_epochs": 1,
    "batch_size": 2,
    "perturbations_per_batch": 1,
    "validate_every": 1,
    "early_stopping_patience": 1,
    "seed": 0,
    "n_steps_alpha_warmup": 0,
}
# numbers, and the most that each may be
_NUMBERS = {"lr": math.inf, "weight_decay": math.inf, "train_size": 1.0, "validation_size": 1.0}
# of those, the ones that may be left open
_OPEN = {"max_steps", "max_epochs", "batch_size", "perturbations_per_batch", "validate_every", "seed"}
_OPEN |= {"train_size", "validation_size"}
PLAN_ARGUMENTS = ("lr", "weight_decay", "n_steps_alpha_warmup")
_BY_CALLBACK = "pass lightning.pytorch.callbacks.EarlyStopping(...) in callbacks=[...]"
_BY_SPLIT = "split at random by train_size and validation_size, or give split=scbd.data.Split(train=..., ...)"
_CONSTANT_LR = "the learning rate is constant (lr); pass a callback that changes it in callbacks=[...]"
# arguments of scvi-tools: values that ask for what is done anyway, and where to find the rest
_ELSEWHERE: dict[str, tuple[tuple[Any, ...], str]] = {
    "datasplitter_kwargs": ((None, {}), _BY_SPLIT),
    "datasplitter_config": ((None,), _BY_SPLIT),
    "shuffle_set_split": ((True,), _BY_SPLIT),
    "external_indexing": ((None,), _BY_SPLIT),
    "datamodule": ((None,), "the data are those of setup_anndata; open large screens with scbd.data.open_screen"),
    "use_gpu": ((None,), "use accelerator='gpu' or 'cpu', and devices"),
    "check_val_every_n_epoch": ((None,), "use validate_every, in steps"),
    "simple_progress_bar": ((True, False), "use enable_progress_bar"),
    "progress_bar_refresh_rate": ((1,), "use enable_progress_bar"),
    "early_stopping_monitor": (("validation_loss",), f"'validation_loss' is watched; for another, {_BY_CALLBACK}"),
    "early_stopping_min_delta": ((0,), _BY_CALLBACK),
    "early_stopping_mode": (("min",), _BY_CALLBACK),
    "early_stopping_warmup_epochs": ((0,), _BY_CALLBACK),
    "checkpointing_monitor": (("validation_loss",), "use checkpoint_dir and load_best"),
    "learning_rate_monitor": ((False,), "pass lightning.pytorch.callbacks.LearningRateMonitor() in callbacks=[...]"),
    "log_save_dir": ((None,), "use checkpoint_dir, where history.csv is"),
    "trainer_config": ((None, {}), "pass its arguments to train itself"),
    "plan_config": ((None, {}), "use plan_kwargs"),
    "barebones": ((False,), "it takes the history away"),
    "reduce_lr_on_plateau": ((False,), _CONSTANT_LR),
    "lr_factor": ((), _CONSTANT_LR),
    "lr_patience": ((), _CONSTANT_LR),
    "lr_scheduler_metric": ((), _CONSTANT_LR),
    "optimizer": (("AdamW",), "the optimiser is AdamW"),
    "n_epochs_kl_warmup": ((None,), "use n_steps_alpha_warmup; variational baselines take kl_warmup_steps"),
    "n_steps_kl_warmup": ((None,), "use n_steps_alpha_warmup; variational baselines take kl_warmup_steps"),
}


def checked_trainer_kwargs(train: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that are left for Lightning, once all are known and their values can be.

    Parameters
    ----------
    train
        The method that was called, whose own arguments are known.
    given
        All arguments.

    Raises
    ------
    TypeError
        If there is no argument of such a name.
    ValueError
        If a value cannot be.
    """
    own = set(inspect.signature(train).parameters) - {"self", "trainer_kwargs", "training"}
    lightning = set(inspect.signature(pl.Trainer.__init__).parameters) - {"self", "barebones", *_ELSEWHERE}
    left = _known({name: value for name, value in given.items() if name not in own}, lightning, own, "train()")
    if given.get("max_steps") is not None and given.get("max_epochs") is not None:
        msg = "Give max_steps or max_epochs, not both."
        raise ValueError(msg)
    _check_values({name: value for name, value in given.items() if name in own})
    if left.pop("enable_checkpointing", None) and not (given.get("checkpoint_dir") or left.get("callbacks")):
        msg = "enable_checkpointing=True needs a place: give checkpoint_dir."
        raise ValueError(msg)
    return left


def checked_plan_kwargs(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments of the training plan, likewise."""
    found = _known(dict(given or {}), set(PLAN_ARGUMENTS), set(), "plan_kwargs")
    _check_values(found)
    return found


def _known(given: dict[str, Any], passed: set[str], own: set[str], where: str) -> dict[str, Any]:
    """What is passed on: neither unknown, nor without effect."""
    found = {}
    for name, value in given.items():
        if name in passed:
            found[name] = value
        elif name not in _ELSEWHERE:
            raise TypeError(_unknown(name, passed | own, where))
        elif not any(value is asked or value == asked for asked in _ELSEWHERE[name][0]):
            msg = f"{name}={value!r} is no argument here: {_ELSEWHERE[name][1]}."
            raise TypeError(msg)
    return found


def _unknown(name: str, names: Iterable[str], where: str) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    hint = f": did you mean {near[0]!r}?" if near else ", and neither has lightning.pytorch.Trainer."
    return f"{where} has no argument {name!r}{hint}"


def _check_values(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if (value is None and name in _OPEN) or (name == "perturbations_per_batch" and isinstance(value, str)):
            continue
        if name in _WHOLE and not (_is(value, Integral) and value >= _WHOLE[name]):
            msg = f"{name}={value!r} cannot be: give a whole number from {_WHOLE[name]} on."
            raise ValueError(msg)
        if name in _NUMBERS and not (_is(value, Real) and 0 <= value <= _NUMBERS[name] and value < math.inf):
            most = "on" if _NUMBERS[name] == math.inf else f"to {_NUMBERS[name]:g}"
            msg = f"{name}={value!r} cannot be: give a number from 0 {most}."
            raise ValueError(msg)


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
