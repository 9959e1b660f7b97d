"""Run an experiment of the paper, or one of ours, and make its tables and figures.

From a clone: `python benchmarks/paper cmnist --budget small --data path/to/mnist`. Called again, it goes on where it
was stopped. `python benchmarks/paper list` names all of them.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[0] = str(HERE.parent)  # not the folder itself, whose modules would stand for others of their names

from paper import compared, overview
from paper.datasets import DATASETS
from paper.reproduce import EXPERIMENTS, default_out, reproduce
from paper.trials import Results


def main() -> int:
    parser = argparse.ArgumentParser(
        "python benchmarks/paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "name",
        metavar="NAME",
        help="an experiment; 'list'; 'overview', the figure of docs/results.md; 'compared', a page",
    )
    parser.add_argument(
        "--budget", default="smoke", help="smoke (minutes), small (hours on two cores) or paper (a GPU)"
    )
    parser.add_argument(
        "--protocol", default="ours", help="ours, or authors: trained as the code of the paper's authors"
    )
    parser.add_argument("--data", type=Path, help="files of the data set")
    parser.add_argument("--weights", type=Path, help="state dict of torchvision's network, to start encoders from")
    parser.add_argument("--out", type=Path, help="directory; results/NAME-BUDGET without it")
    parser.add_argument("--seeds", type=int, help="number of seeds, in place of the budget's")
    parser.add_argument("--shard", type=shard, default=(1, 1), metavar="I/N", help="the I-th of N processes")
    parser.add_argument("--report", action="store_true", help="run nothing, make tables and figures of what is there")
    arguments = parser.parse_args()
    if arguments.name == "list":
        print("\n".join(listed()))
        return 0
    if arguments.name == "overview":
        overview.draw()
        return 0
    if arguments.name == "compared":
        compared.write()
        return 0
    logging.basicConfig(format="%(message)s")
    for name in ("paper", "scbd"):
        logging.getLogger(name).setLevel(logging.INFO)
    out = arguments.out or default_out(arguments.name, arguments.budget, arguments.protocol)
    try:
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
    except (OSError, ImportError, KeyError, ValueError) as error:
        parser.error(str(error.args[0] if isinstance(error, KeyError) else error))
    print((out / "table.md").read_text(encoding="utf-8") + f"Rows, tables and figures: {out}/")
    return 0


def shard(text: str) -> tuple[int, int]:
    """``3/8``: the third of eight shares."""
    index, n = text.split("/")
    return int(index), int(n)


def listed() -> list[str]:
    """A line an experiment: what it is, the data it needs, and the minutes that its rows took (small, two cores)."""
    lines = []
    for name, experiment in EXPERIMENTS.items():
        needed = [DATASETS[dataset].needed for dataset in {t.dataset for t in experiment.trials("smoke", None)}]
        rows = Results(HERE / "results" / name).frame()
        minutes = "not run" if rows.empty else f"{rows['seconds'].sum() / 60:,.0f} min"
        lines.append(f"{name:22}{max(needed):22}{minutes:>11}  {experiment.about}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
