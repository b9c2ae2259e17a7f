#!/usr/bin/env bash
# Every check there is: format, lint, types, import arrows, shell, tests. CI runs exactly this.
#
# Usage: run_tests.sh [--fast | --cluster | --long] [--help]
#
#   --fast     leave out the tests marked ray, slow, sandbox or nodes
#   --cluster  only the tests marked cluster: runs over several machines in network namespaces, minutes each, as root
#   --long     only the tests marked algorithm, model or vllm: a run for each advantage estimator, a pretrained model, vLLM
#
# The first start installs the Python environment into .venv (2 to 6 GB, some minutes). As root, missing Debian
# packages (bubblewrap, bats, ...) are installed; otherwise what needs them is skipped, and said so.
#
# Exit: 0 every check passed, 1 a check failed, 2 bad usage
set -euo pipefail

REPO_ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=cluster/lib/common.sh
source "${REPO_ROOT}/cluster/lib/common.sh"
# shellcheck source=cluster/lib/bootstrap.sh
source "${REPO_ROOT}/cluster/lib/bootstrap.sh"

# --- settings; the environment overrides each ---------------------------------
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # two threads on a shared core are slower than one
SUITE_LIMIT_S="${SUITE_LIMIT_S:-2700}"         # a suite that hangs where no test's limit reaches is ended, with its traces
export PYTHONFAULTHANDLER=1
BOUNDED=(--signal=ABRT --kill-after=60 "${SUITE_LIMIT_S}")

