# Sourced: sets `python` to PYTHON, the active environment's, the one that scripts/setup.sh made, or any, in this order.
python=${PYTHON:-}
if [ -z "$python" ]; then
    python=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/python
    if [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] || [ ! -x "$python" ]; then python=python; fi
fi
