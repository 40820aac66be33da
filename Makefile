# Everything here sets itself up: a Python of at least 3.11 and a package index are all that is needed.
#
#   make demo     look at a recorded checkpoint, check the model against its recording, talk with the model that comes along
#   make test     formatting, lint, types, and the whole test suite, compiling the kernels for TPUs and GPUs that are not there
#   make test-all  and what the suite leaves out to stay short: more devices to compile for, the models of forty layers
#   make bench    on a GPU or TPU, the kernels against XLA; on a CPU, XLA against NumPy (BENCH_ARGS=--help tells more)
#
# PYTHON=... chooses the interpreter, PYTEST_ARGS=... is handed to pytest, VENV=... is where things are installed. The compilers for
# TPUs and GPUs are wheels of 400 MB, fetched once into build; where they cannot be had, the tests that need them are skipped, and
# CSA2_REQUIRE_AOT=1 makes that an error.

SHELL := /bin/bash
VENV ?= .venv
MODEL := tests/golden/tiny8_f32_noqat
READY := $(VENV)/.ready
BIN := $(VENV)/bin

# The first interpreter that runs and is new enough. A pyenv shim may exist for a version that is not active, so each is tried.
NEW_ENOUGH := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3 python python3.11 python3.12 python3.13 python3.14; do \
	$$python -c '$(NEW_ENOUGH)' >/dev/null 2>&1 && { echo $$python; break; }; done)

# Compiled programs are kept between runs and shared between test processes.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/build/jax-cache

# One set of compilers per environment, because each jax wants its own: build/aot for .venv, build/aot-x for .venv-x.
export CSA2_AOT ?= $(CURDIR)/build/aot$(VENV:.venv%=%)

.PHONY: help setup test test-all bench demo lint format smoke aot-compilers aot-report wheel clean

help:
	@sed -n '/^#   make/s/^# *//p' Makefile
	@echo "also: make lint, make format, make smoke, make wheel, make clean,"
	@echo "make aot-compilers (fetches them), make aot-report (compiles everything and writes docs/compiled.md)"

setup: $(READY)

$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python of at least 3.11 with venv found; say PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[test]'
	touch $@

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

aot-compilers: $(READY)
	@$(BIN)/python -m tests.aot.compilers

aot-report: aot-compilers
	$(BIN)/python -m tests.aot.report

bench: $(READY)
	$(BIN)/python benchmarks/kernels.py $(BENCH_ARGS)

test: lint aot-compilers
	$(BIN)/python -m tests.suite $(PYTEST_ARGS)

test-all: lint aot-compilers
	$(BIN)/python -m tests.suite --exhaustive $(PYTEST_ARGS)

smoke: $(READY)
	JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(BIN)/python -m pytest -n 2 --dist worksteal -m smoke $(PYTEST_ARGS)

demo: $(READY)
	@mkdir -p build
	$(BIN)/csa2 inspect $(MODEL) --png build/plan.png
	$(BIN)/csa2 check $(MODEL)
	printf 'What does os.path.join do?\nHow do I call json.dumps?\n/stats\n' | $(BIN)/csa2 chat --temperature 0 --max-new-tokens 96

wheel: $(READY)
	$(BIN)/python -m pip wheel -qq --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls dist

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
