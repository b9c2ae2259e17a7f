#!/usr/bin/env bash
# Run every check: format, lint, types, import order, shell, tests. CI runs exactly this.
#
# Usage: run_tests.sh [--fast] [--help]
#        run_tests.sh (--nightly | --cluster | --long) [PATH...]
#
#   --fast     leave out the tests marked ray, slow, sandbox or nodes, and pyright
#   --nightly  only the tests marked nightly, and all property tests with 200 examples in place of 25: long simulations
#              and kills, most rungs of the sandbox, most tests in a browser and over machines; with PATH only those there
#   --cluster  only the tests marked cluster: runs over several machines in network namespaces, minutes each, as root
#   --long     only the tests marked algorithm, model, toolservers, agents, environments, reasoning or vllm: a run for each advantage estimator, of LoRA, of lent training devices, of a slow tool or none, of loops that are not ours, of an export, of a Ray started by hand and of a quick start, a pretrained model, stock MCP servers, stock agents, chat templates of public models, environments of other projects, tasks of reasoning-gym, vLLM
#
# The first start installs the Python environment into .venv (2 to 6 GB, some minutes). As root, missing Debian
# packages (bubblewrap, bats, ...) are installed; otherwise the checks that need them are skipped, with a message.
#
# Exit: 0 every check passed, 1 a check failed, 2 bad usage
set -euo pipefail

REPO_ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=cluster/lib/common.sh
source "${REPO_ROOT}/cluster/lib/common.sh"
# shellcheck source=cluster/lib/bootstrap.sh
source "${REPO_ROOT}/cluster/lib/bootstrap.sh"

# --- settings; the environment overrides each ---------------------------------
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"         # two threads on a shared core are slower than one
export RAY_worker_niceness="${RAY_worker_niceness:-0}" # with Ray's own 15 its workers wait for all other tests
SUITE_LIMIT_S="${SUITE_LIMIT_S:-4800}"                 # a suite that hangs outside of any test is ended after this time, with traces
export PYTHONFAULTHANDLER=1
BOUNDED=(--signal=ABRT --kill-after=60 "${SUITE_LIMIT_S}")

