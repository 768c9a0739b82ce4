# The commands of a checkout; `make help` lists them.
# Each makes its own environment in .venv: Python, make and a package registry are all it needs.

PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/.installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Where it is set, each of a hundred processes of the tests would compile Transformers anew, half a minute each: uv
# leaves packages uncompiled.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help finetune loops memory docs test test-cpus test-versions test-gpu-shapes bench-host-gpu exhaustive outside faults release tables lint clean

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20
	@echo '  Options: ARGS="..." is passed on, PYTHON=python3.12 makes the environment with that Python.'

# CPU threads that wait for each other look GOMP_SPINCOUNT times before they sleep. With the default of hundreds of
# thousands, a step takes up to ten times as long as soon as another program wants a core.
finetune: $(INSTALLED) ## fine-tune a small GPT-2 in FP16, two minutes on two cores (ARGS="--help" lists every option)
	@GOMP_SPINCOUNT=$${GOMP_SPINCOUNT:-3000} $(BIN)/python recipes/finetune_gpt2.py $(ARGS)

loops: $(INSTALLED) ## the loops of the tutorials, with torch.amp and with hf_mp (ARGS="--scale small" takes seconds)
	@GOMP_SPINCOUNT=$${GOMP_SPINCOUNT:-3000} $(BIN)/python recipes/plain_loops.py $(ARGS)

memory: $(INSTALLED) ## show what GPT-2 takes in memory (ARGS="--help")
	@$(BIN)/hf-mp memory gpt2 --train --gpu 24GiB $(ARGS)

# The variable silences a notice about the end of MkDocs' support, which comes at each build.
docs: $(INSTALLED) ## build the documentation site in site/ (python -m http.server -d site shows it)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

# One thread a worker: with more, tiny models spend their time waiting for threads. A file is one worker's, whose
# tests share trainings and launched processes.
test: $(INSTALLED) ## run the tests (ARGS="tests/test_cli.py" runs those of one file)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not exhaustive and not outside" $(ARGS)

# Kinds of CPU below this machine's own, which torch's kernels and oneDNN play when they are told to: what each of them
# may use, and an instruction set of the next kind, without which the kind is this machine's own. SIGILL ends the tests
# of a kind above it.
CPU_KINDS := avx2/AVX2/avx512dq avx512/AVX512_CORE/avx512_bf16 avx512/AVX512_CORE_BF16/amx_bf16
CPUINFO := /proc/cpuinfo
# Those that multiply in 16 bits, or compare what a kernel of torch's for a CPU computes.
CPU_TESTS := $(addprefix tests/,casting conformance diagnostics integrations kernels models step weights third_party \
  test_compute_dtypes.py test_limits.py trainer/test_healing.py trainer/test_log_probabilities.py)
run_cpu_tests = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile \
  -m "not slow and not exhaustive and not outside" $(CPU_TESTS) $(ARGS)

test-cpus: $(INSTALLED) ## run the tests that depend on the CPU as each kind of CPU that this machine can play
	@failed=; for kind in $(CPU_KINDS); do \
	  set -- $$(echo "$$kind" | tr / ' '); \
	  grep -qsw "$$3" $(CPUINFO) || { echo "== $$2: not below this machine's own kind"; continue; }; \
	  echo "== $$2"; \
	  ATEN_CPU_CAPABILITY=$$1 ONEDNN_MAX_CPU_ISA=$$2 $(run_cpu_tests) || failed="$$failed $$2"; \
	done; \
	echo '== native'; $(run_cpu_tests) || failed="$$failed native"; \
	[ -z "$$failed" ] || { echo "Tests failed as:$$failed"; exit 1; }

exhaustive: $(INSTALLED) ## run the cases of which `make test` takes a part, and all FP32 values (long)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m exhaustive $(ARGS)

outside: $(INSTALLED) ## run outside suites whole: every op of torch's database and more (minutes to hours)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m outside $(ARGS)

# Install hf_mp with a torch and a transformers in the environment $$env: by uv, or by pip where uv fails.
with_versions = { $(BIN)/uv pip install -q --python $$env/bin/python "torch==$(1)" "transformers==$(2)" \
  -e '.[test,recipes]' || $$env/bin/python -m pip install -q "torch==$(1)" "transformers==$(2)" -e '.[test,recipes]'; }

