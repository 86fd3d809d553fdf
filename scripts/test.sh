#!/usr/bin/env bash
# Sets up, then runs lint, types, import contracts and the tests. Arguments go to pytest: bash scripts/test.sh -m "not slow"
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh smollm2 ray
. .venv/bin/activate
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export CUDA_VISIBLE_DEVICES=""  # the environment of setup.sh is for CPU ranks; on a machine set up with the gpu extra: pytest -m gpu
echo "== lint";             ruff check .
echo "== types";            mypy
echo "== import contracts"; lint-imports --no-cache
# Two at a time: most tests wait for processes that start. A file stays on one worker, where its launches are shared.
echo "== tests";            python -m pytest --numprocesses "${PYTEST_WORKERS:-2}" --dist loadfile "$@"
