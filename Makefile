# Every target sets up what it needs in $(VENV), once; a change of pyproject.toml sets it up again.
#
#   make test PYTHON=python3.12                      another interpreter
#   make test VENV_FLAGS=--system-site-packages      reuse a torch that is already installed, with its CUDA
#   make test TORCH_VERSION=2.11.0                   another torch
#   make test PYTEST_FLAGS='-m gpu'                  other tests
#
# The first three count when the environment is made: run `make clean` before changing them.

PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
# Fixed, and installed only where there is none: the newest torch may bring several GB of CUDA packages that a machine
# without a GPU has no use for. Which index it comes from is left to pip's own settings.
TORCH_VERSION ?= 2.13.0
# Two workers, each with one thread (see `test`), fill two cores.
PYTEST_FLAGS ?= -n 2
# Named, so that plugins of a shared environment stay out: warnings are errors here, theirs too.
PYTEST_PLUGINS := -p xdist -p hypothesispytest

PY := $(VENV)/bin/python
PIP_INSTALL := $(PY) -m pip --disable-pip-version-check install -q
STAMP := $(VENV)/.lowtide-ready

.DEFAULT_GOAL := help
.PHONY: help demo test lint check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-6s %s\n", $$1, $$2 }' Makefile

demo: $(STAMP) ## train a small model with and without compression; nothing to download
	$(PY) -m lowtide demo

test: $(STAMP) ## run the tests; those that need a GPU are skipped, by name, where there is none
	OMP_NUM_THREADS=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(PY) -m pytest $(PYTEST_PLUGINS) $(PYTEST_FLAGS)

lint: $(STAMP) ## check style, formatting and types
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

check: lint test ## lint, then test

clean: ## remove the environment, caches and builds; results in runs/ stay
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment is made only where it is missing, so that a later set-up keeps its flags and its torch.
# The constraint holds torch still: the second install may fail because of its version, but never replaces it.
$(STAMP): pyproject.toml
	@if ! $(PY) -m pip --version >/dev/null 2>&1; then \
	  $(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("lowtide needs Python 3.11 or newer, and $(PYTHON) is %d.%d. Name another one: make PYTHON=python3.12 ..." % v[:2])' || exit 1; \
	  echo "Creating $(VENV) with $$($(PYTHON) --version)"; \
	  $(PYTHON) -m venv $(VENV_FLAGS) $(VENV) || exit 1; \
	fi
	@if ! $(PY) -c 'import torch' >/dev/null 2>&1; then \
	  echo "Installing torch $(TORCH_VERSION) (this may take minutes)"; \
	  $(PIP_INSTALL) "torch==$(TORCH_VERSION)" || exit 1; \
	fi
	@$(PY) -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $(VENV)/constraints.txt
	@echo "Installing lowtide and its development tools, with $$(cat $(VENV)/constraints.txt)"
	@$(PIP_INSTALL) -c $(VENV)/constraints.txt -e '.[dev]' || { \
	  echo "No install beside $$(cat $(VENV)/constraints.txt), which is left as it is. If it is older than pyproject.toml asks" \
	    "for: make clean, then again without VENV_FLAGS or with another TORCH_VERSION." >&2; exit 1; }
	@touch $@
