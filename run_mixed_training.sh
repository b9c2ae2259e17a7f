#!/usr/bin/env bash
# Train one policy on several sources at once, or resume a stopped run: on this machine or on a cluster.
#
# Usage: run_mixed_training.sh [COMMAND] [OPTION ...] [KEY=VALUE ...]
#
#   start     start the run, or resume it if it was stopped (the default)
#   status    show its step and whether it is running
#   logs      show the end of its train.log; -f follows it
#   attach    open its tmux session on the head (Ctrl-b d leaves it)
#   stop      save a checkpoint and end the run; kill its processes if they do not end
#   resume    resume the run; refuse if there is no checkpoint
#   watch     show the run's screen: phases, sources, limiter
#   report    write the run's page and curves
#   diagnose  name known failures in the run's logs
#   audit     prove that the trained prompts are the planned prompts
#   limiter   show the run's rate limiter
#             (watch, report, diagnose, audit and limiter take the options of `verl-mixed COMMAND`)
#   fetch     copy the run's files, without its checkpoints, from the head to runs/ here
#   dashboard open the tunnel to the cluster's dashboard, until interrupted
#   dry-run   print every command of a start, and the resolved config; run nothing
#   validate  check config, data and machine; run nothing (.venv is installed if it is missing)
#
#   ./run_mixed_training.sh                                  the demo on this machine, no GPU needed
#   TACO_RATIO=0 EXPERIMENT_NAME=no_taco ./run_mixed_training.sh
#   ./run_mixed_training.sh trainer.total_training_steps=50 mixed.seed=1
#   ./run_mixed_training.sh                                  after `setup_cluster.sh setup`: on that cluster
#   MASTER_IP=local ./run_mixed_training.sh                  on this machine, whatever was set up
#   RAY_ADDRESS=auto ./run_mixed_training.sh                 on the Ray that `ray start --head` started on this machine
#
# If setup_cluster.sh has set up a cluster, the run is on its head node, in a tmux session verl_training_<run>; the same commands
# work on the jumphost and on the head. MASTER_IP chooses between several clusters. Without a cluster the run is on this
# machine, in this terminal. KEY=VALUE is a Hydra override of config/mixed_dataset_grpo.yaml. Give the name of the run
# (EXPERIMENT_NAME or mixed.experiment=...) with every command.
# Settings come from the environment, then from the block below; an empty setting keeps the value of config/. The first
# start installs the Python environment into .venv (2 to 6 GB, some minutes).
#
#   -f, --follow      logs: until interrupted
#   --grace SECONDS   stop: time for the current step and its checkpoint (default 900; 0: no checkpoint)
#   --hosts FILE      the hosts of the cluster, see config/cluster/hosts.example
#   --dry-run         with start or resume: the same as dry-run
#   --retries N       start, resume: start the run again after a failure that a resume can mend, up to N times (RETRIES)
#   --no-sync         start, resume: copy no code; the hosts must have this commit
#   --yes             do not ask for confirmation
#
# Exit: 0 good, or the run is complete; 1 the run failed; 2 a setting or the usage is wrong; 130 interrupted
set -euo pipefail

REPO_ROOT="$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd)"
# shellcheck source=cluster/lib/common.sh
source "${REPO_ROOT}/cluster/lib/common.sh"
# shellcheck source=cluster/lib/bootstrap.sh
source "${REPO_ROOT}/cluster/lib/bootstrap.sh"
# shellcheck source=cluster/lib/remote.sh
source "${REPO_ROOT}/cluster/lib/remote.sh"
# shellcheck source=cluster/lib/keep_up.sh
source "${REPO_ROOT}/cluster/lib/keep_up.sh"
# shellcheck source=cluster/lib/training.sh
source "${REPO_ROOT}/cluster/lib/training.sh"