# program -> its Debian package
declare -A PACKAGE_OF=(
  [bwrap]=bubblewrap [tmux]=tmux [sshd]=openssh-server [ip]=iproute2
  [shellcheck]=shellcheck [shfmt]=shfmt [bats]=bats [chromium]=chromium
)
SCRIPTS=(
  run_mixed_training.sh setup_cluster.sh run_tests.sh .ci/run requirements/renew.sh benchmarks/release_check.sh
  cluster/lib/*.sh cluster/slurm/* tests/nodes/*.sh
)
LONG="cluster or algorithm or model or vllm" # marks of tests that only options run
SUMMARY=()
FAILED=0
declare -A BESIDE_LOGS=() BESIDE_PIDS=() # name -> what it prints, and its process

# install_programs: as root, whatever of PACKAGE_OF is not there.
install_programs() {
  local program
  local -a missing=()
  for program in "${!PACKAGE_OF[@]}"; do
    command -v "${program}" >/dev/null || [[ -x "/usr/sbin/${program}" ]] || missing+=("${PACKAGE_OF[${program}]}")
  done
  ((${#missing[@]})) || return 0
  if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
    say "not installed, so what needs them is skipped: ${missing[*]}"
    return
  fi
  say "installing ${missing[*]}"
  if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    "${missing[@]}"; } >/dev/null; then
    say "apt-get could not install all of them; what needs them is skipped"
  fi
}

# stage NAME COMMAND...: run one check, time it, remember how it ended.
stage() {
  local name="$1" status=0 began="${SECONDS}"
  shift
  say "--- ${name}"
  if ! command -v "$1" >/dev/null; then
    SUMMARY+=("skipped  ${name} ($1 is not installed)")
    return
  fi
  "$@" || status=$?
  if ((status == 0)); then
    SUMMARY+=("ok       ${name} ($((SECONDS - began)) s)")
  else
    SUMMARY+=("FAILED   ${name} ($((SECONDS - began)) s, exit ${status})")
    FAILED=1
  fi
}

# start_beside NAME COMMAND...: a check in the background: others leave a core idle.
start_beside() {
  local name="$1"
  shift
  command -v "$1" >/dev/null || return 0 # `stage` says so
  BESIDE_LOGS["${name}"]="$(mktemp)"
  # A signal of `timeout` ends the inner shell only after the check itself, which may have traces to print.
  # shellcheck disable=SC2016 # expanded by the inner shell
  timeout "${BOUNDED[@]}" bash -c 'trap exit ABRT TERM; "${@:2}"; echo "$?" >"$1"' beside \
    "${BESIDE_LOGS["${name}"]}.exit" "$@" >"${BESIDE_LOGS["${name}"]}" 2>&1 &
  BESIDE_PIDS["${name}"]=$!
  say "${name} goes on beside the other checks; its output comes last, now in ${BESIDE_LOGS["${name}"]}"
}

# stop_beside: end those that still go on, when this script is interrupted.
stop_beside() {
  local pid
  for pid in "${BESIDE_PIDS[@]}"; do
    kill "${pid}" 2>/dev/null || true
  done
}

# finish_beside NAME: show what it printed, wait for its end, and end as it did. Its number alone does not say whether
# it has ended: another process may have it by now, and if that is a child of this shell, the shell forgets how the
# first one ended. So `jobs` says whether, and a file says how; where a check was ended from outside, there is none.
finish_beside() {
  local name="$1" status shown=0 log="${BESIDE_LOGS["$1"]}" pid="${BESIDE_PIDS["$1"]}"
  while [[ $'\n'"$(jobs -pr)"$'\n' == *$'\n'"${pid}"$'\n'* ]]; do
    show_from "${shown}" "${log}"
    sleep 1
  done
  status="$(cat -- "${log}.exit" 2>/dev/null)" || status=124
  show_from "${shown}" "${log}"
  unset "BESIDE_PIDS[${name}]"
  rm -f -- "${log}" "${log}.exit"
  return "${status}"
}

# show_from BYTE FILE: the rest of it; `shown` of the caller is then its size.
show_from() {
  shown="$(stat -c %s -- "$2")"
  tail -c "+$(($1 + 1))" -- "$2" | head -c "$((shown - $1))"
}

main() {
  local folders only=""
  local -a selection=(-m "not (${LONG})") shell=(--print-output-on-failure) apart=() beside=(tests/e2e tests/rate_limit "tests/samplers tests/nodes")
  while (($#)); do
    case "$1" in
      -h | --help)
        usage "${BASH_SOURCE[0]}"
        return
        ;;
      --fast)
        selection=(-m "not ray and not slow and not sandbox and not nodes and not (${LONG})")
        shell+=(--filter-tags '!slow')
        beside=(tests/verl_mixed tests/rate_limit tests/samplers)
        ;;
      --cluster) only="cluster" ;;
      --long) only="algorithm or model or vllm" ;;
      *) die 2 "unknown option $1: see --help" ;;
    esac
    shift
  done
  cd -- "${REPO_ROOT}"
  install_programs
  bootstrap dev
  if [[ -n "${only}" ]]; then
    exec python -m pytest --durations=15 -m "${only}" tests
  fi
  trap stop_beside EXIT
  for folders in "${beside[@]}"; do
    # shellcheck disable=SC2206 # several folders are several words
    apart+=(${folders})
    # shellcheck disable=SC2086 # the same
    start_beside "pytest ${folders}" python -m pytest --durations=10 "${selection[@]}" ${folders}
  done
  start_beside bats bats "${shell[@]}" tests/shell
  stage "ruff format" ruff format --check .
  stage "ruff check" ruff check .
  stage "pyright" pyright
  stage "lint-imports" lint-imports
  stage "shellcheck" shellcheck -x "${SCRIPTS[@]}"
  stage "shfmt" shfmt -i 2 -ci -d "${SCRIPTS[@]}"
  stage "pytest" timeout --foreground "${BOUNDED[@]}" python -m pytest --durations=15 "${selection[@]}" "${apart[@]/#/--ignore=}"
  if [[ -n "${BESIDE_PIDS[bats]:-}" ]]; then
    stage "bats" finish_beside bats
  else
    stage "bats" bats
  fi
  for folders in "${beside[@]}"; do
    stage "pytest ${folders}" finish_beside "pytest ${folders}"
  done
  printf '%s\n' "" "summary" "${SUMMARY[@]}"
  return "${FAILED}"
}

main "$@"
