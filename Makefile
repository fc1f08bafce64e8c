# Every target sets up what it needs in the checkout's own .venv. It needs no root access, only Python 3.11 to 3.14.
# To choose a build of torch: make setup TORCH='torch==2.13.0 ...'

# The Python for .venv: the first of these names that runs and has a suitable version, unless you name one.
IS_RIGHT := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
PYTHON ?= $(shell for name in python3 python3.12 python3.11 python3.13 python3.14 python; do \
    if "$$name" -c '$(IS_RIGHT)' 2>/dev/null; then command -v "$$name"; break; fi; done)
# A newer Python than .venv's, for test-shards: the first that runs, including pyenv's. Empty if there is none.
NEWER_PYTHON ?= $(shell for name in python3.14 python3.13 "$$HOME"/.pyenv/versions/3.1[34].*/bin/python3; do \
    if "$$name" -c 'import ensurepip, venv' 2>/dev/null; then command -v "$$name"; break; fi; done)
# pip's arguments for torch. If an index offers a CPU build of this version, pip takes it. For another build (CUDA,
# ROCm), add its --index-url.
TORCH ?= torch==2.13.0
# More arguments for pytest, for example: make test ARGS='-m "not long and not slow" tests/shards'
ARGS ?=
# How many tests run at the same time. Each may use two cores and a few GB; they wait for a quarter of their time, so
# three keep two cores busy.
WORKERS ?= 3
# The benchmarks' folder of photographs, and the folder for copies in each loader's layout (4 GB, kept).
IMAGES ?=
WORK ?= runs/bench

