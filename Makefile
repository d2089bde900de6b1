# Commands for development. `make demo` and `make test` first install their requirements into .venv, and write nothing else
# except uv's package cache and Python's bytecode.
#
#   make install                    everything, pinned by requirements.lock
#   make install TORCH_INDEX=<url>  the same with torch from that package index, such as one of CPU builds
#   make install PYTHON=python3.12  with that interpreter (3.11 or newer)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Tests start hundreds of processes. Without cached bytecode, which images of Python often switch off, each of them compiles all
# modules again: an agent's start takes more than twice the processor time.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help install demo test test-all ratchet layouts sim soak fuzz controlplane images e2e e2e-cluster e2e-vllm e2e-sglang dashboard check fix bench bench-vllm bench-vllm-gpu bench-sglang bench-sglang-gpu gpu reference docs release lock clean FORCE

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := agent,operator,cli,lab,nixl,mooncake,otel,dev
# All extras except those of engines, which pin other versions than the tree.
LOCKED := agent operator cli lab nixl mooncake mooncake-cuda12 mooncake-cuda13 otel dev fuzz docs
PYTHON ?=
TORCH_INDEX ?=

help: ## show the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1\t/' | expand -t 22

# The stamp is older than its inputs only after a change, so that a second install does nothing.
$(STAMP): pyproject.toml requirements.lock .ci/install $(if $(TORCH_INDEX),FORCE)
	PYTHON='$(PYTHON)' TORCH_INDEX='$(TORCH_INDEX)' EXTRAS='$(EXTRAS)' .ci/install $(VENV)
	touch $@

install: $(STAMP) ## create .venv with the requirements of all other targets

# With KV in GPU memory: make demo DEVICES=cuda:0,cuda:1, also with GPU_PYTHON and PYTHONPATH as for `gpu`.
demo: $(if $(GPU_PYTHON),,install) ## move KV between unequal layouts on this machine and compare every byte and token
	$(if $(GPU_PYTHON),$(GPU_PYTHON) -m longshore_cli.main,$(BIN)/longshore) demo$(if $(DEVICES), --devices $(DEVICES))

# make test REST=layouts also runs one part of the rest; tests/conftest.py lists the parts
test: install ## run the tests that show each behaviour once; TESTS="tests/wire -k ring" runs some
	.ci/test $(BIN)/python --rest $(or $(REST),none) $(TESTS)

test-all: install ## run all tests: also storms, all transports and layouts, releases, soak, many seeds of the simulator
	.ci/test $(BIN)/python $(TESTS)

# make ratchet RATCHET=--write after a change that is worth more work; make ratchet RATCHET='--against HEAD~9'
ratchet: install ## count the work of fixed scenes; fail if one takes over 3 % more than benchmarks/ratchet.json says
	.ci/install-valgrind
	$(BIN)/python benchmarks/ratchet.py $(RATCHET)

layouts: install ## test all pairs of layouts over every transport
	.ci/test $(BIN)/python tests/agent/test_agent_layouts.py

# make sim SEEDS=200 MIX='tiny rings'; make sim MINUTES=30; to repeat and reduce one run: make sim SEED='tiny rings:17'
sim: install ## run the protocol cores with mixes of faults in a simulator
	$(BIN)/python tests/sim/simulate.py $(if $(SEED),--seed '$(SEED)') $(if $(PLANT),--plant '$(PLANT)') $(if $(MIX),--mix '$(MIX)') \
	  $(if $(SEEDS),--seeds $(SEEDS)) $(if $(FIRST),--first $(FIRST)) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(JOBS),--jobs $(JOBS))

# make soak MINUTES=60 SEED=1 JSON=build/soak.json DIRECTORY=/tmp/soak (of logs; it must be new)
soak: install ## kill, stop and restart real agents, workers and engines under load, and compare every byte
	PYTHONPATH=tests/agent $(BIN)/python tests/soak/soak.py $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) \
	  $(if $(JSON),--json $(JSON)) $(if $(DIRECTORY),--directory $(DIRECTORY))

