# Thin on purpose: each line is something a person could type. `make help` lists the targets.

export PATH := $(CURDIR)/.venv/bin:$(PATH)

# Tests wait for half of their time: two of them for each of two processors.
PYTEST := ci/env pytest -n 4
PIP := .venv/bin/python -m pip install --quiet --disable-pip-version-check -c ci/constraints.txt
# What is installed comes beside the compiler: pip waits for the network, and has one processor.
BESIDE = $(MAKE) --no-print-directory $(if $(filter -j%,$(MAKEFLAGS)),,-j 3)
# The sources in place; they are compiled by .stamp-build alone.
EDITABLE := AQUEDUCT_COMPILE=0 $(PIP) --no-build-isolation -e
CYTHON := $(wildcard aqueduct/_speedups/*/*.pyx aqueduct/_speedups/*/*.pxd)
COMPILED := $(patsubst %.pyi,%,$(subst /,.,$(wildcard aqueduct/_speedups/*/*.pyi)))

.PHONY: help java demo test test-long bounds pysparks pythons fuzz requirements sabotage profiled \
	bench bench-spark bench-check docs wheel wheels lint lint-types lint-stubs format setup clean

help:           ## these lines
	@sed -nE 's/^([a-z-]+):.*## /\1\t/p' Makefile | expand -t 14

setup:          ## the virtual environment in .venv, with everything compiled
	@$(BESIDE) .venv/.stamp-deps .venv/.stamp-build

demo: .venv/.stamp-python ## a service scores flights inside Spark; SCHEME=tls, tcp or unix; ADDRESS of a running one
	@$(BESIDE) java .venv/.stamp-demo .venv/.stamp-build
	ci/env python -m spark_udfs.demo $(addprefix --scheme ,$(SCHEME)) $(addprefix --address ,$(ADDRESS))

test: lint .venv/spark.jsa ## lint, and every test that is not long; about 14 minutes
	$(PYTEST) -m "not long" tests

test-long: setup ## long tests, more examples, versions of what is installed, `make pythons`
	for program in chromium tshark zsh fish; do ci/system.sh $$program || true; done
	ci/env pytest -n 3 -m long tests
	ci/pandas.sh
	AQUEDUCT_EXAMPLES=400 $(PYTEST) -m "hypothesis and not long" tests/arrow
	ci/aioquic_versions.sh
	ci/lower_bounds.sh
	ci/pyspark_versions.sh
	ci/pythons.sh

bounds: setup   ## tests with the lowest and the other versions that pyproject.toml allows
	ci/aioquic_versions.sh
	ci/lower_bounds.sh

pysparks: setup ## a job of each kind with PySpark 4.0, 4.1, 4.2 and 4.3
	ci/pyspark_versions.sh

pythons:        ## most tests and a Spark job with other Pythons of Debian, as root; see ci/pythons.sh
	ci/pythons.sh

requirements: setup ## each requirement of docs/protocols with its tests
	ci/env python -m tests.requirements

sabotage: setup ## the core made wrong, a line at a time: tests must notice; ONLY='AQ-33' for one
	ci/env python -m tests.sabotage $(addprefix --only ,$(ONLY))

fuzz: setup     ## atheris, SECONDS=60; TARGET: one of TARGETS in tests/fuzz/__main__.py
	ci/fuzz.sh run $(or $(SECONDS),60) $(TARGET)

lint: lint-types lint-stubs ## ruff, mypy, cython-lint, and the stubs against the compiled modules

lint-types: setup
	ruff check --no-cache
	ruff format --check
	mypy

lint-stubs: setup
	cython-lint aqueduct
	stubtest --concise --mypy-config-file pyproject.toml $(COMPILED)

format: setup   ## what ruff can mend by itself
	ruff check --fix
	ruff format

bench: profiled ## modules, core, transfers (table and plot in benchmarks), memory under back pressure
	mkdir -p benchmarks/results
	ci/env pytest $(wildcard benchmarks/micro/bench_*.py) --benchmark-json benchmarks/results/modules.json
	ci/env python -m benchmarks.core --json benchmarks/results/core.json
	ci/env python -m benchmarks.channels --json benchmarks/results/channels.json
	ci/env python -m benchmarks.asyncio_overhead --json benchmarks/results/asyncio_overhead.json
	ci/env python -m benchmarks.many_connections --json benchmarks/results/many_connections.json
	ci/env python -m benchmarks.resume --json benchmarks/results/resume.json
	ci/env python -m benchmarks.loopback --json benchmarks/results/loopback.json
	ci/env python -m benchmarks.publish benchmarks/results/loopback.json
	ci/env python -m benchmarks.relayed --json benchmarks/results/relayed.json
	ci/env python -m benchmarks.reactivesocket --json benchmarks/results/reactivesocket.json
	ci/env python -m benchmarks.batching --json benchmarks/results/batching.json
	ci/env python -m benchmarks.backpressure --json benchmarks/results/backpressure.json
	ci/env python -m benchmarks.memory_budget --only sink,source,clients,threads \
		--json benchmarks/results/memory_budget.json

profiled: .venv/.stamp-profiled ## the compiled modules as in wheels, by what a training counted; 2 minutes

bench-spark: profiled ## jobs of Spark beside Flight and identity, with floors; ONLY=plain,tasks for some
	ci/env python -m benchmarks.spark --json benchmarks/results/spark.json $(addprefix --only ,$(ONLY))
	ci/env python -m benchmarks.spark.publish benchmarks/results/spark.json
	ci/env python -m benchmarks.check --only spark- benchmarks/results/spark.json

bench-check: bench bench-spark ## both, against benchmarks/floors.toml
	ci/env python -m benchmarks.check $(patsubst %,benchmarks/results/%.json,loopback core relayed spark)

wheel: setup    ## sdist, wheel from it, repaired, and tried in a fresh environment
	ci/wheel.sh

wheels: setup   ## the wheels of every supported Python, by cibuildwheel; ONLY='cp311-*', TESTS=compiled
	ci/wheels.sh '$(ONLY)' $(TESTS)

docs: .venv/.stamp-docs ## the docs site in build/site, with search; a broken link is an error
	ci/env python -m ci.docs_site

clean:          ## everything that is made, with the virtual environment
	rm -rf .venv build dist wheelhouse *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f aqueduct/_speedups/*.so
	rm -f $(foreach kind,so c html,aqueduct/_speedups/*/*.$(kind))

.venv/.stamp-python:
	"$$(ci/system.sh python)" -m venv .venv
	touch $@

# What compiles; the rest is installed meanwhile.
.venv/.stamp-tools: ci/constraints.txt | .venv/.stamp-python
	$(PIP) pip
	$(PIP) cython setuptools
	touch $@

.venv/.stamp-deps: pyproject.toml ci/constraints.txt | .venv/.stamp-tools
	$(PIP) --group build --group lint --group release
	$(EDITABLE) '.[spark,demo,test,bench,connect,postgres,telemetry]'
	touch $@ .venv/.stamp-demo

# Less than .stamp-deps has; where that is there, so is this.
.venv/.stamp-demo: pyproject.toml ci/constraints.txt | .venv/.stamp-tools
	$(EDITABLE) '.[demo]'
	touch $@

java: .venv/.stamp-python
	@ci/system.sh java >/dev/null

.venv/.stamp-docs: .venv/.stamp-deps .venv/.stamp-build
	$(PIP) --group docs
	touch $@

# What Spark's Java loads, for the many that tests start.
.venv/spark.jsa: ci/spark_cds.py | setup
	ci/env python ci/spark_cds.py $@

.venv/.stamp-build: setup.py $(CYTHON) | .venv/.stamp-tools
	.venv/bin/python setup.py --quiet build_ext --inplace
	touch $@

.venv/.stamp-profiled: .venv/.stamp-build ci/pgo_training.py
	AQUEDUCT_PGO=1 .venv/bin/python setup.py --quiet build_ext --inplace
	touch $@
