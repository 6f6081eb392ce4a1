# Everything a person does with a clone: set up, serve, show, test, measure, clean.
#
#   make serve                      serve SmolLM2-135M-Instruct on 127.0.0.1:30000
#   make serve MODEL=gemma3-270m    serve the hybrid model; MODEL may also be a directory or a .gguf
#   make serve ARGS="--port 8000"   any argument of `statewise serve`
#   make demo                       two-minute tour of hybrid reuse
#   make test | test-fast | check   the whole suite | without slow tests | everything that CI runs
#                                   (ARGS="-n 0": in one process)
#   make bench [ARGS="--quick"]     first figures, through the HTTP server
#   make compiled-tree              the prefix tree's inner modules compiled (optional: quicker)
#   make test-compiled              the tree's tests on what that made
#   make venv | clean
#
# Installing happens once: each stamp is newer than what it was made from. Serving needs a smaller
# set of packages than testing, hence two stamps.

SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2-135m
ARGS ?=
# One test worker a core; contiguous shares, so that what a module's tests set up is set up once.
WORKERS := -n logical --maxprocesses 8 --dist worksteal

PY := $(VENV)/bin/python -P
SETUP_INPUTS := pyproject.toml setup.py constraints-cpu.txt tools/setup

# Spinning OpenMP threads lose 5-20x where cores are shared.
export OMP_WAIT_POLICY ?= PASSIVE
# An environment that forbids compiled files makes every start, and every test worker, compile anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help venv serve demo test test-fast check bench soak compiled-tree test-compiled clean
.DEFAULT_GOAL := help

help:
	@sed -n '3,13s/^#//p' Makefile

venv: $(VENV)/.stamp-dev

$(VENV)/.stamp-serve: $(SETUP_INPUTS)
	@PYTHON="$(PYTHON)" VENV="$(VENV)" tools/setup serve
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-serve
	@PYTHON="$(PYTHON)" VENV="$(VENV)" tools/setup dev
	@touch $@

serve: $(VENV)/.stamp-serve
	@exec $(PY) -m statewise.launch_server --model-path "$(MODEL)" $(ARGS)

demo: $(VENV)/.stamp-dev
	@exec $(PY) tools/demo.py $(ARGS)

test: $(VENV)/.stamp-dev
	@exec $(PY) -m pytest $(WORKERS) $(ARGS)

test-fast: $(VENV)/.stamp-dev
	@exec $(PY) -m pytest $(WORKERS) -m "not slow" $(ARGS)

check: $(VENV)/.stamp-dev
	@VENV="$(VENV)" exec tools/check $(ARGS)

bench: $(VENV)/.stamp-dev
	@exec $(PY) benchmarks/first_figures.py $(ARGS)

soak: $(VENV)/.stamp-dev
	@exec $(PY) tools/soak.py $(ARGS)

compiled-tree: $(VENV)/.stamp-dev
	@exec $(PY) tools/compile_tree.py

test-compiled: $(VENV)/.stamp-dev
	@STATEWISE_COMPILED=1 exec $(PY) -m pytest $(WORKERS) $(ARGS) tests/unit/radix \
	    tests/property/test_radix_tree.py tests/property/test_intersection.py \
	    tests/property/test_recovery.py tests/test_faults_cache.py tests/sim

clean:
	rm -rf $(VENV) build dist results .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	rm -rf radix/_compiled
	rm -rf src/*.egg-info kernels/_native.*
	find radix runtime kernels frontend src tests tools benchmarks -name __pycache__ -prune \
	    -exec rm -rf {} +
