"""Everything scbd claims about speed, measured: `python benchmarks/speed` runs all, `… losses data` some.

Both forms of each claim run interleaved in one process. Prints a table and writes it as JSON; `--docs` rewrites the
tables of the pages beside it from that, and from what precision.py, million.py and faults.py have written. Wants a
machine that does nothing else. `--smoke` only shows that everything runs, and writes nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from _compare import machine, timed
from _report import as_text, write_docs
from _scale import SMOKE, Scale

NAMES = "losses step gpu data stores fields embed metrics scaling tables features wide end_to_end tried".split()
# hours each, and run by themselves
LONG = ["precision", "million", "faults"]
HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="as small as can be, once; nothing is written")
    parser.add_argument("--json", type=Path, default=HERE / "results.json", help="results of other names are kept")
    parser.add_argument("--docs", action="store_true", help="only rewrite tables and pictures of the pages beside it")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(NAMES)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}: choose from {', '.join(NAMES)}")
    results = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    if arguments.docs:
        rewrite(results)
        return
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    scale, total = SMOKE if arguments.smoke else Scale(arguments.repeats), 0.0
    here = [name for name in NAMES if name != "gpu" or torch.cuda.is_available() or arguments.smoke]
    for name in arguments.names or here:
        seconds, rows = timed(lambda: importlib.import_module(name).rows(scale))
        total += seconds
        print(f"\n{name} ({seconds:.0f} s)\n{as_text(rows)}", flush=True)
        if not arguments.smoke:
            results[name] = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "rows": rows}
            results[name]["seconds"] = round(seconds)
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{total / 60:.0f} minutes. {machine()}")


def rewrite(results: dict[str, Any]) -> None:
    """Tables and pictures, each on whatever page has a place for it."""
    # not before: faults takes the tests' helpers, and with them their single thread
    long = {name: importlib.import_module(name) for name in LONG}
    results = results | {name: module.result() for name, module in long.items()}
    for page in ("performance.md", "large_screens.md"):
        write_docs(results, HERE / page)
    long["precision"].plot(HERE / "precision.png")
    long["million"].plot(HERE / "million.png")


if __name__ == "__main__":
    main()
