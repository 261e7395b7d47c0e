# The two commands that matter: `make reproduce` and `make test`. `make` alone lists all of them.
# Written for POSIX sh and GNU make 3.81, the one that macOS ships.

PROFILE   ?= paper
ENGINE    ?= loky
SCHEDULER ?=
RESULTS   ?= data/results/$(PROFILE)
FIGURES   ?= figures/$(PROFILE)
SCRATCH   ?= data/scratch
JOBS      ?= 2
TORCH_INDEX ?=
PYTHON    ?=
ONLY      ?=

# A mistyped knob would else be ignored, and ten minutes later another profile be done.
KNOBS := PROFILE ENGINE SCHEDULER RESULTS FIGURES SCRATCH JOBS TORCH_INDEX PYTHON ONLY
UNKNOWN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),\
  $(filter-out $(KNOBS) MAKE%,$(name))))
ifneq ($(strip $(UNKNOWN)),)
$(error Unknown knob $(strip $(UNKNOWN)); the knobs are $(KNOBS). Correct its name)
endif

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help setup reproduce smoke test lint lab report bench soak reference readme clean outdated

PY := .venv/bin/python
# The stamp holds the path of the project: a copied folder would else run the code of the original.
READY := .venv/ready
OUTDATED := $(shell $(PY) -c '' 2>/dev/null && [ "`cat $(READY) 2>/dev/null`" = "$(CURDIR)" ] || echo outdated)

help:  ## print this help
	@echo 'Usage: make TARGET [KNOB=value ...]'
	@echo
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo 'Knobs (what they are now):'
	@echo '  PROFILE=$(PROFILE)    smoke (2 minutes), paper (10 minutes) or full (a night)'
	@echo '  SCRATCH=$(SCRATCH)    a folder on the disk that is being tested'
	@echo '  RESULTS=$(RESULTS)    tables and executed notebooks'
	@echo '  FIGURES=$(FIGURES)    figures and printed tables'
	@echo '  JOBS=$(JOBS)    worker processes; the results do not depend on it'
	@echo '  ENGINE=$(ENGINE)    loky (this machine) or dask (a cluster, with SCHEDULER)'
	@echo '  SCHEDULER=$(SCHEDULER)    address of a Dask scheduler, tcp://host:port'
	@echo '  PYTHON=$(PYTHON)    the Python (3.11 or newer) that .venv is made from'
	@echo '  ONLY=$(ONLY)    what `make bench` measures, for example power; all if it is empty'
	@echo '  TORCH_INDEX=$(TORCH_INDEX)    a package index for torch alone, for example a CPU-only one'

setup: $(READY)  ## make .venv with the exact versions of requirements.lock
	@echo '.venv is ready.'

$(READY): requirements.lock pyproject.toml $(OUTDATED)
	@set -e; \
	if [ -n '$(PYTHON)' ]; then candidates='$(PYTHON)'; \
	else candidates='python3 python3.13 python3.12 python3.11 python'; fi; \
	found=; python=; \
	for name in $$candidates; do \
	  version=`"$$name" -c 'import platform; print(platform.python_version())' 2>/dev/null` || continue; \
	  found="$$found $$name is $$version;"; \
	  if "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then python=$$name; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "No Python was found (looked for: $$candidates). Install Python 3.11 or newer, or name one: make setup PYTHON=/path/to/python3" >&2; exit 1; fi; \
	if [ -z "$$python" ]; then \
	  echo "Python 3.11 or newer is needed, but$$found install a newer one, or name it: make setup PYTHON=/path/to/python3" >&2; exit 1; fi; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "$$python cannot make virtual environments (no ensurepip). On Debian or Ubuntu: apt install python3-venv" >&2; exit 1; fi; \
	if [ -n '$(PYTHON)' ] || ! $(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	    || ! $(PY) -m pip --version >/dev/null 2>&1; then \
	  echo "Making .venv with $$python ($$version) ..."; \
	  "$$python" -m venv --clear .venv; fi; \
	rm -f $(READY); \
	if [ -n '$(TORCH_INDEX)' ]; then \
	  torch=`grep '^torch==' requirements.lock`; \
	  echo "Installing $$torch from $(TORCH_INDEX) ..."; \
	  $(PY) -m pip install --disable-pip-version-check --no-deps --index-url '$(TORCH_INDEX)' "$$torch"; fi; \
	echo 'Installing the versions of requirements.lock (several minutes the first time) ...'; \
	$(PY) -m pip install --disable-pip-version-check -r requirements.lock || { \
	  echo 'The installation stopped (see the lines above). Once that is solved, run the same make again.' >&2; exit 1; }; \
	echo 'Installing ckptlib itself, editable ...'; \
	$(PY) -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .; \
	printf '%s\n' "$(CURDIR)" > $(READY)

reproduce: $(READY)  ## run every notebook of PROFILE that is not up to date: tables, figures, claims
	@$(PY) -m ckptlib.reproduce --profile '$(PROFILE)' --results '$(RESULTS)' --figures '$(FIGURES)' \
	  --scratch '$(SCRATCH)' --jobs '$(JOBS)' --engine '$(ENGINE)' --scheduler '$(SCHEDULER)'

smoke:  ## the same in two minutes, with few trials (PROFILE=smoke)
	@$(MAKE) --no-print-directory reproduce PROFILE=smoke

test: lint  ## lint, unit and property tests, and every notebook at smoke size
	@$(PY) -m pytest -n '$(JOBS)' --dist worksteal

lint: $(READY)  ## check the code and the notebooks with ruff
	@$(PY) -m ruff check .

# In a container one is root, which Jupyter refuses by default; here only this machine can connect.
AS_ROOT := $(shell [ "`id -u`" = 0 ] && echo --allow-root)

lab: $(READY)  ## open JupyterLab on this machine only, behind a token
	@$(PY) -m jupyterlab $(AS_ROOT) --ServerApp.ip=127.0.0.1 --ServerApp.root_dir='$(CURDIR)' \
	  --LabApp.default_url=/lab/tree/notebooks/00_tour.ipynb

report: $(READY)  ## one page with the claims and all executed notebooks, readable offline
	@$(PY) -m ckptlib.report --results '$(RESULTS)' --figures '$(FIGURES)' --output '$(RESULTS)/report.html'

bench: $(READY)  ## measure speeds on this machine, beside a calibration of the same minutes
	@$(PY) -m ckptlib.bench --only '$(ONLY)' --scratch '$(SCRATCH)' --jobs '$(JOBS)'

soak: $(READY)  ## have 8 writers and 4 readers contend for one store, for a minute
	@$(PY) -m ckptlib.soak --seconds 60 --scratch '$(SCRATCH)'

reference:  ## renew the committed run of the paper profile, and the numbers in README
	rm -rf data/reference figures/reference
	@$(MAKE) --no-print-directory reproduce PROFILE=paper RESULTS=data/reference FIGURES=figures/reference
	@$(MAKE) --no-print-directory readme

readme: $(READY)  ## write the numbers of the reference run into README.md
	@$(PY) -m ckptlib.readme

clean:  ## remove results, figures and caches; .venv, the reference run and disks elsewhere stay
	rm -rf data/results data/scratch build *.egg-info .pytest_cache .ruff_cache .hypothesis
	@for folder in figures/*; do \
	  case $$folder in figures/reference|'figures/*') ;; *) echo "rm -rf $$folder"; rm -rf "$$folder";; esac; done
	@find . -name .venv -prune -o -name .git -prune -o \
	  \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -prune -exec rm -rf {} +
