# Every target creates the environment .venv if needed; the machine needs only Python and make.
#   PYTHON=python3.12   Python to use (default: the newest that can install JAX)
#   ARGS="..."          arguments of the program that the target runs
#   VENV=path           another place for the environment

PYTHON ?=
ARGS :=
VENV := .venv

# 2 to 8 test workers: each compiles separately and takes about a gigabyte.
CPUS := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
WORKERS := $(shell n=$(CPUS); echo $$((n < 2 ? 2 : n > 8 ? 8 : n)))

export PYTHON
python := "$(VENV)/bin/python"
setup := @scripts/setup_venv.sh "$(VENV)"
sources := .ci benchmarks effattn examples experiments scripts tests
pytest = $(python) -m pytest -n $(WORKERS) --dist worksteal

# With huge pages, Linux makes the temporaries of a training step on a CPU in less time.
demo mlm seq2seq recall states lra classify scaling compress adaptive: export GLIBC_TUNABLES := \
  glibc.malloc.hugetlb=1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo mlm seq2seq recall states lra classify efficiency scaling compress adaptive report gallery test test-slow test-all test-gpu bench bench-gpu docs release lint format clean

help: ## show this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' Makefile | while IFS='	' read -r target does; do \
	  printf '  make %-10s %s\n' "$$target" "$$does"; done
	@echo '  with PYTHON=python3.X, ARGS="..." and VENV=path where they apply'

demo: ## compare mechanisms in small language models on real text
	$(setup) experiments
	$(python) -m experiments.lm $(ARGS)

mlm: ## compare bidirectional mechanisms in masked language models
	$(setup) experiments
	$(python) -m experiments.mlm $(ARGS)

seq2seq: ## compare mechanisms in small encoder-decoders
	$(setup) experiments
	$(python) -m experiments.seq2seq $(ARGS)

recall: ## compare how well mechanisms recall what was read
states: ## compare how well mechanisms track a state
lra: ## compare bidirectional mechanisms on long inputs
classify: ## compare classifiers of documents and images
scaling: ## fit power laws to the losses of a grid of models
efficiency: ## measure time and memory of every mechanism against length
compress: ## compare a trained model with compressed forms of it
adaptive: ## compare mixtures, in which each token chooses a mechanism, with single mechanisms
report: ## gather the results in experiments/results into docs/report.md
recall states lra classify scaling efficiency compress adaptive report:
	$(setup) experiments
	$(python) -m experiments.$@ $(ARGS)

gallery: ## draw the pictures in docs/images
	$(setup) experiments
	$(python) -m experiments.gallery $(ARGS)

test: ## run the quick tests in parallel
	$(setup) experiments,test
	$(pytest) -m "not slow and not devices" $(ARGS)
	$(pytest) --devices 8 -m "not slow and devices" $(ARGS)

test-slow: ## run the slow tests
	$(setup) experiments,test
	$(pytest) -m "slow and not devices" $(ARGS)
	$(pytest) --devices 8 -m "slow and devices" $(ARGS)

test-all: ## run all tests
	$(setup) experiments,test
	$(pytest) -m "not devices" $(ARGS)
	$(pytest) --devices 8 -m devices $(ARGS)

test-gpu: ## test the kernels for GPUs on a CUDA GPU
	$(setup) test,gpu
	XLA_PYTHON_CLIENT_PREALLOCATE=false $(pytest) tests/pallas/test_on_gpu.py $(ARGS)

bench: ## measure effattn beside JAX and PyTorch on the CPU
	$(setup) experiments
	$(python) -m benchmarks.run $(ARGS)

bench-gpu: ## measure kernels beside other libraries on a CUDA GPU, in eight minutes
	$(setup) analysis,gpu
	$(python) -m benchmarks.gpu $(ARGS)

docs: ## build the site in docs/_build/html
	$(setup) docs
	$(python) -m sphinx -W --keep-going -q -j auto -b html docs docs/_build/html
	@echo 'open docs/_build/html/index.html'

release: ## build the distributions, check them, and install them in clean environments
	$(setup) dev,experiments
	scripts/check_release.sh $(python)

lint: ## check style, format, imports, types, spelling and prose
	$(setup) dev,experiments
	$(python) -m ruff check
	$(python) -m ruff format --check
	"$(VENV)/bin/lint-imports"
	$(python) -m mypy
	$(python) -m codespell_lib $(sources) docs *.md
	$(python) scripts/lint_prose.py $(sources) docs/extensions

format: ## fix style and format
	$(setup) dev,experiments
	$(python) -m ruff check --fix
	$(python) -m ruff format

clean: ## remove the environment, builds and caches, but no results
	rm -rf .venv build dist docs/_build docs/api docs/copied docs/gallery .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
