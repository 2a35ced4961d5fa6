# Everything a person or CI runs. `make help` lists it. Needs Python >= 3.11, make and pip; the rest goes into .venv.

VENV := .venv
BIN := $(VENV)/bin
# The first new enough Python of the machine; `make PYTHON=/path/to/python3.12 ...` takes another.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
            $$p -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$p && break; done)
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
# pip shows its progress to a person and is quiet in a log.
QUIET_IN_LOG := $$(test -t 1 || echo --quiet)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check lint types contracts doctest bench clean interrupted
.NOTPARALLEL:

help:  ## list these commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

demo: $(VENV)/.installed  ## install what is needed, then train a small GPT on 8 local processes: 2 stages x 2 x 2
	$(BIN)/python examples/train_gpt.py fit --config examples/configs/nd.yaml

test: $(VENV)/.installed  ## install what is needed, then run the tests
	$(BIN)/python -m pytest

test-all: $(VENV)/.installed  ## the slow tests too
	$(BIN)/python -m pytest --slow

check: lint types contracts doctest  ## lint, types, import contracts and doctests

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.dev-installed
	$(BIN)/pyright --pythonpath $(BIN)/python

contracts: $(VENV)/.dev-installed
	$(BIN)/lint-imports

doctest: $(VENV)/.installed
	$(BIN)/python -m pytest --doctest-modules --durations=0 --durations-min=1 -q lightning_4d

bench: $(VENV)/.installed  ## compare with plain torch FSDP2 and with Lightning's own strategy
	$(BIN)/python -m tests.benchmarks

clean:  ## remove .venv, build results and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp appears only when all is installed. An install that was interrupted may have left half a package behind,
# which pip would take for a whole one, so the next try starts from an empty environment.
$(VENV)/.installed: pyproject.toml constraints.txt $(if $(wildcard $(VENV)/.installing),interrupted)
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 found. Install one, or name it: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c '$(NEW_ENOUGH)' || { echo "$(PYTHON) is $$($(PYTHON) -V 2>&1), but Python >= 3.11 is needed: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || { echo "$(PYTHON) cannot create virtual environments: install its venv package (Debian: python3-venv)" >&2; exit 1; }
	@if test -e $(VENV)/.installing || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	    echo "Creating $(VENV) and installing torch, lightning and what they need (a few minutes, once) ..."; \
	    $(PYTHON) -m venv --clear $(VENV); fi
	@rm -f $@ $(VENV)/.dev-installed && touch $(VENV)/.installing
	@$(INSTALL) $(QUIET_IN_LOG) setuptools
	@$(INSTALL) $(QUIET_IN_LOG) --no-build-isolation -e '.[examples,test]'
	@mv $(VENV)/.installing $@

$(VENV)/.dev-installed: $(VENV)/.installed
	@touch $(VENV)/.installing
	@$(INSTALL) $(QUIET_IN_LOG) --no-build-isolation -e '.[dev]'
	@rm $(VENV)/.installing && touch $@
