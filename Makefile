# `make demo` and `make test` do all the set-up on a fresh machine: python3, pip, make, git and gcc are enough.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test test-slow check completions results gpu gpu-dry harness wheel docs clean
.DELETE_ON_ERROR:

setup: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@# the oracle of the scaling rules; without its requirements, since torchvision has no build for this torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps mup
	touch $@

demo: setup  ## the main job: six questions on real data, one page of answers
	$(BIN)/sparing demo

check: setup  ## format, lint, types and floors
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

PYTEST := $(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder

test: check  ## what must hold before a commit (ROOM=layersample: one package, its contracts and its slow tests)
	$(PYTEST) $(if $(ROOM),tests/house $(wildcard tests/$(ROOM) tests/idioms/$(ROOM) tests/jobs/$(ROOM)),-m "not slow")

test-slow: setup  ## the tests of more than ten seconds: many processes, whole commands
	$(PYTEST) -m slow

harness: .venv/.harness  ## the tests of `sparing evaluate` with lm-evaluation-harness, which `make setup` leaves out
	$(BIN)/python -m pytest -n 3 tests/jobs/evaluate

.venv/.harness: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,eval]'
	touch $@

wheel:  ## build the wheel, install it into an empty environment and use it there
	PYTHON=$(PYTHON) .ci/wheel

completions: setup  ## what shells complete, after a setting was added or renamed
	$(BIN)/python -c "from sparing.cli import write_completions; write_completions()"

results: setup  ## rebuild tables and pictures of docs/results from the committed JSON; RUN=1 measures again (ONLY=NAME: a part)
	$(BIN)/python -m benchmarks.results $(if $(RUN),--run) $(if $(ONLY),--only $(ONLY))

# without set-up: constraints.txt may pin a torch without CUDA, so the machine's own Python runs it
GPU_PYTHON ?= python3

gpu:  ## everything that needs a CUDA device, in parts, within MINUTES=40; goes on if run again (ONLY="layers scaling": parts)
	PYTHONPATH=src:. $(GPU_PYTHON) -m benchmarks.gpu $(if $(DRY),--dry) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(ONLY),--only $(ONLY))

gpu-dry: setup  ## one tiny cell of each sort of every part of `make gpu`, on the CPU
	PYTHONPATH=src:. $(BIN)/python -m benchmarks.gpu --dry

docs: .venv/.docs  ## the documentation as a site: open site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

.venv/.docs: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	touch $@

clean:
	rm -rf site .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
