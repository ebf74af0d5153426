# Everything a fresh machine needs is set up by these two; Python 3.11 or newer and pip are enough.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

# A test file stays in one process: its tests share models. Long files come first.
SPREAD := --numprocesses logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-all test-rest test-exhaustive docs typecheck

demo: $(VENV)/.installed-demo
	$(RUN) -m fsdp_qlora.cli demo --output_dir demo_output

test: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(RUN) -m pytest tests $(SPREAD)

# What starts slowly (chaos, launchers, wheels, the site, types), and more cases of what `make test` runs.
test-rest: $(VENV)/.installed-dev
	$(RUN) -m pytest tests $(SPREAD) -m "slow and not exhaustive and not ray and not schedulers and not docker and not browser and not pyright"

# All remaining cases: the whole matrix, every family on two ranks, other numbers of ranks.
test-exhaustive: $(VENV)/.installed-dev
	$(RUN) -m pytest tests $(SPREAD) -m "exhaustive and not ray and not schedulers and not docker and not browser and not pyright"

test-all: test test-rest test-exhaustive

docs: $(VENV)/.installed-docs
	$(RUN) -m mkdocs build --strict

typecheck: $(VENV)/.installed-dev
	$(RUN) -m mypy

$(VENV)/.installed-%: setup.cfg pyproject.toml constraints.txt scripts/install
	scripts/install $(VENV) $(PYTHON) $*
	touch $@