# --- settings; the environment overrides each ---------------------------------
# shellcheck disable=SC2034 # read by name: `settle`, load_cluster
{
  # the run
  PROFILE=""         # config/profile/*.yaml; empty: laptop where there is no GPU
  EXPERIMENT_NAME="" # name of the run and of its folder under runs/
  MODEL_PATH=""      # model folder; with laptop, leave it and both lists of files empty for the demo, which the run makes
  TRAIN_FILES=()     # parquet files: (data/one.parquet data/two.parquet); needed where MODEL_PATH is set
  VAL_FILES=()       # the same, for validation

  # the mixture: relative shares of every batch; 0 leaves a source out
  TACO_RATIO="" # code execution
  NQ_RATIO=""   # search
  MATH_RATIO="" # maths with tools

  # training
  LEARNING_RATE=""
  TRAIN_BATCH_SIZE=""     # prompts in a batch
  ROLLOUT_N=""            # trajectories per prompt
  MAX_RESPONSE_LENGTH=""  # tokens of a trajectory after its prompt, tool results included
  KL_COEF=""              # weight of the KL loss; above 0 switches it on
  TOTAL_TRAINING_STEPS="" # optimizer steps
  OVERRIDES=()            # more keys of config/: (mixed.seed=1 'trainer.logger=[console]'); the command line wins

  # a run that fails at night
  RETRIES="" # how often it is started again after a failure that a resume can mend; empty: 0
  ON_END=""  # a shell command that hears of the end in RUN_NAME, RUN_VERDICT, RUN_CAUSE: 'mail -s "$RUN_NAME" me </dev/null'

  # tools; each limit holds for all processes together
  TOOL_SERVER_URL=""       # a running tool server; empty: one is started with the run
  TOOL_MAX_WORKERS=""      # tool calls in flight
  TOOL_REQUEST_INTERVAL="" # seconds between two calls
  RATE_LIMIT_PER_MINUTE="" # tool calls a minute

  # machines; what setup_cluster.sh recorded (workers, ssh, ports) need not be repeated
  MASTER_IP=""          # head node; local: this machine alone; empty: the cluster that setup_cluster.sh set up, if any
  WORKER_NODES=()       # its workers: (10.0.0.2 10.0.0.3)
  HOSTS_FILE=""         # the same as --hosts FILE
  N_GPUS_PER_NODE=""    # training processes on each node
  NNODES=""             # nodes that train; empty: the head and WORKER_NODES
  RAY_PORT=""           # of the head; empty: 6379
  RAY_DASHBOARD_PORT="" # on 127.0.0.1 of the head; empty: 8265
  RAY_AUTH_MODE=""      # token or disabled; empty: token on a cluster
  RAY_TEMP_DIR=""       # Ray's logs and sockets; empty: Ray's own choice, or the cluster's
  WANDB_DIR=""          # empty: the run's folder
  CONDA_ENV=""          # use this conda environment and install nothing; empty: VENV
  CONDA_PATH=""         # conda's folder, or its bin/activate; empty: ~/miniconda3
  VENV=""               # use this virtual environment and install nothing; empty: .venv, made here
}

