# What one types. `make demo` and `make test` install what they need first, into .venv, and touch nothing outside it
# but the package cache of uv.
#
#   make install                    everything, pinned by requirements.lock
#   make install TORCH_INDEX=<url>  the same with torch from that package index, such as one of CPU builds
#   make install PYTHON=python3.12  with that interpreter (3.11 or newer)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test layouts e2e check fix bench reference lock clean FORCE

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := agent,operator,cli,nixl,mooncake,dev
PYTHON ?=
TORCH_INDEX ?=

help: ## show the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18

# The stamp is older than its inputs after a change of them only, so that a second install does nothing.
$(STAMP): pyproject.toml requirements.lock .ci/install $(if $(TORCH_INDEX),FORCE)
	PYTHON='$(PYTHON)' TORCH_INDEX='$(TORCH_INDEX)' EXTRAS='$(EXTRAS)' .ci/install $(VENV)
	touch $@

install: $(STAMP) ## create .venv with everything that the other targets need

demo: install ## move KV between unequal layouts on this machine and compare every byte and token
	$(BIN)/longshore demo

test: install ## run all tests
	$(BIN)/python -m pytest

layouts: install ## every pair of layouts over every transport, of which `make test` runs a few
	LAYOUTS=all $(BIN)/python -m pytest tests/agent/test_agent_layouts.py

e2e: install ## run the tests against a real Kubernetes control plane, which is built once (needs Go or fetches it)
	.ci/install-go $(VENV)
	export PATH="$(CURDIR)/$(BIN):$$PATH"; PYTHONPATH=e2e $(BIN)/python -m controlplane build && $(BIN)/python -m pytest e2e

check: install ## format, lint, types, import walls and the quick tests: what a commit needs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q -m 'not slow'

fix: install ## format, and repair what the linter can repair
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install ## measure staged, contiguous and slice-by-slice transfers in one run
	$(BIN)/longshore bench transfer

reference: install ## make the reference pages of settings, metrics and faults again from their tables
	$(BIN)/python -m longshore_agent.settings >docs/reference/settings.md
	$(BIN)/python -m longshore_agent.status.metrics >docs/reference/metrics.md
	$(BIN)/python tests/agent/fault_table.py >docs/reference/faults.md

lock: install ## choose the newest versions that pyproject.toml allows and pin them
	{ sed '/^[^#]/,$$d' requirements.lock; \
	  $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --upgrade --all-extras \
	    --no-emit-index-url --no-annotate --no-header pyproject.toml; } > requirements.lock.new
	mv requirements.lock.new requirements.lock

clean: ## remove the virtual environment and all caches of the tree
	rm -rf $(VENV) .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
