# One word per task; `make demo` and `make test` need nothing but a Python.
#   PYTHON    interpreter for the virtual environment, 3.11 or newer
#   PIP_ARGS  more arguments for pip, e.g. an index with CPU-only builds of torch
#   ARGS      more arguments for pytest, e.g. ARGS="-k cache"
# Plain make: no GNU extensions, so that the make of macOS and of the BSDs reads it too.

PYTHON ?= python3
PIP_ARGS ?=
ARGS ?=
VENV = .venv
PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
# One thread per process: results are bit-exact and two test processes do not fight.
ONE_THREAD = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
PYTEST = $(ONE_THREAD) $(VENV)/bin/python -m pytest $(ARGS)

help:
	@echo "make demo           train, sweep and report on this machine (8 to 12 minutes)"
	@echo "make test           the test suite"
	@echo "make test-slow      soak, kill and long property runs"
	@echo "make test-compat    the suite with the lowest and the highest allowed dependencies"
	@echo "make check-package  build, install elsewhere, import everything, run the README"
	@echo "make numerics       which numbers a change moved, against tools/numerics.json (a minute)"
	@echo "make lint           ruff"

demo: $(VENV)/.installed
	OMP_WAIT_POLICY=passive $(VENV)/bin/depthdial demo

test: $(VENV)/.installed-dev
	$(PYTEST) -n 2 --dist loadfile -m "not slow and not gpu and not compat"

test-slow: $(VENV)/.installed-dev
	$(PYTEST) -m slow

test-compat: $(VENV)/.installed-dev
	$(VENV)/bin/python tools/compat.py --pip-args="$(PIP_ARGS)"

check-package: $(VENV)/.installed-dev
	$(VENV)/bin/python tools/check_package.py --pip-args="$(PIP_ARGS)"

numerics: $(VENV)/.installed-dev
	$(VENV)/bin/python tools/numerics.py

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

$(VENV)/bin/python:
	$(PYTHON) -c "import sys; sys.version_info >= (3, 11) or sys.exit('Depthdial needs Python 3.11 or newer; this is ' + sys.version.split()[0] + '. Try: make PYTHON=python3.12')"
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# Stamps: an install runs again only after pyproject.toml or constraints.txt changed.
$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) install $(PIP_ARGS) -c constraints.txt -e ".[train,report]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) install $(PIP_ARGS) -c constraints.txt -e ".[train,report,dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist

.PHONY: help demo test test-slow test-compat check-package numerics lint clean
