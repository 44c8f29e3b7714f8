# Everything you do with tplab. `make help` lists it. Needs GNU make and Python 3.11 or later.

PYTHON ?= python3
TORCH_INDEX ?=
LABS ?=
BIN := .venv/bin
OLDEST := .venv-oldest/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# JupyterLab refuses to run as root (in a container, say) unless it is told to.
LAB_FLAGS ?= $(if $(filter 0,$(shell id -u)),--allow-root)

# On Linux the registry's torch is a CUDA build of several GB. With TORCH_INDEX set, torch alone comes from there.
# $(1): pip   $(2): torch and its version
torch_first = $(if $(TORCH_INDEX),$(1) install --no-deps --index-url $(TORCH_INDEX) $(2))
torch_pin = $(shell grep '^torch==' requirements.lock)

.DEFAULT_GOAL := help
.PHONY: help lab test lint unit labs-test browser test-oldest labs bench lock clean

help: ## list what there is
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16
	@echo
	@echo 'TORCH_INDEX=https://download.pytorch.org/whl/cpu   take the CPU build of torch (on Linux: 0.2 GB, not 4)'
	@echo 'PYTHON=python3.12                                  make the environment with another Python'
	@echo 'LABS="00_first_look"                               the labs that `make labs` executes'

lab: .venv/.installed ## set up on the first run, then open JupyterLab on the first lab
	$(BIN)/jupyter lab $(LAB_FLAGS) labs/00_first_look.ipynb

test: lint unit labs-test browser ## everything: ruff, types, unit and property tests, labs, browser

lint: .venv/.installed ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/pyright

unit: .venv/.installed ## unit and property tests
	$(BIN)/python -m pytest tests --ignore tests/browser --numprocesses auto --dist loadfile

labs-test: .venv/.installed ## re-run every lab and compare every output with the committed one
	$(BIN)/python -m pytest labs --nbval --nbval-cell-timeout 120 --numprocesses auto --dist loadfile

browser: .venv/.installed ## the widgets in a real JupyterLab in a real browser
	$(BIN)/python -m pytest tests/browser

test-oldest: .venv-oldest/.installed ## unit tests and labs on the oldest versions supported, which are Colab's
	$(OLDEST)/python -m pytest tests --ignore tests/browser --ignore tests/test_project.py \
	  --ignore tests/test_notebooks.py -W default
	$(OLDEST)/python -m pytest labs --nbval-lax --nbval-cell-timeout 120 -W default

labs: .venv/.installed ## execute the labs from labs/source and rewrite their outputs
	$(BIN)/python labs/source/build.py $(LABS)

bench: .venv/.installed ## print the table of figures
	$(BIN)/python -m benchmarks

lock: .venv/.installed ## write what is installed into requirements.lock
	@{ grep '^#' requirements.lock; $(BIN)/pip freeze --exclude-editable | sed -E 's/\+cpu|\+cu[0-9]+//' | grep -v '^nvidia-\|^triton=='; } > .venv/lock
	mv .venv/lock requirements.lock

clean: ## remove the environments and caches
	rm -rf .venv .venv-oldest .pytest_cache .ruff_cache .hypothesis build dist test-results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "tplab needs Python 3.11 or later; name one, as in: make lab PYTHON=python3.12"; exit 1; }
	@echo "Setting up .venv: minutes the first time, nothing after that."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(call torch_first,$(BIN)/pip,$(torch_pin))
	$(BIN)/pip install --requirement requirements.lock
	$(BIN)/pip install --no-deps --no-build-isolation --editable .
	@touch $@

# As on Colab: first what is there, then tplab over it; the last lines prove that this replaced nothing.
.venv-oldest/.installed: requirements-colab.txt requirements.lock pyproject.toml
	test -x $(OLDEST)/python || $(PYTHON) -m venv .venv-oldest
	$(call torch_first,$(OLDEST)/pip,$(torch_pin))
	$(OLDEST)/pip install --requirement requirements-colab.txt $(torch_pin) cloudpickle optax \
	  hatchling hypothesis nbval pytest pytest-timeout
	$(OLDEST)/pip freeze --exclude-editable > .venv-oldest/before
	$(OLDEST)/pip install --editable .
	$(OLDEST)/pip freeze --exclude-editable | diff .venv-oldest/before -
	@touch $@
