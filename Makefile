# Main commands: `make demo` and `make test`. Each command creates the environment .venv if it is missing.
#
# To use another build of torch, such as CUDA:      make demo TORCH="torch --index-url https://download.pytorch.org/whl/cu128"
# To use another virtual environment:             make demo VENV=/path/to/venv

PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   ?= .venv
BIN    := $(VENV)/bin
PARALLEL ?= -n logical --maxprocesses 8 --dist worksteal

# notebooks that read published data, from the folder SCBD_DATA
REAL := notebooks/real_plate.ipynb notebooks/real_map.ipynb notebooks/real_drug_screen.ipynb
# tests of numerical results
NUMERIC := tests/nn tests/metrics tests/corrections tests/originals

# turns that readers of the field stumble over
UNCLEAR := by heart|in the middle|told apart|(a|one) row a cell|to be had|goes? by|looked at|is no number|are alike

.PHONY: help demo test numeric lint types coverage benchmark notebooks docs links clean

help:
	@echo "make demo       analyse a simulated screen, from the images to the report (three minutes)"
	@echo "make test       run all tests; make numeric: run the numerical tests with the instructions of older processors"
	@echo "make benchmark  measure every claim about speed (75 minutes on two idle cores; each part prints its duration)"
	@echo "make lint types coverage notebooks docs   check code, execute the notebooks, build the documentation"

# torch is installed first, so that later installations accept this build
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable ".[test,dev]"
	@touch $@

demo: $(VENV)/.ready
	$(BIN)/scbd demo

# one process per core, up to eight; each test uses one thread
test: $(VENV)/.ready
	$(BIN)/python -m pytest $(PARALLEL)

# repeat the numerical tests with the instructions of older processors: results must not depend on the last bits
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
	$(BIN)/codespell
	@! grep -rnwE "$(UNCLEAR)" src --include=*.py || (echo "plainer words: docs/contributing.md#plain-english" && exit 1)

types: $(VENV)/.ready
	$(BIN)/mypy

# To run some parts only: make benchmark ONLY="losses data". Then benchmarks/speed/performance.md is rewritten from
# the measurements.
benchmark: $(VENV)/.ready
	$(BIN)/python benchmarks/speed $(ONLY)
	$(BIN)/python benchmarks/speed --docs

# Notebooks are executed into build/notebooks, so committed outputs do not change. Notebooks with published data are
# executed only if the folder SCBD_DATA exists.
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

links: $(VENV)/.ready
	$(BIN)/pip install --quiet --editable ".[docs]"
	$(BIN)/sphinx-build -q -b linkcheck docs build/links

clean:
	rm -rf $(VENV) build docs/_build docs/api/generated