VENV := $(CURDIR)/.venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install
SHELL_FILES := $(wildcard slurm/*.sbatch slurm/*.sh .githooks/*) .ci/run

.PHONY: help setup demo slurm-demo test test-long test-flaky test-shards time-ci lint soak soak-cluster fuzz fuzz-c bench-env bench docs clean
.DELETE_ON_ERROR:

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

DECODER := $(VENV)/bin/python -c 'from pipeline.data.transform import decoder_name; print(decoder_name())'

setup: .venv/.all ## Make .venv with everything that demo, test, lint and docs need
	@decoder=$$($(DECODER)) || exit 1; \
	if [ "$$decoder" = simplejpeg ] && $(VENV)/bin/python hatch_build.py; then decoder=$$($(DECODER)) || exit 1; fi; \
	echo ".venv is ready; JPEGs are decoded by: $$decoder"; \
	[ "$$decoder" != simplejpeg ] || { \
	  echo "The crop decoder would give the same pixels in less time. It needs a C compiler and libjpeg-turbo 2.1 or newer with"; \
	  echo "its headers: apt-get install gcc libjpeg62-turbo-dev on Debian, or one of your own, say CPPFLAGS=-I/opt/jpeg/include"; \
	  echo "LDFLAGS='-L/opt/jpeg/lib -Wl,-rpath,/opt/jpeg/lib'. Then run make setup again."; }
	@.githooks/install

demo: .venv/.demo ## Run the whole pipeline on real handwritten digits, at most 5 minutes on 2 cores
	$(VENV)/bin/patchline demo

slurm-demo: .venv/.demo ## Start a real Slurm on this machine, and run a chain of jobs with a kill in the middle, 1 minute
	$(VENV)/bin/python -m tests.rigs.slurm_demo

PYTEST := $(VENV)/bin/python -m pytest --numprocesses $(WORKERS) --dist loadfile

test: .venv/.all ## Run the gate, about 20 minutes; tests of missing programs are skipped with the reason
	$(PYTEST) -m 'not long' --durations=10 --cpu-seconds=10 $(ARGS)

# The long part is divided into PARTS parts. Eight of them end within 9 minutes even if all tests of one lie in a few
# files, which two workers cannot share. Without PART, all of them run in turn.
PARTS ?= 8
PART ?= $(foreach part,$(shell seq $(PARTS)),$(part)/$(PARTS))

test-long: .venv/.all ## Run all other tests, or a part of them: make test-long PART=3/8
	@status=0; for part in $(PART); do \
	  $(PYTEST) -m long --part=$$part --outcome=tests/long/results.json $(ARGS) || status=1; \
	done; \
	[ $$status -eq 0 ] || echo 'make test-long: tests failed; "failed" in tests/long/results.json lists those of each part'; \
	exit $$status

N ?= 5
LOAD ?= 2

test-flaky: .venv/.all ## Run the gate several times with busy loops beside it: make test-flaky [N=5] [LOAD=2]
	$(VENV)/bin/python -m tests.long.load --times $(N) --load $(LOAD)

time-ci: .venv/.all ## Time .ci/run on a clean clone of the last commit, on a CPU that simulates a slow one
	$(VENV)/bin/python -m tests.long.clean_clone

# The packages that shards/ and its tests import. Slow tests and tests that need Ceph run only in make test.
SHARDS_NEEDS := numpy pyarrow pillow imagehash boto3 webdataset jinja2 rich matplotlib pydantic pyyaml scikit-learn \
    'moto[server,s3]' simplejpeg hypothesis pytest pytest-timeout pytest-xdist

test-shards: ## Run the tests of shards/ on a newer Python without torch: make test-shards [NEWER_PYTHON=/path/to/python3.13]
	@python="$(NEWER_PYTHON)"; \
	if [ -z "$$python" ]; then \
	  echo "make test-shards: skipped, there is no Python 3.13 or 3.14 (give one: make test-shards NEWER_PYTHON=/path/to/python3.13)"; \
	  exit 0; fi; \
	set -ex; \
	"$$python" -m venv --clear .venv-shards; \
	.venv-shards/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt $(SHARDS_NEEDS); \
	PYTHONPATH="$(CURDIR)" PATCHLINE_REQUIRE='' .venv-shards/bin/python -m pytest --numprocesses 2 --dist loadfile -m 'not rgw and not slow' tests/shards

lint: .venv/.all ## Check style, types, shell scripts and the Dockerfile
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy --num-workers 2
	@command -v shellcheck >/dev/null || { echo "make lint: shellcheck is not installed (Debian: apt-get install shellcheck)"; exit 1; }
	shellcheck $(SHELL_FILES)
	$(VENV)/bin/hadolint containers/Dockerfile

soak: .venv/.all ## Kill, stop and resume runs many times; each must end like the unbroken run
	$(VENV)/bin/python -m tests.soak.kills
	$(VENV)/bin/python -m tests.soak.kill_matrix
	$(VENV)/bin/python -m tests.soak.writer_kills
	$(VENV)/bin/python -m tests.soak.stops
	$(VENV)/bin/python -m tests.soak.packing
	$(VENV)/bin/python -m tests.soak.loader
	$(VENV)/bin/python -m tests.soak.chain_faults

soak-cluster: .venv/.all ## Break jobs on a real Slurm in every way at every moment: make soak-cluster [PART=3/8]; needs root
	@status=0; for part in $(PART); do $(VENV)/bin/python -m tests.soak.cluster --part $$part || status=1; done; exit $$status

SECONDS ?= 3600
SEED ?= 1

fuzz: .venv/.all ## Give damaged and hostile files to all readers, an hour: make fuzz [SECONDS=600] [SEED=2]
	$(VENV)/bin/python -m tests.fuzz --seconds $(SECONDS) --seed $(SEED)

fuzz-c: .venv/.all ## Fuzz the C files with clang, ten minutes: make fuzz-c [ARGS='--libjpeg PREFIX --sanitizer memory']
	$(VENV)/bin/python -m tests.fuzz.crop_decoder $(ARGS)

# The peers need older versions of our requirements, so they have their own environment.
# FFCV is built here. Its opencv-python would overwrite opencv-python-headless, which is the same module; --as-needed links
# only the parts of OpenCV that it uses.
BENCH_FFCV := .venv-bench/bin/python -m pip --disable-pip-version-check install numba terminaltables pytorch_pfn_extras fastargs assertpy tqdm psutil && \
	LDFLAGS=-Wl,--as-needed .venv-bench/bin/python -m pip --disable-pip-version-check install --no-deps ffcv==1.0.2

bench-env: ## Make .venv-bench with the tools that benchmarks/ compares with
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip --disable-pip-version-check install $(TORCH)
	.venv-bench/bin/python -m pip --disable-pip-version-check install $(TORCH) --editable '.[bench]'
	@if pkg-config --exists opencv4 libturbojpeg; then $(BENCH_FFCV); else \
	  echo "make bench-env: without FFCV, whose headers are missing (Debian: apt-get install pkg-config libopencv-dev libturbojpeg0-dev)"; fi

bench: .venv/.all ## Compare steps, checkpoints, loader and S3 with other tools, 150 minutes: make bench IMAGES=DIR [WORK=DIR]
	@test -n "$(IMAGES)" || { echo "make bench: which photographs? IMAGES=folder of CLASS_anything.JPEG files (say, 500 of ImageNet)"; exit 1; }
	@test -x .venv-bench/bin/python || { echo "make bench: the peers are missing (run: make bench-env)"; exit 1; }
	$(VENV)/bin/python -m benchmarks.startup --out benchmarks/results/startup.json
	$(VENV)/bin/python -m benchmarks.step --out benchmarks/results/step.json
	$(VENV)/bin/python -m benchmarks.loop --rounds 5 --steps 2 --only s16 --out benchmarks/results/loop.json
	$(VENV)/bin/python -m benchmarks.loop --rounds 5 --steps 1 --only s16 --batch 32 --out benchmarks/results/loop_batch32.json
	$(VENV)/bin/python -m benchmarks.loop --rounds 5 --steps 2 --only ti4 --out benchmarks/results/loop_ti4.json
	$(VENV)/bin/python -m benchmarks.checkpoint --out benchmarks/results/checkpoint.json
	$(VENV)/bin/python -m benchmarks.checkpoint --rounds 3 --pairs 8 --model vit_b16 --out benchmarks/results/checkpoint_b16.json
	$(VENV)/bin/python -m benchmarks.checkpoint --rounds 3 --pairs 8 --model vit_b16 --ranks 1 --out benchmarks/results/checkpoint_free_core.json
	$(VENV)/bin/python -m benchmarks.kernels --out benchmarks/results/kernels.json
	$(VENV)/bin/python -m benchmarks.order --out benchmarks/results/order.json
	$(VENV)/bin/python -m benchmarks.loader --images "$(IMAGES)" --work "$(WORK)" --out benchmarks/results/loader.json
	$(VENV)/bin/python -m benchmarks.loader_busy --images "$(IMAGES)" --work "$(WORK)" --rounds 3 --out benchmarks/results/loader_busy.json
	$(VENV)/bin/python -m benchmarks.s3 --images "$(IMAGES)" --work "$(WORK)" --out benchmarks/results/s3.json

docs: .venv/.all ## Build the documentation as a site, for a browser: site/index.html
	$(VENV)/bin/python -m docs.site_files
	rm -rf site
	$(VENV)/bin/zensical build --strict --clean

clean: ## Remove .venv, .venv-bench, .venv-shards, caches, the site and the demos' folders
	rm -rf .venv .venv-bench .venv-shards demo-run slurm-demo-run build dist site .cache pipeline/data/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Sources of the optional crop decoder, which is rebuilt when one of them changes.
NATIVE := hatch_build.py $(wildcard pipeline/data/*.c pipeline/data/*.h)

# Stamps, renewed when the project's requirements change. torch is installed first, so that its build is settled before
# anything that depends on it.
.venv/.torch: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 to 3.14 is needed, and none is on the PATH (give one: make PYTHON=/path/to/python3.12)"; exit 1; }
	@$(PYTHON) -c '$(IS_RIGHT)' || { echo "make: $(PYTHON) is $$($(PYTHON) --version 2>&1); Python 3.11 to 3.14 is needed (give one: make PYTHON=/path/to/python3.12)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) has no venv module (Debian: apt-get install python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@nvidia-smi --list-gpus 2>/dev/null || echo "no NVIDIA GPU answers here: training will run on the CPU"
	$(PIP) --constraint constraints.txt $(TORCH)
	@touch $@

.venv/.demo: .venv/.torch $(NATIVE)
	$(PIP) --constraint constraints.txt --editable '.[demo]'
	@touch $@

.venv/.all: .venv/.torch $(NATIVE)
	$(PIP) --constraint constraints.txt --editable '.[demo,test,dev,docs]'
	@touch $@ .venv/.demo
