# `make` lists what there is. Everything a target needs it sets up itself, and says so.

SHELL := /usr/bin/env bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
WHEELS ?= ../shared/wheels
UV_VERSION := 0.13.9
TORCH_VERSION := 2.13.0
export FINETUNE_CACHE ?= $(HOME)/.cache/finetune-operator
export PYTHONPATH := tests
# Tests start hundreds of processes: without bytecode on disk, each one compiles torch and MLflow again.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DATATROVE := build/datatrove
LM_EVAL := build/lm-eval
SOURCES := crds operator trainer_image tests

-include tests/lock.mk

# $(call timed,what,command): a header, the command, and how long it took. On failure, the command that repeats it.
define timed
@printf '\n== %s\n' '$(1)'; rm -f $(FAILED_TESTS); began=$$SECONDS; status=0; $(2) || status=$$?; \
printf '== %s: %s after %d s\n' '$(1)' "$$([ $$status = 0 ] && echo done || echo FAILED)" $$((SECONDS - began)); \
[ $$status = 0 ] || printf '== repeat with: make %s%s\n' '$@' "$$(cat $(FAILED_TESTS) 2>/dev/null)"; \
exit $$status
endef

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-24s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "  CLUSTER=local|kind|current chooses where demo and e2e run; the default is the first that can work."

# What each tier and the demo run, built before any of their time begins.
PROGRAMS_lint := helm-docs actionlint
PROGRAMS_unit := fake-gcs-server
PROGRAMS_trainer := versitygw fake-gcs-server
PROGRAMS_integration := kube kubectl helm registry kstatus argocd prometheus promtool
PROGRAMS_oldest := kube-oldest $(filter-out kube kubectl,$(PROGRAMS_integration))
PROGRAMS_e2e := $(PROGRAMS_demo) registry argocd
PROGRAMS_long := kube kubectl kueue
PROGRAMS_bench-operator := kube kubectl jobset
# A cluster that is made elsewhere brings its own Kubernetes.
PROGRAMS_demo := kubectl helm versitygw $(if $(filter local,$(or $(CLUSTER),$(if $(filter 0,$(shell id -u)),local))),kube pause networkpolicies)

.PHONY: programs
programs: ## Build the programs of all tiers: etcd, Kubernetes, Helm, Argo CD, ...
	@$(PYTHON) -m cluster.binaries

programs-%:
	$(call timed,programs,$(PYTHON) -m cluster.binaries $(or $(PROGRAMS_$*),$(error there is no tier $*)))

.PHONY: demo
demo: room ## Bring up a cluster, fine-tune a model on it with one manifest, and show the result
	@began=$$SECONDS; \
	$(PYTHON) -m cluster.binaries $(PROGRAMS_demo) & builder=$$!; trap 'kill $$builder 2>/dev/null || true' EXIT INT TERM; \
	$(MAKE) --no-print-directory --silent venv && $(BIN)/python -m demo up --environment-seconds $$((SECONDS - began))

.PHONY: room
room:
	@if $(PYTHON) -c '' 2>/dev/null; then $(PYTHON) -m demo.room; fi

.PHONY: kubeconfig
kubeconfig: ## Print the path of the demo's kubeconfig: export KUBECONFIG=$$(make kubeconfig)
	@if [ -x $(BIN)/python ]; then $(BIN)/python -m cluster kubeconfig; \
	else echo "the demo is not up: \`make demo\` brings it up" >&2; exit 1; fi

.PHONY: cluster
cluster: venv ## Control a cluster: ARGS='up --name demo', status, images, 'node crash demo-2', down
	@$(BIN)/python -m cluster $(ARGS)

.PHONY: prune
prune: ## Remove the images that demo and tests built, and programs that are not in use; packages stay
	@if [ -x $(BIN)/python ]; then $(BIN)/python -m cluster prune; else echo "run \`make venv\` first" >&2; exit 1; fi

.PHONY: demo-down
demo-down: ## Take the demo away and leave the machine as it was
	@if [ -x $(BIN)/python ]; then $(BIN)/python -m demo down; else echo "there is no $(VENV): nothing of the demo runs"; fi

.PHONY: test
test: lint test-unit test-trainer test-integration test-e2e ## Run every tier of tests
	@printf '\n== all tiers passed\n'

# What the plugin support.repeat writes when tests fail.
FAILED_TESTS = build/failed-tests/$@
# $(call RUN_TESTS,folder): PYTEST adds options; tests or files that it names are run instead of the folder.
RUN_TESTS = $(BIN)/python -m pytest $(1) -p support.repeat --failed-tests $(FAILED_TESTS) --durations 25
# A file of tests stays in one worker.
PARALLEL = --numprocesses $(1) --dist loadfile -p support.scheduling

