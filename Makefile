# Everything you do with tplab. `make help` lists it. Needs GNU make and Python 3.11 or later.

PYTHON ?= python3
TORCH_INDEX ?=
LABS ?=
ROWS ?=
AGAINST ?=
WRITE ?=
UPGRADE ?=
TESTS ?=
BIN := .venv/bin
OLDEST := .venv-oldest/bin
NEWEST := .venv-newest/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes. Each would compile tplab anew if Python were not allowed to keep what it compiles.
unexport PYTHONDONTWRITEBYTECODE

# JupyterLab refuses to run as root (in a container, say) unless it is told to.
LAB_FLAGS ?= $(if $(filter 0,$(shell id -u)),--allow-root)

# On Linux the registry's torch is a CUDA build of several GB. With TORCH_INDEX set, torch alone comes from there.
from_torch_index = $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
colab_torch = $(shell grep '^torch==' requirements/colab.txt)

.DEFAULT_GOAL := help
.PHONY: help lab test lint unit labs-test browser test-oldest test-newest labs site torchs-tests bench lock clean

help: ## list what there is
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16
	@echo
	@echo 'TORCH_INDEX=https://download.pytorch.org/whl/cpu   take the CPU build of torch (on Linux: 0.2 GB, not 4)'
	@echo 'PYTHON=python3.12                                  make the environment with another Python'
	@echo 'LABS="00_first_look"                               the labs that `make labs` executes, or `make site` shows'
	@echo 'ROWS="torch_hops train"                            the rows that `make bench` measures'
	@echo 'AGAINST=HEAD~1                                     `make bench` measures that commit too, in turns: the ratio'
	@echo 'WRITE=1                                            `make bench` writes the figures into docs/figures.md'
	@echo 'TESTS="barrier all_gather"                         run only those of PyTorch'"'"'s tests whose names contain one of these'
	@echo 'UPGRADE=--upgrade                                  let `make lock` take the newest versions'

lab: .venv/lab ## set up on the first run, then open JupyterLab on your own copies of the labs
	$(BIN)/python labs/open_labs.py $(LAB_FLAGS)

test: lint unit labs-test browser ## everything: ruff, types, unit and property tests, labs, browser

lint: .venv/test ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

unit: .venv/test ## unit and property tests
	$(BIN)/python -m pytest tests --ignore tests/browser --numprocesses auto --dist worksteal --durations 80

labs-test: .venv/test ## re-run every lab and compare every output with the committed one
	$(BIN)/python -m pytest labs --nbval --nbval-cell-timeout 120 --numprocesses auto --dist loadfile

browser: .venv/test ## the widgets in a real JupyterLab in a real browser
	$(BIN)/python -m pytest tests/browser --numprocesses auto --dist loadfile --durations 10

test-oldest: .venv-oldest/test ## unit tests and labs on the oldest versions supported, which are Colab's
	$(call tests_of_versions,$(OLDEST))

test-newest: .venv-newest ## unit tests and labs on what `pip install` gives today, without the lock files
	$(call tests_of_versions,$(NEWEST))

# $(1): the programs of the environment. Other versions warn of other things, and labs may print other digits.
define tests_of_versions
	$(1)/python -m pytest tests --ignore tests/browser --ignore tests/website --ignore tests/test_project.py \
	  -W default --numprocesses auto --dist worksteal
	$(1)/python -m pytest labs --nbval-lax --nbval-cell-timeout 120 -W default \
	  --numprocesses auto --dist loadfile
endef

labs: .venv/test ## execute the labs from labs/source and rewrite their outputs
	$(BIN)/python labs/source/build.py $(LABS)

site: .venv/test ## make the static site in build/site; labs that have changed are run once
	$(BIN)/python -m website $(LABS)

torchs-tests: .venv/test ## PyTorch's own tests of torch.distributed on three simulated ranks; 15 minutes
	$(BIN)/python -m tests.torch.distributed.torchs $(TESTS)

bench: .venv/test ## print the table of figures
	$(BIN)/python -m benchmarks $(ROWS) $(if $(AGAINST),--against $(AGAINST)) $(if $(WRITE),--write)

