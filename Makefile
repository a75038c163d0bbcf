# Everything runs in the project's own environment, .venv, which the first target that needs it makes.
# make PYTHON=python3.12 demo   takes another interpreter (3.10 or newer);   make EPOCHS=30 demo   trains longer.

PYTHON ?= python3
EPOCHS ?= 15

VENV := .venv
BIN := $(VENV)/bin
DEMO := build/demo
# Stamps: what is installed, and that pyproject.toml has not changed since.
EXAMPLES_INSTALLED := $(VENV)/.examples-installed
DEV_INSTALLED := $(VENV)/.dev-installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two targets must not install into one environment at once.
.NOTPARALLEL:
.PHONY: help demo test lint bench zoo clean

help: ## Show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 14

demo: $(EXAMPLES_INSTALLED) ## Compile examples/digits for a mixed cluster and train it with 2 pipelines of 2 stages
	rm -rf $(DEMO)
	$(BIN)/hetpipe-compile examples/digits/model.py --cluster examples/digits/cluster.yaml --policy ED --staleness 1 -o $(DEMO)/plan
	$(BIN)/hetpipe-run $(DEMO)/plan --epochs $(EPOCHS) --seed 0 -o $(DEMO)/run

test: $(DEV_INSTALLED) ## Run the tests
	$(BIN)/pytest -n 2 --dist loadfile

lint: $(DEV_INSTALLED) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(DEV_INSTALLED) ## Run the benchmarks
	$(BIN)/pytest bench -o python_files='bench_*.py test_*.py' --benchmark-only

zoo: $(DEV_INSTALLED) ## Hold every model of the zoo to its eager self and write docs/zoo.md (1 to 2 hours; goes on where it stopped)
	OMP_NUM_THREADS=1 $(BIN)/python tests/zoo/zoo_run.py

clean: ## Remove what the other targets made, but not .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# A venv without pip (Debian without python3-venv) would look finished to the next call: remove it.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "cannot make $(VENV); on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }

$(EXAMPLES_INSTALLED): pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV); torch and its CUDA libraries are large, the first time takes minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[examples]'
	@touch $@

$(DEV_INSTALLED): pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV); torch and its CUDA libraries are large, the first time takes minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[examples,dev,zoo]'
	@touch $@ $(EXAMPLES_INSTALLED)
