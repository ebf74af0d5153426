# Everything a fresh machine needs is set up by these two; Python 3.11 or newer and pip are enough.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test docs typecheck

demo: $(VENV)/.installed-demo
	$(RUN) -m fsdp_qlora.cli demo --output_dir demo_output

test: $(VENV)/.installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(RUN) -m pytest tests

docs: $(VENV)/.installed-docs
	$(RUN) -m mkdocs build --strict

typecheck: $(VENV)/.installed-dev
	$(RUN) -m mypy

$(VENV)/.installed-%: setup.cfg pyproject.toml constraints.txt scripts/install
	scripts/install $(VENV) $(PYTHON) $*
	touch $@
