"""Error messages for arguments and attributes that the models of this package lack, with advice on replacements.

Most of these arguments and attributes are those of scvi-tools and of Lightning.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

from scbd._shared.checks import suggest_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

P = ParamSpec("P")
R = TypeVar("R")

# maximum number of valid arguments at which the error message for a wrong argument always lists all valid ones
_MAX_LISTED_ARGUMENTS = 8

_POINT = "leave it out. The embedding of a cell is one point; with a VAE it is the mean of the posterior."
_STORED = "leave it out. There is one kind of minified table: embeddings of all blocks in place of inputs."
_TABLE = "give cells as adata, in memory or from scbd.data.open_screen, and rows as indices."
_EARLY_STOPPING = (
    "early_stopping=True monitors validation_loss, and early_stopping_patience counts validations. For anything else, "
    "give callbacks=[lightning.pytorch.callbacks.EarlyStopping('validation_loss', …)] instead of early_stopping=True."
)
_WARM_UP = "use n_steps_alpha_warmup in plan_kwargs, or kl_warmup_steps of a VAE's constructor. Each counts steps."
_RATE = "the learning rate falls to 0 along half a cosine; plan_kwargs={'lr_decay': False} keeps it constant."
_OPTIMISER = "AdamW is used. A subclass of scbd.model.TrainingPlan can return another from configure_optimizers."
_SPLIT = (
    "use split: a column of obs that holds train, validation and test, or a scbd.data.Split. train_size and "
    "validation_size are the sizes of a random split."
)
_BAR = "use enable_progress_bar, or give callbacks=[lightning.pytorch.callbacks.TQDMProgressBar(refresh_rate=…)]."
_CHECKPOINTS = "use checkpoint_dir, which keeps a checkpoint with each validation, or checkpoint callbacks of your own."
_NETWORK = "leave it out. Where the model has an argument encoder, that names a network or is a module of your own."

# advice for environments with an order, which earlier versions took as the argument continuous_covariate_keys
LEVELS_OF_A_NUMBER = (
    "divide the number, such as a row or a time, into about five levels with pandas.qcut, and add the new column to "
    "e_key (recipe 'Remove the effect of a number' in the documentation, how_to/recipes)."
)

# arguments of data loaders, which users of torch and scvi-tools give to several methods; each value is the advice
_AHEAD = "leave it out. Batches are read ahead in the background."
_DRAWN = "leave it out. Training batches are always drawn at random, each with batch_size cells."
_LOADER = {
    **dict.fromkeys(("num_workers", "persistent_workers", "prefetch_factor", "multiprocessing_context"), _AHEAD),
    "pin_memory": "leave it out. Memory is pinned where there is a GPU.",
    **dict.fromkeys(("shuffle", "sampler", "drop_last"), _DRAWN),
}
_DEVICE = "call model.to_device(…) before."

# arguments of scvi-tools' training plans that our training plans lack; each value is the advice, shown in an error
# message, on what to use in place of the argument
_PLAN = {
    **dict.fromkeys(("n_epochs_kl_warmup", "n_steps_kl_warmup"), _WARM_UP),
    **dict.fromkeys(("reduce_lr_on_plateau", "lr_factor", "lr_patience", "lr_threshold", "lr_min"), _RATE),
    **dict.fromkeys(("optimizer", "optimizer_creator", "eps", "betas", "momentum"), _OPTIMISER),
    **dict.fromkeys(("lr_scheduler_metric", "lr_scheduler", "scheduler"), _RATE),
    "learning_rate": "use lr.",
    "compile": "call model.module.content.compile() before training.",
}
# arguments that our train method lacks, mainly of scvi-tools' train method and of Lightning's trainer; each value is
# the advice, shown in an error message, on what to use in place of the argument
_TRAIN = {
    **_PLAN,
    **_LOADER,
    **{
        name: f"give it in {group}: train({group}={{{name!r}: …}})."
        for group, names in {
            "plan_kwargs": ("encoder_lr", "lr_decay", "n_steps_alpha_warmup"),
            "batch_kwargs": ("neighbours", "preload"),
        }.items()
        for name in names
    },
    "patience": "use early_stopping=True, and early_stopping_patience.",
    **dict.fromkeys(("early_stopping_monitor", "early_stopping_min_delta", "early_stopping_mode"), _EARLY_STOPPING),
    "early_stopping_warmup_epochs": "use min_steps, counted in steps.",
    **dict.fromkeys(("shuffle_set_split", "external_indexing"), _SPLIT),
    "datasplitter_kwargs": _SPLIT,
    "load_sparse_tensor": "leave it out. Inputs are dense.",
    "n_samples_per_label": "use perturbations_per_batch, the number of perturbations with equally many cells each.",
    "datamodule": "give setup_anndata the table of a store on disk, from scbd.data.open_screen.",
    "plan_config": "use plan_kwargs.",
    "trainer_config": "give arguments of lightning.pytorch.Trainer by name.",
    **dict.fromkeys(("progress_bar_refresh_rate", "simple_progress_bar"), _BAR),
    "learning_rate_monitor": (
        "give callbacks=[lightning.pytorch.callbacks.LearningRateMonitor()] and a logger of Lightning."
    ),
    "log_save_dir": "give logger=lightning.pytorch.loggers.CSVLogger(…).",
    **dict.fromkeys(("use_gpu", "gpus"), "use accelerator and devices."),
    **dict.fromkeys(("enable_checkpointing", "checkpointing_monitor"), _CHECKPOINTS),
    # our training runs are a single epoch for Lightning, so that its limits per epoch would limit the whole run
    "limit_train_batches": "use max_steps.",
    "overfit_batches": "use split, a scbd.data.Split with the few cells to train on.",
    "min_epochs": "use min_steps.",
    "use_distributed_sampler": "leave it out. Each batch is divided among the devices.",
    "barebones": "leave it out. It turns off validation and history; scbd benchmark measures the speed.",
}
# arguments of scvi-tools' setup_anndata that ours lacks, each with the advice on what to use in place of it
_SETUP_REPLACEMENTS = {
    "labels_key": "use y_key, the column of obs with what was done to each cell.",
    "batch_key": "use e_key, the column of obs with where each cell was measured.",
    "sample_key": "use e_key, the column of obs with where each cell was measured.",
    "categorical_covariate_keys": "use e_key, which takes a list of columns.",
    "continuous_covariate_keys": LEVELS_OF_A_NUMBER,
    "size_factor_key": "leave it out. Inputs are standardised by the model, see its standardize_by.",
    "unlabeled_category": "leave it out. Cells without a label can be embedded, and cannot be trained on.",
    "protein_expression_obsm_key": "use obsm_key.",
}
# arguments of setup_anndata, ours and those of scvi-tools, which other methods lack
_OF_SETUP = {
    **dict.fromkeys(("y_key", "e_key", "control", "position_key", "layer", "obsm_key"), "give it to setup_anndata."),
    **{name: f"in setup_anndata, {advice}" for name, advice in _SETUP_REPLACEMENTS.items()},
}
# for each method of our models, by name: arguments of scvi-tools and Lightning that the method lacks, each with the
# advice, shown in an error message, on what to use in place of the argument
REPLACEMENTS: dict[str, dict[str, str]] = {
    "setup_anndata": _SETUP_REPLACEMENTS,
    "train": _TRAIN | _OF_SETUP,
    "train_decoder": _TRAIN,
    "plan_kwargs": _PLAN | _LOADER,
    "batch_kwargs": _LOADER,
    "get_latent_representation": {
        **_LOADER,
        **dict.fromkeys(("use_gpu", "accelerator", "device"), _DEVICE),
        **dict.fromkeys(("give_mean", "mc_samples", "return_dist"), _POINT),
        "dataloader": _TABLE,
        "transform_batch": "leave it out. z_c does not carry the environment.",
    },
    "predict": _LOADER | {"soft": "use return_proba=True.", "dataloader": _TABLE},
    "reconstruct": {
        "transform_batch": "use swap_blocks, which decodes a cell in the environment of another.",
        "dataloader": _TABLE,
    },
    "minify_adata": dict.fromkeys(("minified_data_type", "use_latent_qzm_key", "use_latent_qzv_key"), _STORED),
    "load": {"use_gpu": "use accelerator and device."},
    "__init__": {
        **_OF_SETUP,
        **dict.fromkeys(("n_hidden", "n_layers", "n_layers_encoder"), _NETWORK),
        **dict.fromkeys(
            ("gene_likelihood", "dispersion", "latent_distribution"),
            "leave it out. Cells are embedded by contrast, not by a likelihood of counts.",
        ),
        "positives": "leave it out. All cells of the same perturbation are positives.",
        "dropout_rate": "leave it out. Training images are augmented, and weight_decay is an argument of train.",
    },
}


def check_argument_names(
    given: Iterable[str],
    known: Iterable[str],
    where: str,
    instead: Mapping[str, str] | None = None,
    *,
    others: Iterable[str] = (),
) -> None:
    """Check that a function or class accepts arguments of the given names.

    Parameters
    ----------
    given
        Names of the arguments to check.
    known
        Names of the arguments that the function or class accepts.
    where
        Public name of the function or class, for the error message.
    instead
        Advice for the error message, by name of an argument that is not accepted: what to use in its place.
    others
        Names of further accepted arguments, which the error message does not list.

    Raises
    ------
    TypeError
        If an argument is not accepted. The message gives the advice for this argument, or suggests the accepted name
        that is most similar. It also lists all accepted names if these are at most eight, or if there is neither
        advice nor a similar name.
    """
    known, others, instead = list(known), list(others), instead or {}
    unknown = [name for name in given if name not in known and name not in others]
    if not unknown:
        return
    answers: list[str] = []
    explained = True
    for name in unknown:
        hint = f": {instead[name]}" if name in instead else f".{suggest_name(name, [*known, *others])}"
        explained = explained and hint != "."
        answers.append(f"{'It' if answers else where} has no argument {name!r}{hint}")
    if known and (len(known) <= _MAX_LISTED_ARGUMENTS or not explained):
        answers.append(f"It has: {', '.join(known)}.")
    raise TypeError(" ".join(answers))


def explain_arguments(*others: str, unset: Sequence[str] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a model's method that explains wrong arguments in the error message.

    The decorated method raises the error of :func:`check_argument_names`, which names the public class of the model and
    suggests what to use instead. Python's own error would name the private class that defines the method, and would not
    suggest a remedy.

    Parameters
    ----------
    *others
        Names of arguments that the method accepts in its ``**kwargs`` and passes on to another function.
    unset
        Names of arguments of earlier versions, which saved models still pass to the method. The value `None` means that
        the argument was not used, and is dropped.
    """

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        signature, name = inspect.signature(method), method.__name__
        known = keyword_names(method)

        @wraps(method)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if not args:
                msg = f"{name} belongs to a model, not to its class: make a model and call model.{name}(…)."
                raise TypeError(msg)
            for one in unset:
                if kwargs.get(one, unset) is None:
                    del kwargs[one]
            owner: Any = args[0] if isinstance(args[0], type) else type(args[0])
            of_model = [one for one in inspect.signature(owner.__init__).parameters if one in kwargs]
            instead = {one: f"give it to the model, {owner.__name__}(adata, {one}=…)." for one in of_model}
            where = f"{owner.__name__}.{name}"
            check_argument_names(kwargs, known, where, instead | REPLACEMENTS.get(name, {}), others=others)
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                by_name = f" Give these by name: {', '.join(known)}." if known and "positional" in str(error) else ""
                msg = f"{where}: {error}.{by_name}"
                raise TypeError(msg) from None
            return method(*args, **kwargs)

        return checked

    return decorate


