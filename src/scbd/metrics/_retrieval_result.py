"""What a retrieval found: one row a perturbation, and what the rows come to."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from scbd.metrics._average_precision import Null, Scores, chance

# q values below are called, as everywhere in the field
_CALLED = 0.05


@dataclass(frozen=True, repr=False)
class Retrieval:
    """How well perturbations with a common label, or related genes, find each other.

    What :func:`retrieval` and :func:`relationship_retrieval` return.

    Parameters
    ----------
    table
        One row a perturbation, or a gene: ``average_precision``, its ``chance`` in a random order, ``p_value`` and
        ``q_value`` (Benjamini and Hochberg), ``n_queries``, and ``n_positives`` and ``n_negatives`` of a query on
        average.
    left_out
        Perturbations that were asked for and have nothing to find.
    units
        Code ``(P,)`` of what each row of the table is drawn with for an interval, such as its mechanism; `None`: each
        row is drawn by itself.

    Examples
    --------
    >>> table = pd.DataFrame({"average_precision": [0.9, 0.3], "chance": 0.1, "q_value": [0.01, 0.4]}, index=["a", "b"])
    >>> scbd.metrics.Retrieval(table)
    Retrieval of 2 perturbations: average precision 0.600 (chance 0.100), 1 called at q < 0.05
    """

    table: pd.DataFrame
    left_out: tuple[str, ...] = ()
    units: np.ndarray | None = field(default=None, kw_only=True)

    @property
    def mean_average_precision(self) -> float:
        """Mean over perturbations."""
        return _mean(self.table, "average_precision")

    @property
    def chance(self) -> float:
        """Mean average precision of random orders, which is what an uninformative or collapsed embedding scores."""
        return _mean(self.table, "chance")

    @property
    def n_called(self) -> int:
        """Perturbations with a q value below 0.05."""
        return _n_called(self.table)

    def scores(self) -> dict[str, float]:
        """The numbers by name, for a table of several embeddings."""
        return {
            "mean_average_precision": self.mean_average_precision,
            "chance": self.chance,
            "n_called": self.n_called,
        }

    def __repr__(self) -> str:
        """The numbers, for a person."""
        what = self.table.index.name or "perturbation"
        return f"{type(self).__name__} of {_said(self.table, f'{what}s')}"


@dataclass(frozen=True, repr=False)
class ReplicateRetrieval(Retrieval):
    """How well wells find replicates in other environments: what :func:`replicate_retrieval` returns.

    Parameters
    ----------
    table
        One row a perturbation, as in :class:`Retrieval`.
    left_out
        Perturbations that were asked for and have no replicate in another environment.
    floor_table
        One row a position of controls, scored as if it were a perturbation; empty without positions.
    cross_position_table
        One row a perturbation with replicates at another position and environment; empty where there is none.

    Examples
    --------
    >>> table = pd.DataFrame({"average_precision": [0.9, 0.3], "chance": 0.1, "q_value": [0.01, 0.4]}, index=["a", "b"])
    >>> controls = table.assign(average_precision=[0.1, 0.3], q_value=1.0)
    >>> found = scbd.metrics.ReplicateRetrieval(table, floor_table=controls)
    >>> round(found.floor, 3), round(found.floor_corrected, 3)
    (0.2, 0.5)
    """

    floor_table: pd.DataFrame = field(default_factory=pd.DataFrame)
    cross_position_table: pd.DataFrame = field(default_factory=pd.DataFrame)

    @property
    def floor(self) -> float:
        """Mean average precision of positions of controls, as of what has no effect and was not trained on; or NaN."""
        return _mean(self.floor_table, "average_precision")

    @property
    def floor_corrected(self) -> float:
        """Mean average precision on a scale where the floor is 0, and 1 is 1.

        Of noise it is 0 only where perturbations and positions of controls have as many wells to find, among as many:
        :func:`benchmark` has what it is by chance.
        """
        return (self.mean_average_precision - self.floor) / (1 - self.floor) if self.floor < 1 else np.nan

    @property
    def cross_position(self) -> float:
        """Mean average precision of replicates at other positions, or NaN where no perturbation has several."""
        return _mean(self.cross_position_table, "average_precision")

    @property
    def cross_position_chance(self) -> float:
        """The same in random orders."""
        return _mean(self.cross_position_table, "chance")

    def scores(self) -> dict[str, float]:
        """The numbers by name, for a table of several embeddings."""
        return super().scores() | {
            "floor": self.floor,
            "floor_corrected": self.floor_corrected,
            "n_floor_called": _n_called(self.floor_table),
            "cross_position": self.cross_position,
            "cross_position_chance": self.cross_position_chance,
        }

    def __repr__(self) -> str:
        """The numbers, for a person."""
        lines = [super().__repr__()]
        if len(self.floor_table):
            lines += [f"  floor of {_said(self.floor_table, 'positions of controls')}"]
            lines += [f"  floor-corrected: {self.floor_corrected:.3f}"]
        if len(self.cross_position_table):
            lines += [f"  across positions of {_said(self.cross_position_table, 'perturbations')}"]
        return "\n".join(lines)


def by_label(scores: Scores, labels: np.ndarray, null: Null) -> pd.DataFrame:
    """The mean over the queries of each label, with its chance, p and q value; see :class:`Retrieval`.

    Parameters
    ----------
    scores
        Of queries.
    labels
        Of all rows, as text ``(N,)``.
    null
        Of random orders.
    """
    from scipy.stats import false_discovery_control

    if not len(scores.rows):
        return pd.DataFrame()
    sizes = np.stack([scores.n_positives, scores.n_negatives], axis=1)
    pairs, which = np.unique(sizes, axis=0, return_inverse=True)
    queries = pd.DataFrame(
        {
            "average_precision": scores.average_precision,
            "chance": np.array([chance(*map(int, pair)) for pair in pairs])[which],
            "n_positives": scores.n_positives,
            "n_negatives": scores.n_negatives,
        }
    )
    of_label = queries.groupby(labels[scores.rows], sort=True)
    table = of_label.mean()
    table.insert(2, "n_queries", of_label.size())
    rows_of = of_label.indices
    p = [null.p_value(score, *sizes[rows_of[label]].T) for label, score in table["average_precision"].items()]
    table.insert(2, "p_value", p)
    table.insert(3, "q_value", false_discovery_control(p))
    return table


def _mean(table: pd.DataFrame, column: str) -> float:
    return float(table[column].mean()) if len(table) else np.nan


def _n_called(table: pd.DataFrame) -> int:
    return int((table["q_value"] < _CALLED).sum()) if len(table) else 0


def _said(table: pd.DataFrame, what: str) -> str:
    value, expected = _mean(table, "average_precision"), _mean(table, "chance")
    return (
        f"{len(table):,} {what}: average precision {value:.3f} (chance {expected:.3f}), {_n_called(table):,} called at "
        f"q < {_CALLED}"
    )
