"""Names of arguments that ``train`` passes on, or that scvi-tools has: looked at before any work is done."""

from __future__ import annotations

import difflib
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

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
    "limit_train_batches": ((None,), "the same batches would come again and again; use max_steps"),
    "num_sanity_val_steps": ((None, 0), "nothing is validated before the first step; use validate_every"),
    "barebones": ((False,), "it takes the history away"),
    "reduce_lr_on_plateau": ((False,), _CONSTANT_LR),
    "lr_factor": ((), _CONSTANT_LR),
    "lr_patience": ((), _CONSTANT_LR),
    "lr_scheduler_metric": ((), _CONSTANT_LR),
    "optimizer": (("AdamW",), "the optimiser is AdamW"),
    "n_epochs_kl_warmup": ((None,), "use n_steps_alpha_warmup; variational baselines take kl_warmup_steps"),
    "n_steps_kl_warmup": ((None,), "use n_steps_alpha_warmup; variational baselines take kl_warmup_steps"),
}


def lightning_arguments(given: Mapping[str, Any], own: Iterable[str], where: str) -> dict[str, Any]:
    """Arguments that are left for Lightning's trainer, see :func:`known_arguments`.

    Parameters
    ----------
    given
        Arguments that are not ours.
    own
        Names of those that are, for the sentence.
    where
        What they were given to, likewise.
    """
    if not given:
        return {}
    import lightning.pytorch as L

    taken = set(inspect.signature(L.Trainer.__init__).parameters) - {"self", "barebones", *_ELSEWHERE}
    return known_arguments(given, taken, where, own)


def known_arguments(
    given: Mapping[str, Any], taken: Collection[str], where: str, others: Iterable[str] = ()
) -> dict[str, Any]:
    """What is passed on: neither unknown, nor without effect.

    Raises
    ------
    TypeError
        If there is no argument of such a name, or not here.
    """
    found = {}
    for name, value in given.items():
        if name in taken:
            found[name] = value
        elif name not in _ELSEWHERE:
            raise TypeError(_unknown(name, [*taken, *others], where))
        elif not any(value is asked or value == asked for asked in _ELSEWHERE[name][0]):
            msg = f"{name}={value!r} is no argument here: {_ELSEWHERE[name][1]}."
            raise TypeError(msg)
    return found


def _unknown(name: str, names: Iterable[str], where: str) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    hint = f": did you mean {near[0]!r}?" if near else ", and neither has lightning.pytorch.Trainer."
    return f"{where} has no argument {name!r}{hint}"
