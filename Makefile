# Everything a reader runs. `make` alone lists the targets.
#
# Targets make their own environment, .venv, on first use. With an active virtualenv or conda
# environment, or with PYTHON=/path/to/python, that one is used instead (see src/repro/environment.py).

.DEFAULT_GOAL := help
SHELL := /bin/sh
PROFILE ?= tiny

# ---- what the programs see --------------------------------------------------------------------
# The folder of this Makefile never goes on Python's path: Transformers tries `import kernels`, a
# package of the Hugging Face hub, and would find our folder of that name.
export PYTHONSAFEPATH := 1
export PYTHONHASHSEED := 0
export PYTHONUNBUFFERED := 1
# Compiled files are kept: without them every kernel spends seconds on importing.
export PYTHONDONTWRITEBYTECODE :=
# Sums depend on the number of threads; records must not depend on the machine.
export OMP_NUM_THREADS ?= 2
export MKL_NUM_THREADS ?= 2
# Waiting threads sleep: spinning ones cost a factor of five as soon as anything else runs.
export OMP_WAIT_POLICY ?= PASSIVE
export TOKENIZERS_PARALLELISM ?= false
# Bars and notices would change stored outputs from run to run.
export HF_HUB_DISABLE_PROGRESS_BARS := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export TRANSFORMERS_NO_ADVISORY_WARNINGS := 1
# In a notebook's kernel tqdm asks for a widget package that draws those bars.
export PYTHONWARNINGS := ignore:IProgress not found
# Nothing reaches for a network unless it is asked to.
ifeq ($(SOURCE),hub)
export HF_HUB_OFFLINE ?= 0
else
export HF_HUB_OFFLINE ?= 1
endif

# ---- which Python ------------------------------------------------------------------------------
VENV := .venv
ifdef PYTHON
  ACTIVE := $(PYTHON)
else ifneq ($(VIRTUAL_ENV),)
  ACTIVE := $(VIRTUAL_ENV)/bin/python
else ifneq ($(CONDA_PREFIX),)
  # conda's own "base" is often active unasked, and not a place to install into.
  ifneq ($(CONDA_DEFAULT_ENV),base)
    ACTIVE := $(CONDA_PREFIX)/bin/python
  endif
endif
ifdef ACTIVE
  PY := $(ACTIVE)
else
  PY := $(VENV)/bin/python
  STAMP := $(VENV)/ready-$(shell cat requirements.lock pyproject.toml | cksum | cut -d ' ' -f 1)
endif
RUN := $(PY) -m repro
FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)
COMMON := --profile $(PROFILE)
WORK := $(COMMON) $(if $(SOURCE),--source $(SOURCE)) $(if $(FORCE),--force)

.NOTPARALLEL:
.PHONY: help reproduce test unit notebooks lab figures report verify refresh status doctor \
        lint format typecheck lock clean clean-cache env

help:  ## this list (times: 2 CPU cores, environment ready)
	@echo "make TARGET [PROFILE=tiny|gpu] [SOURCE=embedded|folder|hub] [FORCE=1] [PYTHON=...]"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# ---- the work ----------------------------------------------------------------------------------
reproduce: env  ## measure and draw: notebooks, records, figures, report (minutes; unchanged: < 1 min)
	@$(RUN) reproduce $(WORK)

test: unit notebooks  ## unit tests, then strict check of every notebook (< 10 min)

unit: env  ## unit tests only (minutes)
	$(PY) -m pytest tests $(PYTEST_WORKERS) $(PYTEST_ARGS)

notebooks: env  ## run every notebook and compare with its stored outputs (minutes)
	$(PY) -m pytest --nbval --nbval-current-env \
	  --nbval-sanitize-with tests/nbval_sanitize.cfg -p no:xdist -p no:cacheprovider notebooks

lab: env  ## open the notebooks in JupyterLab (seconds)
	$(PY) -m jupyter lab --notebook-dir=. $(AS_ROOT) notebooks/00_start.ipynb

figures: env  ## draw every figure from the records (< 1 min)
	@$(RUN) figures $(COMMON)

report: env  ## write figures/report.html from the records (seconds)
	@$(RUN) report $(COMMON)

verify: env  ## check the papers' claims against the records (seconds)
	@$(RUN) verify $(COMMON)

refresh: env  ## execute notebooks in place; the only way their outputs change (minutes)
	@$(RUN) refresh $(NOTEBOOKS)

status: env  ## what is done and what would run (seconds)
	@$(RUN) status $(COMMON)

doctor: env  ## what this machine can do and what is missing (seconds)
	@$(RUN) doctor

# ---- for developers ----------------------------------------------------------------------------
lint: env  ## ruff: rules and format (seconds)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: env  ## ruff: rewrite in the project's format (seconds)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

typecheck: env  ## mypy on src/repro and kernels (1 min, then seconds)
	$(PY) -m mypy

lock: env  ## resolve requirements.lock and environment.yml anew from pyproject.toml (2 min)
	$(PY) -m repro.lockfile $(if $(TORCH),--torch $(TORCH)) $(if $(TRITON),--triton $(TRITON))

clean:  ## remove executed copies and caches; records, figures, models, .venv stay (seconds)
	rm -rf .venv-setup.log data/runs build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf src/*.egg-info

clean-cache:  ## remove data/cache, which is made again when needed (seconds)
	rm -rf data/cache

# ---- the environment ---------------------------------------------------------------------------
ifdef ACTIVE
env:
	@$(ACTIVE) -c '$(FITS)' 2>/dev/null || { \
	  echo "error: $(ACTIVE) is no Python 3.11 to 3.13: activate another environment or name one with PYTHON=..." >&2; \
	  exit 2; }
	@PYTHONPATH=src $(ACTIVE) -m repro.environment --active $(ACTIVE)
else
env: $(STAMP)

$(STAMP):
	@for candidate in python3 python python3.12 python3.13 python3.11; do \
	  if $$candidate -c '$(FITS)' 2>/dev/null; then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "error: no Python 3.11 to 3.13 on PATH: install one, name one with make PYTHON=..., or use conda (environment.yml)" >&2; \
	  exit 2; \
	fi; \
	PYTHONPATH=src $$found -m repro.environment --stamp $@
endif
