"""Everything scbd claims about speed, measured: `python benchmarks` runs all, `python benchmarks losses data` some.

Both forms of each claim run interleaved in one process. Prints a table and writes it as JSON; `--docs` rewrites the
tables of the documentation from that, and from what precision.py, million.py and faults.py have written. Wants a
machine that does nothing else.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import time
import warnings
from pathlib import Path

import faults
import million
import precision
from _compare import machine
from _report import as_text, write_docs

NAMES = ["losses", "step", "data", "stores", "embed", "metrics", "scaling", "end_to_end", "tried"]
HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=HERE / "results.json", help="results of other names are kept")
    parser.add_argument("--docs", action="store_true", help="only rewrite the tables and pictures of the documentation")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(NAMES)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}: choose from {', '.join(NAMES)}")
    results = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    for name in [] if arguments.docs else arguments.names or NAMES:
        start = time.perf_counter()
        rows = importlib.import_module(name).rows(arguments.repeats)
        results[name] = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "rows": rows}
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
        print(f"\n{name} ({time.perf_counter() - start:.0f} s)\n{as_text(rows)}", flush=True)
    if arguments.docs:
        write_docs(results | {"precision": precision.result()}, DOCS / "performance.md")
        precision.plot(DOCS / "images" / "precision.png")
        write_docs({"million": million.result(), "faults": faults.result()}, DOCS / "scaling.md")
        million.plot(DOCS / "images" / "million.png")
    else:
        print("\n" + machine())


if __name__ == "__main__":
    main()