.PHONY: test-unit
test-unit: venv classes programs-unit ## Run the unit tests: no root, no cluster
	$(call timed,unit tests,$(call RUN_TESTS,tests/unit) $(call PARALLEL,2) $(PYTEST))

.PHONY: test-trainer
test-trainer: venv compiler programs-trainer ## Run the trainer's heavy tests: many ranks, compiled layers, whole runs
	$(call timed,trainer tests,$(call RUN_TESTS,tests/trainer) $(call PARALLEL,2) $(PYTEST))

.PHONY: test-integration
test-integration: venv jars classes programs-integration ## Run the operator against a real API server and MLflow server
	$(call timed,integration tests,$(call RUN_TESTS,tests/integration) $(call PARALLEL,4) $(PYTEST))

.PHONY: test-integration-oldest
test-integration-oldest: venv jars programs-oldest ## Run the integration tests on the oldest Kubernetes that is supported
	$(call timed,integration tests on Kubernetes 1.31,FINETUNE_KUBERNETES=1.31 $(call RUN_TESTS,tests/integration) $(call PARALLEL,4) $(PYTEST))

.PHONY: test-e2e
test-e2e: venv jars programs-e2e ## Run the chart and the images in a whole cluster
	$(call timed,end-to-end tests,$(call RUN_TESTS,tests/e2e) --capture=no --verbose $(PYTEST))

.PHONY: test-long
test-long: long-tests test-integration-oldest bench-prep bench-near bench-promotions bench-operator bench-trainer ## Run what is long by nature, before a release: CI does not

# NB: the limit is for one test.
.PHONY: long-tests
long-tests: venv compiler programs-long $(LM_EVAL)/.installed ## Run the long tests without the benchmarks: kills, outages, random sequences, all methods
	$(call timed,long tests,$(call RUN_TESTS,tests/long) --capture=no --verbose --timeout 14400 $(PYTEST))

# NB: it records which tests cover each mutant anew, since tests move.
.PHONY: mutants
mutants: venv classes compiler programs-unit programs-trainer ## Measure the power of the unit and trainer tests: MUTANTS='--only lived'
	$(call timed,mutants,$(BIN)/python -m long.mutants measure $(MUTANTS))

.PHONY: bench-trainer
bench-trainer: venv ## Measure the trainer beside a padded script and TRL
	$(call timed,benchmark of the trainer,$(BIN)/python -m bench.trainer $(BENCH))

.PHONY: bench-prep
bench-prep: venv $(DATATROVE)/.installed ## Measure the preparation beside the tutorial's way, datatrove and the tokenizer alone
	@trainer_image/jars.sh
	$(call timed,benchmark of the preparation,$(BIN)/python -m bench.prep $(BENCH))

.PHONY: bench-near
bench-near: venv ## Measure the removal of near duplicates on a labelled corpus: speed, precision and recall
	@trainer_image/jars.sh
	$(call timed,benchmark of near duplicates,$(BIN)/python -m bench.prep.near_duplicates $(BENCH))

# NB: an environment of its own, since datatrove needs an older xxhash.
$(DATATROVE)/.installed: tests/bench/prep/datatrove.txt | venv
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(DATATROVE)
	@$(BIN)/uv pip install --quiet --python $(DATATROVE)/bin/python --require-hashes --requirement $<
	@touch $@

# NB: an environment of its own: nothing of the product uses the harness.
$(LM_EVAL)/.installed: tests/long/trainer/lm_eval.txt | venv
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(LM_EVAL)
	@$(BIN)/uv pip install --quiet --python $(LM_EVAL)/bin/python --require-hashes --requirement $<
	@cd / && $(abspath $(BIN))/uv pip install --quiet --python $(abspath $(LM_EVAL))/bin/python $(TORCH) torch==$(TORCH_VERSION)
	@touch $@

.PHONY: bench-promotions
bench-promotions: venv programs-long ## Measure 500 promotions on one registry after a restart of the operator
	$(call timed,benchmark of promotions,$(BIN)/python -m bench.promotions $(BENCH))

.PHONY: bench-operator
bench-operator: venv programs-bench-operator ## Measure the operator beside JobSet: jobs a second, CPU time, memory, restarts
	$(call timed,benchmark of the operator,$(BIN)/python -m bench.operator $(BENCH))

.PHONY: bench-uploads
bench-uploads: venv ## Measure a model's way to the store of an MLflow server: through the server, and straight
	$(call timed,benchmark of uploads,$(BIN)/python -m bench.uploads $(BENCH))

# Packages whose locals have names of their own, see tests/support/shadowing.py.
UNSHADOWED := crds/finetune_crds operator/finetune_operator trainer_image/finetune_trainer

