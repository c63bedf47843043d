# Two commands: `make train` and `make test`. Each makes the environment if there is none.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: train test test-all lint clean

train: $(VENV)/installed
	$(RUN) examples/train_lm.py $(ARGS)

test: lint
	$(RUN) -m pytest -n 2 $(ARGS)

test-all: lint
	$(RUN) -m pytest -n 2 -m "slow or not slow" $(ARGS)

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis
