# Every target sets up its own environment in .venv; the machine needs only Python and make.
#   PYTHON=python3.12   the Python to use (default: the newest that runs and can install JAX)
#   ARGS="..."          arguments for the program that the target runs
#   VENV=path           another place for the environment

PYTHON ?=
ARGS :=
VENV := .venv

# Between 2 and 8 test workers: each compiles on its own and takes about a gigabyte.
CPUS := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
WORKERS := $(shell n=$(CPUS); echo $$((n < 2 ? 2 : n > 8 ? 8 : n)))

export PYTHON
python := "$(VENV)/bin/python"
setup := @scripts/setup_venv.sh "$(VENV)"
sources := .ci benchmarks effattn experiments scripts tests
pytest = $(python) -m pytest -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo mlm seq2seq gallery test test-slow test-all test-gpu bench bench-gpu docs lint format clean

help: ## show this
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' Makefile | while IFS='	' read -r target does; do \
	  printf '  make %-9s %s\n' "$$target" "$$does"; done
	@echo '  with PYTHON=python3.X, ARGS="..." and VENV=path where they apply'

demo: ## train one small language model a mechanism on real text and compare them
	$(setup) experiments
	$(python) -m experiments.lm $(ARGS)

mlm: ## the same with masked tokens, for mechanisms that look both ways
	$(setup) experiments
	$(python) -m experiments.mlm $(ARGS)

seq2seq: ## one small encoder-decoder a mechanism, on pairs of texts
	$(setup) experiments
	$(python) -m experiments.seq2seq $(ARGS)

gallery: ## draw the pictures of patterns and of attention in docs/images
	$(setup) experiments
	$(python) -m experiments.gallery $(ARGS)

test: ## run the tests in parallel, without those marked slow
	$(setup) experiments,test
	$(pytest) -m "not slow and not devices" $(ARGS)
	$(pytest) --devices 8 -m "not slow and devices" $(ARGS)

test-slow: ## run the tests marked slow
	$(setup) experiments,test
	$(pytest) -m "slow and not devices" $(ARGS)
	$(pytest) --devices 8 -m "slow and devices" $(ARGS)

test-all: ## run all tests
	$(setup) experiments,test
	$(pytest) -m "not devices" $(ARGS)
	$(pytest) --devices 8 -m devices $(ARGS)

test-gpu: ## compile the kernels for a CUDA GPU, run them there and compare with float64
	$(setup) test,gpu
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(pytest) tests/pallas/test_on_gpu.py $(ARGS)

bench: ## measure against what JAX and PyTorch ship
	$(setup) experiments
	$(python) -m benchmarks.run $(ARGS)

bench-gpu: ## measure the kernels on a CUDA GPU, in under eight minutes
	$(setup) analysis,gpu
	$(python) -m benchmarks.gpu $(ARGS)

docs: ## write the reference of all public names, from their docstrings, to docs/api
	$(setup) docs
	$(python) -m pdoc --docformat google -o docs/api effattn

lint: ## check style, format, imports, types, spelling and prose
	$(setup) dev,experiments
	$(python) -m ruff check
	$(python) -m ruff format --check
	"$(VENV)/bin/lint-imports"
	$(python) -m mypy
	$(python) -m codespell_lib $(sources) docs *.md
	$(python) scripts/lint_prose.py $(sources)

format: ## fix style and format
	$(setup) dev,experiments
	$(python) -m ruff check --fix
	$(python) -m ruff format

clean: ## remove the environment, builds and caches; results stay
	rm -rf .venv build dist docs/api .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