# program -> Debian package
declare -A PACKAGE_OF=(
  [bwrap]=bubblewrap [tmux]=tmux [sshd]=openssh-server [ip]=iproute2
  [shellcheck]=shellcheck [shfmt]=shfmt [bats]=bats [chromium]=chromium
)
SCRIPTS=(
  run_mixed_training.sh setup_cluster.sh run_tests.sh .ci/run requirements/renew.sh benchmarks/release_check.sh
  cluster/lib/*.sh cluster/slurm/* tests/nodes/*.sh tests/fakes/agents/*.sh
)
LONG="algorithm or model or toolservers or agents or environments or reasoning or vllm" # marks of --long
OTHERS="nightly or cluster or ${LONG}"                                                  # marks of tests that need an option
SUMMARY=()
FAILED=0
declare -A BESIDE_LOGS=() BESIDE_PIDS=() # name -> what it prints, and its process

# install_programs: as root, install the missing programs of PACKAGE_OF.
install_programs() {
  local program
  local -a missing=()
  for program in "${!PACKAGE_OF[@]}"; do
    command -v "${program}" >/dev/null || [[ -x "/usr/sbin/${program}" ]] || missing+=("${PACKAGE_OF[${program}]}")
  done
  ((${#missing[@]})) || return 0
  if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
    say "not installed, so the checks that need them are skipped: ${missing[*]}"
    return
  fi
  say "installing ${missing[*]}"
  if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    "${missing[@]}"; } >/dev/null; then
    say "apt-get could not install all of them; the checks that need them are skipped"
  fi
}

# stage NAME COMMAND...: run one check, and record its time and exit code for the summary.
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

# start_beside NAME COMMAND...: start a check in the background, because the foreground checks leave a core idle.
start_beside() {
  local name="$1"
  shift
  command -v "$1" >/dev/null || return 0 # `stage` reports the missing program
  BESIDE_LOGS["${name}"]="$(mktemp)"
  # A signal of `timeout` ends the inner shell only after the check itself, which may have traces to print.
  # shellcheck disable=SC2016 # expanded by the inner shell
  timeout "${BOUNDED[@]}" bash -c 'trap exit ABRT TERM; "${@:2}"; echo "$?" >"$1"' beside \
    "${BESIDE_LOGS["${name}"]}.exit" "$@" >"${BESIDE_LOGS["${name}"]}" 2>&1 &
  BESIDE_PIDS["${name}"]=$!
  say "${name} goes on beside the other checks; its output comes last, now in ${BESIDE_LOGS["${name}"]}"
}

# stop_beside: end the background checks when this script is interrupted.
stop_beside() {
  local pid
  for pid in "${BESIDE_PIDS[@]}"; do
    kill "${pid}" 2>/dev/null || true
  done
}

# finish_beside NAME: print the check's output until it ends, and return its exit code. The process id cannot show that
# the check has ended: a later child of this shell may have the same id, and the shell then forgets the first exit code.
# So `jobs` shows whether the check runs, and a file holds its exit code. The file is missing if the check was killed.
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

# stage_beside NAME: record a background check, as `stage` does, which also reports a missing program.
stage_beside() {
  if [[ -n "${BESIDE_PIDS["$1"]:-}" ]]; then
    stage "$1" finish_beside "$1"
  else
    stage "$1" "$1"
  fi
}

# show_from BYTE FILE: print the file from BYTE on; the caller's variable `shown` becomes the file's size.
show_from() {
  shown="$(stat -c %s -- "$2")"
  tail -c "+$(($1 + 1))" -- "$2" | head -c "$((shown - $1))"
}

main() {
  local only="" is_fast="" is_light="tests/rate_limit"
  local -a paths=()
  local -a selection=(-m "not (${OTHERS})") shell=(--print-output-on-failure) workers=(-n 2 --dist loadfile --no-loadscope-reorder)
  while (($#)); do
    case "$1" in
      -h | --help)
        usage "${BASH_SOURCE[0]}"
        return
        ;;
      --fast)
        is_fast=1
        selection=(-m "not (ray or slow or sandbox or nodes or ${OTHERS})")
        shell+=(--filter-tags '!slow')
        ;;
      --nightly) only="(nightly or hypothesis) and not (cluster or ${LONG})" ;;
      --cluster) only="cluster" ;;
      --long) only="${LONG}" ;;
      -*) die 2 "unknown option $1: see --help" ;;
      *) paths+=("$1") ;;
    esac
    shift
  done
  [[ -n "${only}" || ${#paths[@]} == 0 ]] || die 2 "PATH goes with --nightly, --cluster or --long; for others call pytest"
  ((${#paths[@]})) || paths=(tests)
  cd -- "${REPO_ROOT}"
  install_programs
  bootstrap dev
  if [[ "${only}" == *nightly* ]]; then
    exec python -m pytest --durations=10 "${workers[@]}" --hypothesis-profile=nightly -m "${only}" "${paths[@]}"
  elif [[ -n "${only}" ]]; then
    exec python -m pytest --durations=10 -m "${only}" "${paths[@]}"
  fi
  trap stop_beside EXIT
  # It forks thousands of processes, and a process without torch forks ten times as fast.
  start_beside "pytest ${is_light}" python -m pytest --durations=10 "${selection[@]}" "${is_light}"
  start_beside bats bats "${shell[@]}" tests/shell
  [[ -n "${is_fast}" ]] || start_beside pyright pyright
  stage "ruff format" ruff format --check .
  stage "ruff check" ruff check .
  stage "lint-imports" lint-imports
  stage "shellcheck" shellcheck -x "${SCRIPTS[@]}"
  stage "shfmt" shfmt -i 2 -ci -d "${SCRIPTS[@]}"
  stage "pytest" timeout --foreground "${BOUNDED[@]}" python -m pytest --durations=10 "${workers[@]}" "${selection[@]}" \
    --ignore="${is_light}" tests
  [[ -n "${is_fast}" ]] || stage_beside pyright
  stage_beside bats
  stage_beside "pytest ${is_light}"
  printf '%s\n' "" "summary" "${SUMMARY[@]}"
  return "${FAILED}"
}

main "$@"