# Each lock file holds what the one before it lacks. A pin stays until pyproject.toml or UPGRADE moves it.
lock: .venv/test ## work the lock files out anew from pyproject.toml
	$(call lock_file,lab,,--extra all --extra build)
	$(call lock_file,test,lab,--extra dev)
	$(BIN)/uv pip compile --quiet requirements/browser.in $(UPGRADE) --python-version 3.14 --generate-hashes \
	  --python-platform wasm32-pyodide2024 --no-annotate --custom-compile-command 'make lock' \
	  --output-file requirements/browser.lock

# $(1): its name   $(2): the lock files before it   $(3): what to lock
locks = $(patsubst %,requirements/%.lock,$(1))
define lock_file
	$(BIN)/uv pip compile --quiet pyproject.toml $(3) $(UPGRADE) --universal --python-version 3.11 --generate-hashes \
	  --no-annotate --custom-compile-command 'make lock' --output-file requirements/$(1).lock \
	  $(patsubst %,--constraint %,requirements/torch.txt $(call locks,$(2))) --no-emit-package torch \
	  $(if $(2),$$(sed -nE 's/^([a-z0-9.-]+)==.*/--no-emit-package \1/p' $(call locks,$(2)) | sort -u))
endef

clean: ## remove the environments and caches
	rm -rf .venv .venv-oldest .venv-newest .pytest_cache .ruff_cache .hypothesis build dist test-results \
	  website/node_modules
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment is made once. A PYTHON that is named later must be the one it was made with.
.PHONY: python.venv python.venv-oldest python.venv-newest
python.venv python.venv-oldest python.venv-newest: python%:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "tplab needs Python 3.11 or later; name one, as in: make lab PYTHON=python3.12"; exit 1; }
ifneq ($(origin PYTHON),file)
	@test ! -x $*/bin/python || test "$$($*/bin/python --version)" = "$$($(PYTHON) --version)" || \
	  { echo "$* has $$($*/bin/python --version), and $(PYTHON) is $$($(PYTHON) --version)." \
	    "To make it again with that: rm -r $*"; exit 1; }
endif

install = $(BIN)/pip install --require-hashes --no-deps --requirement

.venv/lab: requirements/lab.lock requirements/torch.txt pyproject.toml | python.venv
	@echo "Setting up .venv: minutes the first time, nothing after that."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(install) requirements/lab.lock
	$(BIN)/pip install $(from_torch_index) --requirement requirements/torch.txt
	$(BIN)/pip install --no-deps --no-build-isolation --editable .
	@touch $@

.venv/test: requirements/test.lock .venv/lab
	$(install) requirements/test.lock
	@touch $@

# As on Colab: first what is there, then tplab over it; the last lines prove that this replaced nothing.
.venv-oldest/test: requirements/colab.txt pyproject.toml | python.venv-oldest
	test -x $(OLDEST)/python || $(PYTHON) -m venv .venv-oldest
	$(if $(TORCH_INDEX),$(OLDEST)/pip install --no-deps $(from_torch_index) $(colab_torch))
	$(OLDEST)/pip install --requirement requirements/colab.txt accelerate cloudpickle optax safetensors \
	  editables hatchling hypothesis jupytext nbval pytest pytest-timeout pytest-xdist
	$(OLDEST)/pip freeze --exclude-editable > .venv-oldest/before
	$(OLDEST)/pip install --editable .
	$(OLDEST)/pip freeze --exclude-editable | diff .venv-oldest/before -
	@touch $@

# What a new user gets. It is asked for each time, because it may be newer than yesterday.
.PHONY: .venv-newest
.venv-newest: | python.venv-newest
	test -x $(NEWEST)/python || $(PYTHON) -m venv .venv-newest
	$(if $(TORCH_INDEX),$(NEWEST)/pip install --upgrade --no-deps $(from_torch_index) torch)
	$(NEWEST)/pip install --upgrade --upgrade-strategy eager --editable '.[dev]'
