# Two commands: `make train` and `make test`. Each makes the environment if there is none.
# With EXTRA=cuda or EXTRA=tpu the environment gets JAX for these accelerators: without, for CPUs.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/installed$(addprefix -,$(EXTRA))
COMMA := ,

# The core of the tests, for the oldest versions that pyproject.toml declares and the newest.
CORE := $(patsubst %,tests/%.py,test_aggregate test_compositions test_conservation test_errors \
	test_failing_workers test_interface test_local_gradients test_optax_contract \
	test_reference_trajectories test_replicas test_wire checkpoint/test_elastic compression/test_packet \
	parallel/test_gradients parallel/test_model_state parallel/test_stacked_gradients \
	parallel/test_step_as_jitted parallel/test_train_step parallel/test_worker_axis)
# The newest JAX wants a newer Python than the oldest that we support; where it is found, it is used.
NEWEST_PYTHON ?= $(shell for p in python3.14 python3.13 python3.12 \
	$(wildcard $(HOME)/.pyenv/versions/3.1[2-9]*/bin/python); do \
	$$p -c "" 2>/dev/null && echo $$p && break; done)

.PHONY: train test test-all torture chaos versions oldest newest lint docs notebooks accelerators release-check clean

# JAX takes fresh memory for every step on CPUs; in large pages touching it costs a fraction.
train: export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
train: $(READY)
	$(RUN) examples/compare.py $(ARGS)

test: lint
	$(RUN) -m pytest -n 2 $(ARGS)

test-all: lint
	$(RUN) -m pytest -n 2 -m "slow or not slow" $(ARGS)

# Everything that may go wrong, again and again: some minutes on two idle cores.
torture: $(READY)
	$(RUN) -m benchmarks.torture $(ARGS)

# A swarm of real processes, broken at random, over a folder, moto's S3 server and Azurite.
chaos: $(VENV)/chaos
	$(RUN) -m benchmarks.chaos --store folder $(ARGS)
	$(RUN) -m benchmarks.chaos --store s3 --delay 1 $(ARGS)
	$(RUN) -m benchmarks.chaos --store azure $(ARGS)

$(VENV)/chaos: $(READY)
	$(RUN) -m pip install --quiet --group chaos
	npm install --silent --no-save --prefix $(VENV)/azurite azurite@3
	touch $@

versions: oldest newest

oldest:
	$(call core_tests,$(PYTHON),lowest-direct)

newest:
	$(call core_tests,$(or $(NEWEST_PYTHON),$(PYTHON)),highest)

define core_tests
	rm -rf .venv-$@
	$(1) -m venv .venv-$@
	.venv-$@/bin/python -m pip install --quiet uv
	.venv-$@/bin/uv pip install --quiet --python .venv-$@ --resolution $(2) \
		--editable '.[flax,checkpoint,swarm]' --group core-test
	.venv-$@/bin/python -m pip list | grep -iE '^(jax|jaxlib|numpy|optax|chex|flax|orbax-checkpoint|scipy) '
	.venv-$@/bin/python -m pytest -n 2 -o addopts=--import-mode=append -m "not slow" \
		$(CORE)
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
	$(@D)/bin/python -m pip install --quiet $(WHEELS) absl-py --editable '.[flax]'
	touch $@

docs: $(READY)
	$(RUN) -m sphinx -W --keep-going -q -b html docs docs/_build
	@echo docs/_build/index.html

notebooks: $(READY)
	$(VENV)/bin/jupytext --to ipynb notebooks/*.py
	$(RUN) -m pytest -n 2 -m "slow or not slow" --overwrite notebooks

# Builds both distributions, checks their metadata, and trains with each in an empty environment.
release-check:
	rm -rf dist
	set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	environment() { $(PYTHON) -m venv "$$folder/$$1"; python="$$folder/$$1/bin/python"; }; \
	environment build; \
	"$$python" -m pip install --quiet build twine; \
	"$$python" -m build --outdir dist .; \
	"$$python" -m twine check --strict dist/*; \
	for file in dist/*.whl dist/*.tar.gz; do \
		environment "$$(basename "$$file")"; \
		"$$python" -m pip install --quiet "$$file"; \
		"$$python" -I tests/programs/train_installed.py "$$file"; \
	done

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(RUN)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --editable '.[examples$(addprefix $(COMMA),$(EXTRA))]' --group test
	touch $@

clean:
	rm -rf .venv .venv-oldest .venv-newest .venv-tpu .venv-h100 .venv-maxtext .venv-levanter \
		.pytest_cache .ruff_cache .hypothesis docs/_build dist
