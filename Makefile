# make serve, make test: each complete on a machine with Python 3.11 or newer (with venv), git and make.
# Everything is installed into .venv; models go to the user's cache.

MODEL ?= smollm2-135m
PORT ?= 8000
ARGS ?=
# The first Python that is new enough; to use another: make PYTHON=/path/to/python
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := cuengine model api tests bench deploy

.PHONY: help serve test lint accept clean
.DEFAULT_GOAL := help

help:
	@echo "make serve    install, fetch the model, serve it at http://localhost:$(PORT)"
	@echo "              MODEL=folder, .gguf file or name   PORT=8000   ARGS='--max-num-seqs 16'"
	@echo "make test     install, run the tests            ARGS='tests/unit -k block'"
	@echo "make lint     ruff, ruff format, mypy --strict"
	@echo "make accept   the long acceptance runs           ARGS='soak size' for some of them"
	@echo "make clean    remove .venv and what builds left"

serve: .venv/cpu
	$(BIN)/cuengine pull "$(MODEL)"
	$(BIN)/cuengine serve "$(MODEL)" --port $(PORT) $(ARGS)

# Two processes, one thread each: parallel loops of both on two cores would wait for each other.
test: export NUMBA_NUM_THREADS = 1
test: export OPENBLAS_NUM_THREADS = 1
test: .venv/test
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

# mypy does not follow the mapping of model/ and api/ into cuengine: it reads a regular install.
lint: .venv/test
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	rm -rf build
	$(PIP) install -q --no-deps --no-build-isolation --target build/lint .
	cd build/lint && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p cuengine

accept: .venv/test .venv/clients .venv/ray
	$(BIN)/python bench/accept.py $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +

.venv/cpu .venv/test .venv/clients .venv/ray: .venv/created pyproject.toml
	@echo "Installing cuengine[$(@F)] into .venv (a minute or so the first time)"
	$(PIP) install -q --prefer-binary -e '.[$(@F)]'
	@touch $@

.venv/created:
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo \
	"cuengine needs Python 3.11 or newer, and $(or $(PYTHON),python3) is not. Install one, or name it: make PYTHON=/path/to/python3"; \
	exit 1; } >&2
	@'$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null || { echo \
	"$(PYTHON) cannot make virtual environments: install its venv module (Debian, Ubuntu: apt-get install python3-venv)"; \
	exit 1; } >&2
	$(PYTHON) -m venv --clear .venv
	@touch $@
