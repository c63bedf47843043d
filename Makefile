# Two commands: `make train` and `make test`. Each makes the environment if there is none.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/installed

# The core of the tests: what is declared for the oldest and the newest versions.
CORE := $(addprefix tests/test_,aggregate compositions conservation errors failing_workers \
	interface local_gradients model_state stacked_gradients step_as_jitted \
	optax_contract packet reference_trajectories replicas train_step wire worker_axis checkpoint)
OLDEST := jax==0.10.2 jaxlib==0.10.2 optax==0.2.8 chex==0.1.90 numpy==2.0.0 flax==0.12.7 \
	orbax-checkpoint==0.12.0 scipy==1.14.0
# The newest JAX wants a newer Python than the oldest that we support; where it is found, it is used.
NEWEST_PYTHON ?= $(shell for p in python3.14 python3.13 python3.12 \
	$(wildcard $(HOME)/.pyenv/versions/3.1[2-9]*/bin/python); do \
	$$p -c "" 2>/dev/null && echo $$p && break; done)

.PHONY: train test test-all versions oldest newest lint docs notebooks accelerators clean

# JAX takes fresh memory for every step on CPUs; in large pages touching it costs a fraction.
train: export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
train: $(READY)
	$(RUN) examples/compare.py $(ARGS)

test: lint
	$(RUN) -m pytest -n 2 $(ARGS)

test-all: lint
	$(RUN) -m pytest -n 2 -m "slow or not slow" $(ARGS)

versions: oldest newest

oldest:
	$(call core_tests,$(PYTHON),$(OLDEST))

newest:
	$(call core_tests,$(or $(NEWEST_PYTHON),$(PYTHON)),)

define core_tests
	rm -rf .venv-$@
	$(1) -m venv .venv-$@
	.venv-$@/bin/python -m pip install --quiet --upgrade pip
	.venv-$@/bin/python -m pip install --quiet --editable '.[flax,checkpoint,core-test]' $(2)
	.venv-$@/bin/python -m pip list | grep -iE '^(jax|jaxlib|numpy|optax|chex|orbax-checkpoint) '
	.venv-$@/bin/python -m pytest -n 2 -o addopts=--import-mode=importlib -m "not slow" \
		$(addsuffix .py,$(CORE))
endef

# Compiles for chips that need not be here, as benchmarks/compile_only.py says.
accelerators: .venv-tpu/installed .venv-h100/installed
	.venv-tpu/bin/python benchmarks/compile_only.py tpu $(ARGS)
	.venv-h100/bin/python benchmarks/compile_only.py h100 $(ARGS)

.venv-tpu/installed: WHEELS := 'jax[tpu]==0.10.2'
.venv-h100/installed: WHEELS := 'jax==0.10.2' 'jax-cuda12-plugin[with-cuda]==0.10.2'
.venv-tpu/installed .venv-h100/installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	$(@D)/bin/python -m pip install --quiet $(WHEELS) absl-py --editable .
	touch $@

docs: $(READY)
	$(RUN) -m sphinx -W --keep-going -q -b html docs docs/_build
	@echo docs/_build/index.html

notebooks: $(READY)
	$(VENV)/bin/jupytext --to ipynb notebooks/*.py
	$(RUN) -m pytest -n 2 -m "slow or not slow" --overwrite notebooks

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(RUN)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --editable '.[test]'
	touch $@

clean:
	rm -rf .venv .venv-oldest .venv-newest .venv-tpu .venv-h100 .pytest_cache .ruff_cache .hypothesis \
		docs/_build