# make fuzz RUNS=10000000 FUZZ_SEED=7 GROW=1 adds new inputs to the corpus; make fuzz INPUT=0199 repeats one input
fuzz: install ## search for bytes that break a decoder of messages
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraints requirements.lock --editable '.[fuzz]'
	$(BIN)/python tests/wire/fuzz_codec.py $(if $(RUNS),--runs $(RUNS)) $(if $(FUZZ_SEED),--seed $(FUZZ_SEED)) \
	  $(if $(GROW),--grow) $(if $(INPUT),--input $(INPUT))

controlplane: install ## build the programs of a Kubernetes control plane, once (needs Go or fetches it)
	.ci/install-go $(VENV)
	export PATH="$(CURDIR)/$(BIN):$$PATH"; PYTHONPATH=e2e $(BIN)/python -m controlplane build

e2e: controlplane ## run the tests of the operator against a real Kubernetes control plane
	.ci/install-chromium
	export PATH="$(CURDIR)/$(BIN):$$PATH"; .ci/e2e $(BIN)/python

# make images EXTRAS=cuda13 BASE_IMAGE=<name>@sha256:<digest>; see .ci/images
images: ## build both container images with buildah, and print their sizes
	.ci/images

# To use your own cluster: E2E_CLUSTER=own; see e2e/cluster/README.md
e2e-cluster: controlplane ## run the tests on two real nodes of this machine (needs root); CLUSTER_TESTS='-m shortest' runs some
	export PATH="$(CURDIR)/$(BIN):$$PATH"; if [[ "$${E2E_CLUSTER:-}" != own ]]; then \
	  .ci/install-cluster; .ci/images; E2E_VLLM_VENV="$$(.ci/install-vllm $(VENV))"; export E2E_VLLM_VENV; fi; \
	$(BIN)/python -m pytest e2e/cluster $(CLUSTER_TESTS)

e2e-sglang: install ## run the tests with a real SGLang, installed once into the cache; SGLANG_TESTS='-m shortest' runs one pair
	E2E_SGLANG_VENV="$$(.ci/install-sglang $(VENV))"; E2E_VLLM_VENV="$$(.ci/install-vllm $(VENV))"; \
	export E2E_SGLANG_VENV E2E_VLLM_VENV; $(BIN)/python -m pytest e2e/sglang $(SGLANG_TESTS)

# On GPUs: make e2e-vllm E2E_VLLM_VENV=<environment of e2e/vllm/requirements-gpu.lock> E2E_VLLM_DEVICES=0,1
e2e-vllm: install ## run the tests with a real vLLM, installed once into the cache; VLLM_TESTS='-m shortest' runs one pair
	E2E_VLLM_VENV="$$(.ci/install-vllm $(VENV))" $(BIN)/python -m pytest e2e/vllm $(VLLM_TESTS)

# Needs root, as the tests with process nodes do.
dashboard: controlplane ## draw the dashboard's graphs from a real Prometheus, and the agent's web page, into docs/images
	export PATH="$(CURDIR)/$(BIN):$$PATH"; PYTHONPATH=e2e:tests/agent $(BIN)/python e2e/draw_dashboard.py docs/images/dashboard.png
	.ci/install-chromium
	PYTHONPATH=e2e:tests/agent $(BIN)/python e2e/draw_web_page.py docs/images

check: install ## check format, lint, types and import walls, and run tests that start no agent; required before a commit
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	TEST_PROCESSES=$$(nproc) .ci/test $(BIN)/python -q --rest none -m 'not slow' tests/wire tests/spec tests/client tests/engines tests/operator tests/repo

fix: install ## format, and apply the linter's fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# With another interpreter, such as a GPU machine's own: make gpu GPU_PYTHON=python3 PYTHONPATH=wire:spec:agent:client:cli:lab
# To run a part: make gpu GPU_OPTIONS="--quick --steps tests,demo"
gpu: $(if $(GPU_PYTHON),,install) ## run all tests and benchmarks that need a GPU; without a GPU, print the reason
	$(or $(GPU_PYTHON),$(BIN)/python) benchmarks/everything_gpu.py $(GPU_OPTIONS)

bench: install ## measure staged, contiguous and slice-by-slice transfers in one run
	$(BIN)/longshore bench transfer

bench-vllm: install ## compare Longshore's connector with vLLM's NixlConnector in one run
	E2E_VLLM_VENV="$$(.ci/install-vllm $(VENV))" PYTHONPATH=e2e:e2e/vllm $(BIN)/python benchmarks/vllm_connectors.py

