# Two commands do everything on a machine with Python 3.10 or newer:
#   make demo    a virtual environment, the install, and the main job
#   make test    the same environment, and the whole test suite
# PYTHON=python3.12 chooses the interpreter; ARGS="-k fence -x" goes to pytest or to the demo.

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
# Tests run side by side on this many processes; WORKERS=0 runs them one after the other.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(4, os.cpu_count() or 1))' 2>/dev/null)

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint lint-ruff lint-format lint-types lint-imports install clean
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

demo: $(STAMP)
	@$(BIN)/python examples/demo.py $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

lint: lint-ruff lint-format lint-types lint-imports

lint-ruff: $(STAMP)
	@$(BIN)/ruff check .

lint-format: $(STAMP)
	@$(BIN)/ruff format --check .

lint-types: $(STAMP)
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

lint-imports: $(STAMP)
	@$(BIN)/lint-imports --no-cache

install: $(STAMP)

# The waiting line is for a terminal only, and is wiped when the install is done.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "make: $(PYTHON) is missing or older than 3.10; name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: $(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@[ ! -t 2 ] || printf 'Installing into $(VENV) (once; the download of torch takes a minute or more) ...' >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@log=$$(mktemp) && { $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[dev]' >"$$log" 2>&1 \
	  || { status=$$?; printf '\n' >&2; cat "$$log" >&2; rm -f "$$log"; exit $$status; }; rm -f "$$log"; }
	@[ ! -t 2 ] || printf '\r\033[K' >&2
	@touch $@

clean:
	rm -rf $(VENV) build dist demo-run .pytest_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
