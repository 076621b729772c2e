# `make demo` and `make test` each set up everything in .venv, then do their work.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

LOWEST := .venv-lowest
# On the package index, only this version is a CPU build for all Linux machines. Use TORCH=2.7.0 if older builds are available.
TORCH  ?= 2.13.0
TESTS  ?= -m "not slow"

.PHONY: help demo test test-all test-browser quick test-lowest dist lint docs clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV): takes some minutes, only this first time."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --upgrade "pip>=23" # -qq: print errors only, because warnings are about pip's own settings
	@$(BIN)/python -m pip install -qq --constraint constraints.txt --editable ".[all,dev]"
	@touch $@

demo: $(READY)  ## find a ticket in a few minutes, compare it with its dense twin, verify, load and generate
	@$(BIN)/accelerate launch --config_file recipes/accelerate/cpu.yaml \
	  --num_cpu_threads_per_process $$(getconf _NPROCESSORS_ONLN) recipes/train_gpt2_slt.py \
	  --config recipes/nano.yaml --compare random_mask dense --prompt "The function returns" \
	  --output_dir runs/demo --overwrite
	@$(BIN)/slt verify runs/demo/ticket
	@$(BIN)/slt page runs/demo/ticket runs/demo/page.html --prompt "The function returns"

test: $(READY)  ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

test-all: $(READY)  ## run all tests, also those that take too long for CI: whole suites, studies, every rule compiled
	HF_SLT_ALL_TESTS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

test-browser: $(READY)  ## test the page of a ticket in a headless Chromium, which is installed if possible
	@for one in chromium chromium-browser google-chrome; do command -v $$one && exit; done; \
	  echo "test-browser: no Chromium here, trying apt-get install chromium"; \
	  { apt-get update && apt-get install --yes --no-install-recommends chromium; } > /dev/null 2>&1 || \
	  echo "test-browser: it cannot be installed, so the page is not tested in a browser"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs tests/browser.py

quick: $(READY)  ## run all tests except the slow ones
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not slow"

$(LOWEST)/.ready: pyproject.toml
	$(PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --upgrade "pip>=23"
	$(LOWEST)/bin/python -m pip install --quiet uv
	echo "torch==$(TORCH)" | $(LOWEST)/bin/uv pip compile --quiet --resolution lowest-direct \
	  --extra all --extra test --extra tools --constraint - --output-file $(LOWEST)/constraints.txt pyproject.toml
	$(LOWEST)/bin/python -m pip install --quiet --constraint $(LOWEST)/constraints.txt --editable ".[all,test,tools]"
	@touch $@

test-lowest: $(LOWEST)/.ready  ## run the quick tests with the lowest versions that pyproject.toml declares
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest --numprocesses 2 --dist worksteal $(TESTS)

dist: $(READY)  ## build the wheel and the source distribution in dist/, check them, and run them in an empty environment
	rm -rf dist
	$(BIN)/python tests/distribution.py dist

lint: $(READY)  ## run ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)  ## build the documentation site in site/, from docs/ and the docstrings; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:  ## remove the virtual environment and all results
	rm -rf $(VENV) $(LOWEST) runs dist site
