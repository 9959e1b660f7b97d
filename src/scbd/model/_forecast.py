"""How long a run will take, said in its first seconds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import lightning.pytorch as L

# seconds to look at before anything is said, and a run that is worth a word
_LOOK, _LONG = 5.0, 120.0
_LARGE = ("resnet18", "resnet50", "densenet121")


class Forecast(Callback):
    """Says once how long a run will take, and what would be cheaper, if it is worth a word.

    Parameters
    ----------
    say
        What is done with the sentence.
    cheaper
        Arguments that would be, as people write them.
    clock
        Seconds, from anywhere on.
    """

    def __init__(
        self, say: Callable[[str], object], cheaper: Sequence[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say, self._cheaper, self._clock = say, cheaper, clock
        self._first: int | None = None
        self._since = 0.0
        self._said = False

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        """Look at the clock until it is said."""
        if self._said or not trainer.is_global_zero:
            return
        step = trainer.global_step
        if self._first is None:  # slower than the others: caches are cold, and what is compiled is being compiled
            self._first, self._since = step, self._clock()
            return
        seconds = self._clock() - self._since
        if seconds >= _LOOK and step > self._first:  # of accumulated gradients, several batches are one step
            self._said = True
            a_step, n_left = seconds / (step - self._first), trainer.max_steps - step
            if a_step * n_left >= _LONG:
                self._say(self._sentence(a_step, n_left))

    def _sentence(self, a_step: float, n_left: int) -> str:
        cheaper = f" Cheaper: {'; '.join(self._cheaper)}." if self._cheaper else ""
        return f"About {duration(a_step * n_left)} to go, {n_left:,} steps of {a_step:.2g} s.{cheaper}"


def cheaper_than(given: Mapping[str, Any], encoder: Callable[[Any], Any], *, images: bool) -> list[str]:
    """Arguments that take less time than those of a model of images or of features.

    ``encoder`` says what ``"auto"`` stands for.
    """
    found = []
    if given.get("encoder") and encoder(given["encoder"]) in _LARGE:
        found.append("encoder='small' (of a ResNet-18, a ninth of the work)")
    if given.get("style_target"):
        found.append("style_target=None (no z_s, half of the work)")
    if images and "image_size" in given:
        found.append("a smaller image_size")
    return [*found, "fewer max_steps"]


def duration(seconds: float) -> str:
    """As people say it: 4 min, 3.5 h, 2.1 days."""
    if seconds < 5400:
        return f"{max(1, round(seconds / 60))} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"
