#!/usr/bin/env bash
# The release check: both front-door commands from a fresh clone in an empty environment, and the distributions built,
# installed and run outside of a clone. It checks what is committed; nothing of this checkout's .venv, runs or data is used.
#
# Usage: benchmarks/release_check.sh [--only PART[,PART ...]] [--without PART[,PART ...]] [--fast] [--keep] [--help]
#
#   train    ./run_mixed_training.sh, from nothing to its report
#   tests    ./run_tests.sh
#   long     ./run_tests.sh --long
#   build    a source distribution and a wheel
#   install  the wheel into a new virtual environment, with the versions of the lock files
#   outside  there: verl-mixed --help, check, plan, two steps of training to a report, audit
#   sdist    the source distribution in place of the wheel: check
#
#   --only, --without   these parts alone; all but these. outside and sdist need build and install
#   --fast              ./run_tests.sh --fast
#   --keep              leave the folder of the check, which holds a log a part; it stays too where a part is not good
#
# A whole check takes hours on two cores, nearly all of it in train, tests and long. The empty environment has HOME, LANG,
# PATH and what names a package index; packages in pip's cache are not downloaded again.
#
# Exit: 0 every part is good, 1 one is not, 2 bad usage
set -euo pipefail

REPO_ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=cluster/lib/common.sh
source "${REPO_ROOT}/cluster/lib/common.sh"
# shellcheck source=cluster/lib/bootstrap.sh
source "${REPO_ROOT}/cluster/lib/bootstrap.sh"

# --- settings; the environment overrides each ---------------------------------
SYSTEM_PATH="${SYSTEM_PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}"
PIP_CACHE_DIR="${PIP_CACHE_DIR:-${HOME:-/nowhere}/.cache/pip}" # of the user: downloads are kept over checks
PART_LIMIT_S="${PART_LIMIT_S:-5400}"                           # a part that hangs is ended
KEPT=(
  PIP_CACHE_DIR PIP_CERT PIP_DEFAULT_TIMEOUT PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_INDEX_URL TORCH_INDEX_URL
  PYTHON REQUESTS_CA_BUNDLE SSL_CERT_DIR SSL_CERT_FILE HTTP_PROXY HTTPS_PROXY NO_PROXY http_proxy https_proxy no_proxy
)

PARTS=(train tests long build install outside sdist)
FAILED=0
SUMMARY=()

# in_empty_environment FOLDER COMMAND...: run it there with nothing of this shell but what reaches a package index.
in_empty_environment() {
  local folder="$1" name
  local -a kept=()
  shift
  for name in "${KEPT[@]}"; do
    [[ -z "${!name:-}" ]] || kept+=("${name}=${!name}")
  done
  cd -- "${folder}"
  exec env -i HOME="${WORK}/home" LANG=C.UTF-8 PATH="${SYSTEM_PATH}" "${kept[@]}" \
    timeout --kill-after=60 "${PART_LIMIT_S}" "$@"
}

# bash_in FOLDER SCRIPT [WORD ...]: a few lines of shell there.
bash_in() {
  local folder="$1" script="$2"
  shift 2
  in_empty_environment "${folder}" bash -euo pipefail -c "${script}" part "$@"
}

train() {
  # shellcheck disable=SC2016 # expanded by the inner shell
  bash_in "${WORK}/clone" './run_mixed_training.sh && test -s runs/mixed_demo/report.html'
}

tests() { in_empty_environment "${WORK}/clone" ./run_tests.sh "${TEST_OPTIONS[@]}"; }

long() { in_empty_environment "${WORK}/clone" ./run_tests.sh --long; }

# build: in an environment of its own, from a copy, as no file of the clone may be missing in it.
build() {
  # shellcheck disable=SC2016 # expanded by the inner shell
  bash_in "${WORK}" '
    "$1" -m venv builder
    builder/bin/python -m pip install --quiet build
    git -C clone archive --prefix=source/ HEAD | tar -x
    builder/bin/python -m build --outdir dist source
    ls -l dist' "${PYTHON}"
}

