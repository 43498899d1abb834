# Every target sets itself up in .venv: a machine with Python 3.11+ and make is enough.
PYTHON ?= python3
BIN := .venv/bin
BASE := .venv/.base
READY := .venv/.ready

.PHONY: help setup demo test quick pytest mutants docs lint format clean

help:  ## what can be made
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | sort

setup: $(BASE)  ## install protofed into .venv

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "protofed needs Python 3.11 or newer; got %s. Set PYTHON=python3.11." % sys.version.split()[0])'
	@$(PYTHON) -m venv .venv

INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check
export PYTHONDONTWRITEBYTECODE =

$(BASE): pyproject.toml | $(BIN)/python
	@echo "installing protofed into .venv (a minute or two, once)"
	@$(INSTALL) -e .
	@touch $(BASE)

$(READY): pyproject.toml | $(BIN)/python
	@echo "installing protofed and the development tools into .venv (two or three minutes, once)"
	@$(INSTALL) --no-compile -e '.[dev]' # of so many packages, what is used is compiled when it is
	@touch $(BASE) $(READY)

demo: $(BASE)  ## twenty clients, three architectures: FedProto against training alone
	@$(BIN)/protofed compare local fedproto --experiment configs/demo.toml --seeds 0,1,2 --out runs/demo

test: $(READY)  ## lint and every test, side by side
	@$(MAKE) --no-print-directory --jobs 2 lint pytest

# Two processes more than cores: federations and browsers are mostly waited for. A file stays in one process, so that
# what its tests share is made once; tests/conftest.py begins with the files that take longest.
SPREAD = --dist loadfile --no-loadscope-reorder
pytest: $(READY)
	@$(BIN)/python -m pytest -n $$($(BIN)/python -c 'import os; print(2 + (os.cpu_count() or 1))') $(SPREAD)

# The core, without what waits for processes, browsers or the network.
CORE = method local metrics layers errors marks
quick: $(READY)  ## the tests of the core, in a minute and a half: contract, methods, engines, experiments, run folders
	@$(BIN)/python -m pytest -n $$($(BIN)/python -c 'import os; print(os.cpu_count() or 1)') $(SPREAD) \
		-m 'not (namespace or slow or ray or browser or docs)' $(CORE:%=tests/test_%.py) \
		tests/methods tests/ops tests/engines tests/config tests/runs tests/testing

mutants: $(READY)  ## small errors in methods and ops, each of which a test should notice (half an hour)
	@$(BIN)/python tools/mutants.py $(MUTANTS)

docs: $(READY)  ## the documentation site, into site/index.html
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

lint: $(READY)  ## ruff format, ruff check, mypy
	@$(BIN)/ruff format --check --quiet . || (echo "run 'make format'"; exit 1)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary

format: $(READY)  ## rewrite the sources in the house format
	@$(BIN)/ruff check --quiet --fix . ; $(BIN)/ruff format --quiet .

clean:  ## remove what was installed and cached
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
