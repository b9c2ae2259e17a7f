#!/usr/bin/env bash
# The first program in a container of the cluster: the environment of VIRTUAL_ENV (VENV of setup_cluster.sh) first on
# PATH, if it is set; this checkout first for Python; Ray's number of open files. Then it becomes its words.
#
# Usage: inside.sh CMD...
set -euo pipefail

REPO_ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
[[ -z "${VIRTUAL_ENV:-}" ]] || export PATH="${VIRTUAL_ENV}/bin:${PATH}"
export PYTHONPATH="${REPO_ROOT}${PYTHONPATH:+:${PYTHONPATH}}"
export PYTHONNOUSERSITE=1 # packages below the home folder are the host's
ulimit -n 65536 2>/dev/null || ulimit -n "$(ulimit -Hn)"
exec "$@"
