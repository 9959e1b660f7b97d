# Two commands do everything: `make demo` and `make test`. Each makes .venv when it is not there.
#
# A torch of your own, for example a CUDA build:   make demo TORCH="torch --index-url https://download.pytorch.org/whl/cu128"
# An environment of your own:                      make demo VENV=/path/to/venv

PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   ?= .venv
BIN    := $(VENV)/bin
PARALLEL ?= -n logical --maxprocesses 8 --dist worksteal

# notebooks that read data of others, from the folder SCBD_DATA
REAL := notebooks/real_plate.ipynb notebooks/real_map.ipynb
# what computes numbers
NUMERIC := tests/nn tests/metrics tests/baselines/test_corrections.py tests/originals

.PHONY: help demo test numeric lint types coverage benchmark notebooks docs clean

help:
	@echo "make demo       a simulated screen, from images to the report (three minutes)"
	@echo "make test       all tests; make numeric: those of numbers, as older processors compute"
	@echo "make benchmark  every claim about speed, measured (75 minutes on two idle cores; each part says how long it took)"
	@echo "make lint types coverage notebooks docs"

# torch first: what comes later then accepts the build that is there
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable ".[test,dev]"
	@touch $@

demo: $(VENV)/.ready
	$(BIN)/scbd demo

# a process a core; tests keep to one thread each
test: $(VENV)/.ready
	$(BIN)/python -m pytest $(PARALLEL)

# once more as older processors compute: no test may hang on the last bits of a number
numeric: export ATEN_CPU_CAPABILITY = default
numeric: export ONEDNN_MAX_CPU_ISA = SSE41
numeric: export OPENBLAS_CORETYPE = Haswell
numeric: $(VENV)/.ready
	$(BIN)/python -m pytest $(PARALLEL) $(NUMERIC)

coverage: $(VENV)/.ready
	$(BIN)/python -m pytest $(PARALLEL) --cov --cov-report=term-missing:skip-covered

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready
	$(BIN)/mypy

# one part: make benchmark ONLY="losses data"; benchmarks/speed/performance.md is rewritten from what was measured
benchmark: $(VENV)/.ready
	$(BIN)/python benchmarks/speed $(ONLY)
	$(BIN)/python benchmarks/speed --docs

# executed into a scratch folder: committed outputs stay as they are; those of real data where these are
notebooks: export SCBD_NOTEBOOK_STEPS ?= 100
notebooks: export SCBD_DATA ?= $(abspath ../shared/data)
notebooks: $(VENV)/.ready
	$(BIN)/jupyter nbconvert --to notebook --execute --CoalesceStreamsPreprocessor.enabled=True --output-dir build/notebooks \
	$(filter-out $(if $(wildcard $(SCBD_DATA)),,$(REAL)),$(wildcard notebooks/*.ipynb))

docs: $(VENV)/.ready
	$(BIN)/pip install --quiet --editable ".[docs]"
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html
	@! grep -lE "<p>\.\. (auto|current)" docs/_build/html/api/generated/*.html || (echo "pages of the API hold directives as text" && exit 1)
	@echo "docs/_build/html/index.html"

clean:
	rm -rf $(VENV) build docs/_build docs/api/generated
