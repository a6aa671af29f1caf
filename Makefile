# make test    lint, and every test that is not slow, from a fresh clone with nothing else set up
# make demo    a small trained model answers a question about a long document, on two processes
# make help    all targets
#
# PYTHON names the base interpreter (3.10 or newer). Where wheels come from is pip's business and is set as for any other
# pip: with PIP_FIND_LINKS, PIP_INDEX_URL or PIP_EXTRA_INDEX_URL, for instance to get the CPU build of torch.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Test processes at a time: one a core, at most 8, as each holds PyTorch and transformers (1 to 2 GB).
JOBS ?= auto

# One thread a process: parallel tests start several processes, and small tensors gain nothing from more.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

BIN := $(VENV)/bin
STAMP := $(VENV)/installed.stamp
PIP_INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

# The pytest command, not `python -m pytest`: that would put this folder, and with it a top-level `kernels`, on sys.path.
PYTEST := $(BIN)/pytest
# A file's tests stay on one process (more in tests/conftest.py); a part (ARGS) runs in a single one.
PARALLEL := $(PYTEST) -n $(JOBS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder
INTERPRETED := tests/kernels tests/engine/steps/test_decode_graphs.py tests/engine/speculation/test_padded_drafts.py

.PHONY: help venv test test-kernels test-slow lint demo clean
.DEFAULT_GOAL := help

help:
	@echo "make venv        create $(VENV) with the package (editable) and everything for development"
	@echo "make test        lint, and every test that is not slow (ARGS='tests/test_x.py -k name' for a part, no lint)"
	@echo "make test-kernels  the part of make test that runs the Triton kernels, in the interpreter"
	@echo "make test-slow   run the slow tests"
	@echo "make lint        ruff (rules and format) and mypy"
	@echo "make demo        a small trained model answers a question about a long document, on two processes"
	@echo "make clean       remove $(VENV), builds and caches"

venv: $(STAMP)

# Build isolation is off: the build uses the pinned setuptools of the environment and fetches nothing of its own.
$(STAMP): setup.py pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "dsa_engine needs Python 3.10 or newer, and '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)." >&2; \
		echo "Name another interpreter, for instance: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@echo "creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@echo "installing the build tools"
	@$(PIP_INSTALL) setuptools wheel
	@echo "installing dsa-engine (editable), its dependencies and the development tools; torch may take minutes"
	@$(PIP_INSTALL) --no-build-isolation --editable '.[test]'
	@$(BIN)/python -c 'from importlib.metadata import version as v; print("installed:", ", ".join(f"{p} {v(p)}" for p in ("dsa-engine", "torch", "triton", "transformers", "numpy")))'
	@touch $@

# The kernel tests run a second time in Triton's interpreter: once for the references, once for the kernels.
ifeq ($(strip $(ARGS)),)
test: lint
	$(PARALLEL)
	TRITON_INTERPRET=1 $(PARALLEL) $(INTERPRETED)

test-kernels: $(STAMP)
	TRITON_INTERPRET=1 $(PARALLEL) $(INTERPRETED)
else
test: $(STAMP)
	$(PYTEST) $(ARGS)

test-kernels: $(STAMP)
	TRITON_INTERPRET=1 $(PYTEST) $(INTERPRETED) $(ARGS)
endif

test-slow: $(STAMP)
	$(PYTEST) -m slow $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

demo: $(STAMP)
	$(BIN)/python scripts/demo.py --nproc-per-node 2 $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .triton
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
