#!/usr/bin/env bash
# Write the lock files anew from pyproject.toml, for every Python that it names: laptop.lock is what a run needs, dev.lock
# what run_tests.sh needs on top, gpu.lock what a run on NVIDIA GPUs needs. torch.txt is edited by hand, and decides for
# the first two; gpu.lock has its own torch, from the extra `gpu`.
#
# Usage: requirements/renew.sh [--upgrade] [--check] [--help]
#
#   --upgrade  take the newest versions that pyproject.toml allows; without it, a pin that still fits stays as it is
#   --check    write nothing: show what would change
#
# Needs uv (`pip install uv`); it asks the package index for metadata and installs nothing.
#
# Exit: 0 the locks are as they should be, 1 uv failed, or --check found a difference, 2 bad usage
set -euo pipefail

REPO_ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=cluster/lib/common.sh
source "${REPO_ROOT}/cluster/lib/common.sh"

# --- settings; the environment overrides each ---------------------------------
OLDEST_PYTHON="${OLDEST_PYTHON:-3.10}"
OF_CUDA='^(nvidia-|cuda-|triton==)' # come with the CUDA build of torch, whose own metadata pins them

LAPTOP="# Versions of a laptop run, complete; torch comes before it, from torch.txt. Python 3.10 to 3.12. From renew.sh."
DEV="# What run_tests.sh needs on top of laptop.lock. From renew.sh."
GPU="# Versions of a run on NVIDIA GPUs, complete, torch with its CUDA 13 included: Linux on x86_64 with glibc 2.31, a driver for
# CUDA 13, Python 3.10 to 3.12. torch, vllm, transformers and cupy are those that verl 0.9.1 names (its extras vllm and
# fsdp). Resolved, never yet run on a GPU by this project. flash-attn is not here, because PyPI has its source alone:
# docs/compatibility.md says how to get it. From renew.sh."

# resolve LOCK OPTION...: fill LOCK with the pins of pyproject.toml; those already in it are preferred.
resolve() {
  local lock="$1"
  shift
  uv pip compile --quiet --universal --python-version "${OLDEST_PYTHON}" --no-header --no-annotate "$@" \
    --output-file "${lock}" "${REPO_ROOT}/pyproject.toml" >/dev/null
}

# pins FILE: without comments.
pins() {
  grep -vE '^#|^$' -- "$1"
}

# locked FILE: its pins, without what a build of torch brings.
locked() {
  pins "$1" | grep -vE "${OF_CUDA}"
}

main() {
  local check=0 drafts name status=0
  local -a upgrade=() torch=(--constraint "${REPO_ROOT}/requirements/torch.txt" --no-emit-package torch)
  while (($#)); do
    case "$1" in
      -h | --help)
        usage "${BASH_SOURCE[0]}"
        return
        ;;
      --upgrade) upgrade=(--upgrade) ;;
      --check) check=1 ;;
      *) die 2 "unknown option $1: see --help" ;;
    esac
    shift
  done
  command -v uv >/dev/null || die 1 "uv is not installed: pip install uv"
  drafts="$(mktemp -d)"
  # shellcheck disable=SC2064 # this folder, whatever the variable is then
  trap "rm -rf -- '${drafts}'" EXIT
  locked "${REPO_ROOT}/requirements/laptop.lock" >"${drafts}/run"
  resolve "${drafts}/run" "${torch[@]}" --extra all "${upgrade[@]}"
  cat -- "${drafts}/run" >"${drafts}/all"
  locked "${REPO_ROOT}/requirements/dev.lock" >>"${drafts}/all"
  resolve "${drafts}/all" "${torch[@]}" --constraint "${drafts}/run" --extra all --extra dev "${upgrade[@]}"
  pins "${REPO_ROOT}/requirements/gpu.lock" >"${drafts}/gpu"
  resolve "${drafts}/gpu" --extra all --extra gpu "${upgrade[@]}"
  { echo "${LAPTOP}" && locked "${drafts}/run"; } >"${drafts}/laptop.lock"
  { echo "${DEV}" && locked "${drafts}/all" | grep -vxFf "${drafts}/run"; } >"${drafts}/dev.lock"
  { echo "${GPU}" && pins "${drafts}/gpu"; } >"${drafts}/gpu.lock"
  for name in laptop dev gpu; do
    if ((check)); then
      diff -u -- "${REPO_ROOT}/requirements/${name}.lock" "${drafts}/${name}.lock" || status=1
    else
      cp -- "${drafts}/${name}.lock" "${REPO_ROOT}/requirements/${name}.lock"
    fi
  done
  return "${status}"
}

main "$@"