# torch's own build for CUDA runs on a CPU as well.
test-versions: $(INSTALLED) ## run the tests with the oldest and the newest torch and transformers (downloads 6 GB)
	@for versions in "2.11.0 5.17.0" "2.15.0 5.24.0"; do \
	  set -- $$versions; env=.venv-torch-$$1; echo "== torch $$1, transformers $$2"; \
	  [ -x $$env/bin/python ] || $(PYTHON) -m venv $$env || exit 1; \
	  $(call with_versions,$$1,$$2) || exit 1; \
	  OMP_NUM_THREADS=1 $$env/bin/python -m pytest -n 2 --dist loadfile -m "not slow and not exhaustive and not outside" $(ARGS) \
	    || exit 1; \
	done

# Make $$env an environment with torch's build for CUDA, and run Python there with a GPU that takes no time.
on_fake_gpu = env=.venv-torch-2.11.0; [ -x $$env/bin/python ] || $(PYTHON) -m venv $$env || exit 1; \
  $(call with_versions,2.11.0,5.17.0) || exit 1; OMP_NUM_THREADS=1 $$env/bin/python scripts/fake_gpu.py

test-gpu-shapes: $(INSTALLED) ## compare dtypes and kernels of steps on fake CUDA tensors with what is stored (downloads 3 GB)
	@$(on_fake_gpu) -m pytest tests/gpu/test_gpu_shapes.py tests/gpu/test_fake_gpu.py $(ARGS)

bench-host-gpu: $(INSTALLED) ## time the host's part of a step on a GPU that takes no time (no GPU; downloads 3 GB)
	@$(on_fake_gpu) scripts/bench.py host_gpu $(ARGS)

faults: $(INSTALLED) ## kill, damage and starve trainings by the hundred, and store what was lost (an hour)
	@OMP_NUM_THREADS=1 $(BIN)/python scripts/inject_faults.py $(ARGS)

# From the commit, not from what a checkout gathers. What is in dist/ may be published if this ends without an error.
release: $(INSTALLED) ## build sdist and wheel, check them, and install them where nothing else is (downloads torch)
	@rm -rf dist build/release && mkdir -p build/release && git archive HEAD | tar -x -C build/release
	@$(BIN)/python -m build --no-isolation --outdir dist build/release
	@$(BIN)/python -m twine check --strict dist/*
	@BUILT_ARCHIVES="$$PWD/dist" $(BIN)/python -m pytest tests/test_packaging.py $(ARGS)

tables: $(INSTALLED) ## write the stored results into the README and docs/ (ARGS="--check" only compares)
	@$(BIN)/python scripts/make_tables.py $(ARGS)

lint: $(INSTALLED) ## check the style and the types
	@$(BIN)/python -m ruff check
	@$(BIN)/python -m ruff format --check
	@$(BIN)/python -m mypy

clean: ## remove the environment, caches and built packages; outputs/ stays
	@rm -rf .venv .venv-torch-* build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first, by pip, whose settings may name another index for it: every other package is then content with it.
# The rest comes by uv in an eighth of the time that pip takes, or by pip where uv cannot reach the registry.
$(INSTALLED): pyproject.toml constraints.txt hf_mp/__init__.py
	@if [ ! -x $(BIN)/python ]; then \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    found=$$($(PYTHON) --version 2>&1) || found='not found'; \
	    echo "hf_mp needs Python 3.11 or newer; $(PYTHON) is: $$found"; \
	    echo 'Name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12'; exit 1; }; \
	  $(PYTHON) -m venv .venv; fi
	@echo 'Installing the tested packages into .venv (this once; torch alone can take minutes to download) ...'
	@$(BIN)/python -m pip install -q -c constraints.txt torch uv
	@$(BIN)/uv pip install -q --python $(BIN)/python -c constraints.txt -e '.[test,recipes]' \
	  || $(BIN)/python -m pip install -q -c constraints.txt -e '.[test,recipes]'
	@touch $@
