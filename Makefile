# Two commands, each complete on a fresh machine with Python 3.10+ and pip; what is there already is skipped.
#   make bench    environment, models, data, then the speed and perplexity benchmark of the default pair
#   make test     environment, then the tests (with the default pair's models and data where they can be had)
# And one for later:
#   make plots    the pictures of plots/ from results.jsonl
# Variables: PYTHON=python3.12   BENCH_FLAGS="--maxLen 100"   DATA_FLAGS="--from ../shared/data"

PYTHON ?= python3
BENCH_FLAGS ?= --maxLen 128 --n-prompts 4 --ppl-tokens 6000
DATA_FLAGS ?=
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check

.PHONY: bench test plots models data

bench: models data
	@echo "== benchmark: rows are appended to results.txt and results.jsonl one by one"
	$(PY) test.py --pair auto $(BENCH_FLAGS)

# Without a network the tests of the real pair are left out, by name; all others run.
test: $(VENV)/installed-test
	@echo "== models and data for the tests"
	@$(PY) downloadModel.py smollm2 || echo "== going on without the real pair"
	@$(PY) downloadData.py $(DATA_FLAGS) || echo "== going on without the real texts"
	@echo "== tests"
	@$(PY) -m pytest -q

plots: $(VENV)/installed
	@echo "== plots: from results.jsonl into plots/"
	@$(PY) plotResults.py

models: $(VENV)/installed
	@echo "== models: into models/"
	@$(PY) downloadModel.py

data: $(VENV)/installed
	@echo "== data: into datasets/"
	@$(PY) downloadData.py $(DATA_FLAGS)

# The stamps are younger than the requirements they were made from; an interrupted installation leaves none.
$(VENV)/installed: requirements.txt | $(PY)
	@echo "== packages: requirements.txt into $(VENV) (minutes the first time)"
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip --upgrade
	@$(PIP) -r requirements.txt
	@touch $@

$(VENV)/installed-test: requirements-test.txt $(VENV)/installed
	@echo "== packages: requirements-test.txt into $(VENV)"
	@$(PIP) -r requirements-test.txt
	@touch $@

$(PY):
	@echo "== environment: $(VENV) from $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "$(PYTHON) is not Python 3.10 or newer: make PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make environments: install its venv package (python3-venv)" >&2; exit 2; }
	@$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); exit 2; }
