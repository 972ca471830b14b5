# Every target sets itself up: it makes .venv and installs what it needs, once.
# PYTHON=python3.12 uses that interpreter, in an environment of its own.
PYTHON ?= python3
VENV := $(if $(filter python3,$(PYTHON)),.venv,.venv-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
# With an NVIDIA GPU, jax with CUDA is installed beside the other extras.
CUDA := $(shell nvidia-smi -L >/dev/null 2>&1 && echo ,cuda12)
SOURCES := jaxdp experiments benchmarks tests docs

.DEFAULT_GOAL := help
# Experiments that compile for accelerators that are not here, and that run PyTorch.
COMPILING := claims gpu overlap scaling traffic
RIVALS := bandwidth
EXTRA_STAMP := $(if $(filter $(COMPILING),$(EXP)),.compile,$(if \
  $(filter $(RIVALS),$(EXP)),.torch,.experiments))

.PHONY: help experiment experiments report docs test check format bench gpu-check dist clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  Options: EXP=ring, ARGS="--devices 4 --size-mb 16", PYTHON=python3.12'

experiment: $(VENV)/$(EXTRA_STAMP)  ## run one experiment: make experiment EXP=ring
	@$(BIN)/python -m experiments $(EXP) $(ARGS)

experiments: $(VENV)/.experiments  ## list the experiments, a line each
	@$(BIN)/python -m experiments --list

report: $(VENV)/.experiments  ## one site from all results: results/site/index.html
	@$(BIN)/python -m experiments.site $(ARGS)

docs: $(VENV)/.docs  ## the documentation: docs/_build/html/index.html
	$(BIN)/sphinx-build -W --keep-going -q docs docs/_build/html
	@echo 'docs/_build/html/index.html'

test: $(VENV)/.test  ## run the tests (PyTorch references included)
	$(BIN)/pytest -n auto --dist loadfile $(ARGS)

check: $(VENV)/.dev  ## format, lint, spelling, types, documentation and tests: what CI runs
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/codespell $(SOURCES) README.md CHANGELOG.md
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(MAKE) docs
	$(MAKE) test

format: $(VENV)/.dev  ## format the code and apply safe lint fixes
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: $(VENV)/$(if $(filter --all,$(ARGS)),.compile,.experiments)  ## measure, and compare with earlier commits
	@$(BIN)/python -m benchmarks $(ARGS)

gpu-check: $(VENV)/.test  ## measure this machine's GPU: under 5 minutes, no network
	@$(BIN)/python -m experiments.gpu_check $(ARGS)

dist: $(VENV)/.test  ## build the wheel and the source distribution: dist/
	$(BIN)/python -m build

clean:  ## remove environments, caches and results
	rm -rf .venv .venv-* results dist docs/_build
	rm -rf .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp per extra, so that a second call starts at once. The larger ones contain
# others, and stamp them too.
TESTED := .experiments .compile .torch .docs .test
$(VENV)/.experiments:
	@$(MAKE) --no-print-directory install EXTRA=experiments STAMPS=".experiments"
$(VENV)/.compile:
	@$(MAKE) --no-print-directory install EXTRA=experiments,compile STAMPS=".experiments .compile"
$(VENV)/.torch:
	@$(MAKE) --no-print-directory install EXTRA=experiments,torch STAMPS=".experiments .torch"
$(VENV)/.docs:
	@$(MAKE) --no-print-directory install EXTRA=docs STAMPS=".experiments .docs"
$(VENV)/.test:
	@$(MAKE) --no-print-directory install EXTRA=test STAMPS="$(TESTED)"
$(VENV)/.dev:
	@$(MAKE) --no-print-directory install EXTRA=dev STAMPS="$(TESTED) .dev"
$(addprefix $(VENV)/,$(TESTED) .dev): pyproject.toml

.PHONY: install
install: $(BIN)/pip
	@echo "Installing jaxdp with [$(EXTRA)$(CUDA)] into $(VENV): a few minutes, once."
	@$(BIN)/pip install --quiet --editable '.[$(EXTRA)$(CUDA)]'
	@cd $(VENV) && touch $(STAMPS)

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'jaxdp needs Python 3.11 or newer, and $(PYTHON) is older or missing.' \
	       'Name another one: make PYTHON=python3.12 ...'; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo 'The venv module of $(PYTHON) is missing.' \
	       'On Debian or Ubuntu: apt install python3-venv'; exit 1; }