# install: torch alone and first, as cluster/lib/bootstrap.sh does it.
install() {
  # shellcheck disable=SC2016 # expanded by the inner shell
  bash_in "${WORK}/outside" '
    locks=(-c "$2/requirements/torch.txt" -c "$2/requirements/laptop.lock")
    "$1" -m venv venv
    venv/bin/python -m pip install --quiet "${locks[@]}" ${TORCH_INDEX_URL:+--index-url "${TORCH_INDEX_URL}"} \
      -r "$2/requirements/torch.txt"
    venv/bin/python -m pip install --quiet "${locks[@]}" setuptools "$3"/*.whl
    venv/bin/python -m pip check
    venv/bin/python -m pip show verl-mixed-agent-loop' \
    "${PYTHON}" "${WORK}/clone" "${WORK}/dist"
}

# outside: two steps of the demo; what `train` made for it already is taken from the clone.
outside() {
  [[ ! -d "${WORK}/clone/data" ]] || cp -r -- "${WORK}/clone/data" "${WORK}/outside/"
  # shellcheck disable=SC2016 # expanded by the inner shell
  bash_in "${WORK}/outside" '
    export PATH="${PWD}/venv/bin:${PATH}" PROFILE=laptop
    verl-mixed --help
    verl-mixed prepare demo
    verl-mixed check >checked.yaml
    verl-mixed plan --batches 2
    verl-mixed train mixed.experiment=outside trainer.total_training_steps=2 data.val_max_samples=6
    test -s runs/outside/report.html
    verl-mixed audit runs/outside'
}

sdist() {
  # shellcheck disable=SC2016 # expanded by the inner shell
  bash_in "${WORK}/outside" '
    export PATH="${PWD}/venv/bin:${PATH}" PROFILE=laptop
    python -m pip install --quiet --no-deps --no-build-isolation --force-reinstall "$1"/*.tar.gz
    verl-mixed check >checked.yaml' "${WORK}/dist"
}

# part NAME: run it, time it, remember how it ended; what it prints goes to its log.
part() {
  local name="$1" status=0 began="${SECONDS}" log="${WORK}/logs/$1.log"
  say "--- ${name} (its output: ${log})"
  ("${name}") >"${log}" 2>&1 </dev/null || status=$?
  ((status == 0)) || {
    FAILED=1
    tail -n 20 -- "${log}" >&2
  }
  SUMMARY+=("$(printf '%-8s %5d %8d  %s' "${name}" "${status}" "$((SECONDS - began))" "${log}")")
}

# chosen WORD...: whether each is a part.
chosen() {
  local word
  for word in "$@"; do
    [[ " ${PARTS[*]} " == *" ${word} "* ]] || die 2 "no part '${word}': one of ${PARTS[*]}"
  done
}

main() {
  local only="" without="" keep=0 name
  local -a wanted=()
  TEST_OPTIONS=()
  while (($#)); do
    case "$1" in
      -h | --help)
        usage "${BASH_SOURCE[0]}"
        return
        ;;
      --only | --without)
        (($# > 1)) || die 2 "$1 wants parts: see --help"
        [[ "$1" == --only ]] && only+=",$2" || without+=",$2"
        shift
        ;;
      --fast) TEST_OPTIONS=(--fast) ;;
      --keep) keep=1 ;;
      *) die 2 "unknown option $1: see --help" ;;
    esac
    shift
  done
  # shellcheck disable=SC2086 # names, a word each
  chosen ${only//,/ } ${without//,/ }
  for name in "${PARTS[@]}"; do
    [[ -n "${only}" && ",${only}," != *",${name},"* ]] || [[ ",${without}," == *",${name},"* ]] || wanted+=("${name}")
  done
  ((${#wanted[@]})) || die 2 "no part is left: see --help"

  [[ -z "$(git -C "${REPO_ROOT}" status --porcelain)" ]] || say "note: what is not committed is not checked"
  PYTHON="$(PATH="${SYSTEM_PATH}" find_python)"
  WORK="$(mktemp -d)"
  mkdir -- "${WORK}/home" "${WORK}/logs" "${WORK}/outside"
  git clone --quiet --no-hardlinks -- "${REPO_ROOT}" "${WORK}/clone"
  for name in "${wanted[@]}"; do
    part "${name}"
  done
  printf '%s\n' "" "commit $(git -C "${WORK}/clone" rev-parse --short=12 HEAD), $("${PYTHON}" --version), $(nproc --all) cores" \
    "$(printf '%-8s %5s %8s  %s' part exit seconds log)" "${SUMMARY[@]}"
  if ((keep || FAILED)); then
    say "kept: ${WORK}"
  else
    rm -rf -- "${WORK}"
  fi
  return "${FAILED}"
}

main "$@"