.PHONY: lint
lint: venv programs-lint ## Check style, types, layers, generated files, workflows, and the documentation
	$(call timed,ruff,$(BIN)/ruff check && $(BIN)/ruff format --check)
	$(call timed,shadowing,$(BIN)/python -m support.shadowing $(UNSHADOWED))
	$(call timed,docstrings,$(BIN)/python -m support.docstrings $(UNSHADOWED))
	$(call timed,mypy,$(BIN)/mypy $(SOURCES))
	$(call timed,layers,$(BIN)/lint-imports --no-cache)
	$(call timed,generated files,$(GENERATE) --check $(GENERATED) && $(README) --check)
	$(call timed,workflows,"$$($(PYTHON) -m cluster.binaries --path actionlint)" .github/workflows/*.yml)
	$(call timed,documentation,$(BUILD_DOCS))

GENERATE := $(BIN)/python -m finetune_crds
GENERATED := crds/manifests charts/finetune-operator/templates docs/reference
README := $(BIN)/python -m cluster readme

.PHONY: generate
generate: venv ## Write the CRD manifests, the reference pages and the chart's README from their sources
	@$(GENERATE) $(GENERATED)
	@$(README)

# A dead link or anchor is an error. The colors and the traceback of the builder hide what it says of one.
BUILD_DOCS := $(BIN)/zensical build --strict --clean 2>&1 | sed -e 's/\x1b\[[0-9;]*m//g' -e '/^Traceback/,$$d'

.PHONY: docs
docs: venv ## Build the documentation into build/site
	@$(BUILD_DOCS)
	@echo "open build/site/index.html"

.PHONY: docs-serve
docs-serve: venv ## Serve the documentation, and rebuild it while you write
	@$(BIN)/zensical serve

.PHONY: images
images: venv ## Build the operator, prep and trainer images
	@$(BIN)/python -m cluster images

# What images stand on, the CUDA version of the trainer's second image, and the platform of all nodes that run them.
BASE_IMAGE ?= docker.io/library/python:3.11-slim
CUDA ?= cu130
PLATFORM ?= linux/amd64

.PHONY: release
release: venv ## Build and push images and chart: REGISTRY=registry.example.com VERSION=0.2.0
	@$(BIN)/python -m cluster release --registry '$(REGISTRY)' --version '$(VERSION)' --base '$(BASE_IMAGE)' --cuda '$(CUDA)' \
	  --platform '$(PLATFORM)'

.PHONY: venv
venv: $(STAMP) ## Create the virtual environment that everything here runs in

TORCH := $(if $(wildcard $(WHEELS)),--find-links $(abspath $(WHEELS)),--torch-backend=cpu)

$(STAMP): tests/requirements.txt crds/pyproject.toml operator/pyproject.toml trainer_image/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null \
	  || { echo "Python 3.11 is needed and $(PYTHON) is none: install it, or say where it is with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(call install,python3-venv,Python cannot make virtual environments)
	@echo "== installing Python packages into $(VENV) (a few minutes the first time)" >&2
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@echo "   1 of 4: uv $(UV_VERSION), which installs the rest" >&2
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@echo "   2 of 4: the $$(grep -c == tests/requirements.txt) packages of tests/requirements.txt" >&2
	@$(UV) --requirement tests/requirements.txt
	@echo "   3 of 4: torch $(TORCH_VERSION)" >&2
	@# Not from here: pyproject.toml tells uv to leave torch out of what it resolves.
	@cd / && $(UV) $(TORCH) torch==$(TORCH_VERSION)
	@echo "   4 of 4: the operator, the trainer and the API of this repository" >&2
	@$(UV) --no-deps --editable crds --editable operator --editable trainer_image
	@touch $@

UV := $(abspath $(BIN))/uv pip install --quiet --python $(abspath $(BIN))/python

.PHONY: java
java:
	@java -version 2>&1 | grep -qE 'version "(17|21)' || $(call install,openjdk-17-jre-headless,Spark needs Java 17)

.PHONY: compiler
compiler:
	@command -v g++ >/dev/null || $(call install,g++,Compiled layers need a C++ compiler)

# $(call install,package,why): from Debian when we may, otherwise say what is missing.
define install
{ if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then echo "== $(2): installing $(1)" >&2; \
apt-get install --yes --quiet $(1) >/dev/null || { apt-get update --quiet >/dev/null; apt-get install --yes --quiet $(1) >/dev/null; }; \
else echo "$(2): install it (Debian and Ubuntu: $(1))" >&2; exit 1; fi; }
endef

.PHONY: clean
clean: ## Remove what was built here; the cache in FINETUNE_CACHE stays
	rm -rf $(VENV) .cache build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +
	find $(SOURCES) -name '*.egg-info' -prune -exec rm -rf {} +