# With an interpreter that has torch, and another one for vLLM: make bench-vllm-gpu GPU_PYTHON=python3 VLLM_PYTHON=/venv/bin/python
# Further options: GPU_OPTIONS="--quick --mps --directions TP2:TP2"
bench-vllm-gpu: $(if $(GPU_PYTHON),,install) ## compare the same on two GPUs in one run, also with both engines at once
	$(or $(GPU_PYTHON),$(BIN)/python) benchmarks/vllm_on_gpus.py --json build/vllm-gpu.json $(GPU_OPTIONS)

bench-sglang: install ## compare Longshore with SGLang's own NIXL backend in one run
	E2E_SGLANG_VENV="$$(.ci/install-sglang $(VENV))" PYTHONPATH=e2e:e2e/sglang $(BIN)/python benchmarks/sglang_backends.py

# The same with SGLANG_PYTHON and GPU_OPTIONS: make bench-sglang-gpu GPU_PYTHON=python3 SGLANG_PYTHON=/venv/bin/python
bench-sglang-gpu: $(if $(GPU_PYTHON),,install) ## compare the same on two GPUs in one run, also with SGLang's staging buffer
	$(or $(GPU_PYTHON),$(BIN)/python) benchmarks/sglang_on_gpus.py --json build/sglang-gpu.json $(GPU_OPTIONS)

reference: install ## regenerate the reference pages, the digest in the CRD and its copies
	$(BIN)/python -m longshore_agent.settings >docs/reference/settings.md
	$(BIN)/python -m longshore_agent.status.metrics >docs/reference/metrics.md
	$(BIN)/python tests/agent/fault_table.py >docs/reference/faults.md
	$(BIN)/python tests/repo/reference_pages.py
	$(BIN)/python -m longshore_operator.reference

# A dead link, or a page that Sphinx cannot read, is an error.
docs: install ## build the documentation as a site, build/docs/site/index.html
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraints requirements.lock --editable '.[docs]'
	$(BIN)/python -m sphinx --quiet --fresh-env --write-all --fail-on-warning --keep-going --conf-dir docs/site \
	  --doctree-dir build/docs/doctrees . build/docs/site

# make release VERSION=0.2.0 is a trial; TAG=yes commits and tags; see .ci/release
release: install ## set the version, date the changelog, and build wheel, sdist and chart into dist/
	.ci/release '$(VERSION)' $(if $(TAG),--tag)

lock: install ## pin the newest versions that pyproject.toml permits
	{ sed '/^[^#]/,$$d' requirements.lock; \
	  $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --upgrade $(LOCKED:%=--extra %) \
	    --no-emit-index-url --no-annotate --no-header pyproject.toml; } > requirements.lock.new
	mv requirements.lock.new requirements.lock
	{ sed '/^[^#]/,$$d' e2e/vllm/requirements.lock; \
	  $(BIN)/uv pip compile --quiet --python-version 3.11 --upgrade --override e2e/vllm/overrides.txt \
	    --no-emit-index-url --no-annotate --no-header e2e/vllm/requirements.in; } > e2e/vllm/requirements.lock.new
	mv e2e/vllm/requirements.lock.new e2e/vllm/requirements.lock
	{ sed '/^[^#]/,$$d' e2e/vllm/requirements-gpu.lock; \
	  $(BIN)/uv pip compile --quiet --python-version 3.12 --python-platform x86_64-manylinux_2_28 --upgrade \
	    --override e2e/vllm/overrides-gpu.txt --no-emit-index-url --no-annotate --no-header e2e/vllm/requirements-gpu.in; \
	  } > e2e/vllm/requirements-gpu.lock.new
	mv e2e/vllm/requirements-gpu.lock.new e2e/vllm/requirements-gpu.lock
	{ sed '/^[^#]/,$$d' e2e/sglang/requirements.lock; \
	  $(BIN)/uv pip compile --quiet --python-version 3.11 --upgrade --override e2e/sglang/overrides.txt \
	    --no-emit-index-url --no-annotate --no-header e2e/sglang/requirements.in; } > e2e/sglang/requirements.lock.new
	mv e2e/sglang/requirements.lock.new e2e/sglang/requirements.lock

clean: ## remove the virtual environment and all caches of the tree
	rm -rf $(VENV) .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