main() {
  local command=start verb="" hosts="" dry_run="${DRY_RUN:-0}"
  local -a overrides=() options=()
  FOLLOW="" ASSUME_YES="" GRACE_S="" NO_SYNC=""
  case "${1:-}" in
    start | status | logs | attach | stop | resume | dry-run | validate | fetch | dashboard | \
      report | diagnose | audit | limiter | watch | \
      folder | run_folder | session | launch | may_start) # those of the last line are called by this script on the head
      command="$1"
      shift
      ;;
  esac
  while (($#)); do
    case "$1" in
      -h | --help)
        usage "${BASH_SOURCE[0]}"
        return
        ;;
      --hosts)
        (($# > 1)) || die 2 "--hosts wants a file: see --help"
        hosts="$2"
        shift
        ;;
      --hosts=*) hosts="${1#--hosts=}" ;;
      --yes) ASSUME_YES=1 ;;
      --no-sync)
        [[ "${command}" == @(start|resume|dry-run) ]] || die 2 "--no-sync is for start only, not ${command}: see --help"
        NO_SYNC=1
        ;;
      --retries)
        [[ "${command}" == @(start|resume|dry-run) ]] || die 2 "--retries is for start only, not ${command}: see --help"
        [[ "${2:-}" =~ ^[0-9]+$ ]] || die 2 "--retries wants a whole number, not '${2:-}': see --help"
        FROM_ENVIRONMENT[RETRIES]="$2"
        shift
        ;;
      --dry-run) dry_run=1 ;;
      --grace)
        [[ "${command}" == stop && "${2:-}" =~ ^[0-9]+$ ]] || die 2 "--grace SECONDS is for stop only: see --help"
        GRACE_S="$2"
        shift
        ;;
      -f | --follow)
        [[ "${command}" == logs ]] || die 2 "$1 is for logs only: see --help"
        FOLLOW=1
        ;;
      *)
        if is_of_verl_mixed "${command}" && [[ "$1" == -* || "$1" != *=* ]]; then
          options+=("$1") # of verl-mixed
        elif [[ "$1" == -* ]]; then
          die 2 "unknown option $1: see --help"
        elif [[ "$1" == *=* || "$1" == '~'* ]]; then
          overrides+=("$1")
        elif [[ "$1" == @(start|resume) && "${command}" == @(launch|may_start) ]]; then
          verb="$1"
        else
          die 2 "not an override: '$1'; write KEY=VALUE, and one command at a time, first; see --help"
        fi
        ;;
    esac
    shift
  done
  if [[ "${dry_run}" == 1 ]]; then
    [[ "${command}" == @(start|resume|dry-run) ]] || die 2 "--dry-run is for start only, not ${command}: see --help"
    command=dry-run
  fi
  [[ "${command}" != dry-run ]] || DRY_RUN=1
  if [[ -n "${hosts}" ]]; then
    [[ -r "${hosts}" ]] || die 2 "cannot read --hosts ${hosts}: correct the name"
    FROM_ENVIRONMENT[HOSTS_FILE]="$(realpath -- "${hosts}")"
  fi
  check_block "${BASH_SOURCE[0]}" "${BLOCK[@]}"
  check_retries
  cd -- "${REPO_ROOT}"
  add_overrides "${overrides[@]}"
  [[ "${ON_HEAD:-0}" == 1 ]] || choose_cluster
  WORDS=(${verb:+"${verb}"} "${options[@]}" "${WORDS[@]}")
  if [[ "${ON_HEAD:-0}" != 1 ]] && is_cluster; then
    at_cluster "${command}" "${WORDS[@]}"
    return
  fi
  [[ "${ON_HEAD:-0}" == 1 ]] || refuse_settings_of_hosts
  settle "${SETTINGS[@]}" "${RUN_SETTINGS[@]}"
  [[ -z "${MASTER_IP}" ]] || enter_cluster
  if is_of_verl_mixed "${command}"; then
    of_run_here "${command}" "${WORDS[@]}"
    return
  fi
  case "${command}" in
    launch) launch "${WORDS[@]}" ;;
    dry-run) dry_run_here "${WORDS[@]}" ;;
    fetch | dashboard) die 2 "${command} is for a cluster: the run is on this machine; see --help" ;;
    *) "${command}_here" "${WORDS[@]}" ;;
  esac
}

# is_of_verl_mixed COMMAND: it is a command of verl-mixed about the run, whose options may follow.
is_of_verl_mixed() { [[ "$1" == @(report|diagnose|audit|limiter|watch) ]]; }

# is_cluster: the settings name a head or a hosts file.
is_cluster() {
  [[ -n "${FROM_ENVIRONMENT[MASTER_IP]:-${MASTER_IP}}" || -n "${FROM_ENVIRONMENT[HOSTS_FILE]:-${HOSTS_FILE}}" ]]
}

# at_cluster COMMAND OVERRIDES...: run the command for a cluster, from the jumphost or on the head.
at_cluster() {
  local command="$1"
  shift
  enter_jumphost
  case "${command}" in
    start | resume) start_at_head "${command}" "$@" ;;
    dry-run) dry_run_at_head "$@" ;;
    logs) logs_at_head "$@" ;;
    attach | fetch | watch) "${command}_at_head" "$@" ;;
    dashboard) dashboard_at_head ;;
    stop) at_head stop ${GRACE_S:+--grace "${GRACE_S}"} "$@" ;;
    *) at_head "${command}" "$@" ;;
  esac
}

main "$@"
