#!/usr/bin/env bash
# The GPU check, where there may be no network: with the extension and the packages that lie beside this file, which
# `make gpu-bundle` has put into build/gpu-bundle of a clone. What it is given goes on to benchmarks.gpu_check.
set -uo pipefail
bundle="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
cd "${CLONE:-$bundle/../..}" || exit 1
python="${PYTHON:-python3}"
packages="$(mktemp -d)"
trap 'rm -rf "$packages"' EXIT
for wheel in "$bundle"/wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$packages" || exit 1; done
export PYTHONPATH="$packages${PYTHONPATH:+:$PYTHONPATH}"
loads() { "$python" -c 'import torch, waterflow._C'; }
suffix="$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')"
[ -e "$bundle/_C$suffix" ] && cp "$bundle/_C$suffix" waterflow/
if ! loads; then
  echo "the extension of the bundle does not load here: building one, at most 150 s"
  MAX_JOBS=16 WATERFLOW_TEST_HOOKS=1 timeout 150 "$python" setup.py -q build_ext --inplace
  loads || exit 1
fi
"$python" - <<'PY'
import importlib.util
needed = ("pytest", "pytest_timeout", "optuna", "sklearn", "torchvision", "transformers")
missing = [name for name in needed if importlib.util.find_spec(name) is None]
print("missing here, and so cases that need them fail:", ", ".join(missing) or "nothing", flush=True)
PY
"$python" -m benchmarks.gpu_check "$@"