def keyword_names(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that a method accepts by name, except ``self`` or ``cls``, and ``**kwargs``."""
    _, *parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]


def check_constructor_arguments(cls: Any, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise ``TypeError`` if the constructor of a model class was given an argument that is not in ``known``.

    Arguments of ``train`` and ``setup_anndata`` are recognised, and the message states where they belong.
    """
    given, known = list(given), list(known)
    if not set(given) <= set(known):
        of_train = {name: f"give it to train, model.train({name}=…)." for name in keyword_names(cls.train)}
        advice = of_train | REPLACEMENTS["train"] | REPLACEMENTS["__init__"]
        check_argument_names(given, known, cls.__name__, advice)


def constructor_names(cls: type) -> list[str]:
    """Return the sorted names of the keyword arguments that the constructor of a class accepts.

    A constructor with ``**kwargs`` forwards further arguments to the next constructor in the method resolution order.
    The arguments of the next constructor are then included, and so on up to a constructor without ``**kwargs``.
    """
    names: list[str] = []
    for base in cls.__mro__:
        if "__init__" in vars(base):
            constructor = vars(base)["__init__"]
            names += keyword_names(constructor)
            if not any(one.kind is one.VAR_KEYWORD for one in inspect.signature(constructor).parameters.values()):
                break
    return sorted(set(names))


class UnavailableAttribute:
    """Placeholder for an attribute that a model lacks, for example an attribute of scvi-tools' models.

    Reading the attribute raises an ``AttributeError`` that explains what to use in its place.
    """

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        msg = f"{owner.__name__} has no {self._name!r}: {self._remedy}"
        raise AttributeError(msg)
