#!/usr/bin/env bash
# Train one policy on several sources at once, or resume the run where it stopped.
#
# Usage: run_mixed_training.sh [--help] [KEY=VALUE ...]
#
#   ./run_mixed_training.sh                                  the demo on this machine, no GPU needed
#   TACO_RATIO=0 EXPERIMENT_NAME=no_taco ./run_mixed_training.sh
#   ./run_mixed_training.sh trainer.total_training_steps=50 mixed.seed=1
#
# The first start installs the Python environment into .venv (2 to 6 GB, some minutes). The same command again
# resumes a run that was stopped or killed. KEY=VALUE is a Hydra override of config/mixed_dataset_grpo.yaml.
# Settings come from the environment, then from the block below; an empty one leaves the value of config/.
#
# Exit: 0 the run is complete, 1 it failed, 2 a setting is wrong, 130 it was interrupted
set -euo pipefail

REPO_ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=cluster/lib/common.sh
source "${REPO_ROOT}/cluster/lib/common.sh"
# shellcheck source=cluster/lib/bootstrap.sh
source "${REPO_ROOT}/cluster/lib/bootstrap.sh"

# --- settings; the environment overrides each ---------------------------------
# what to run, and where
export PROFILE="${PROFILE:-laptop}"           # config/profile/*.yaml: laptop (no GPU)
export EXPERIMENT_NAME="${EXPERIMENT_NAME:-}" # name of the run and of its folder under runs/
export MODEL_PATH="${MODEL_PATH:-}"           # model folder; empty with laptop: the demo model, made here
export TRAIN_FILES="${TRAIN_FILES:-}"         # parquet files, comma separated; empty with laptop: the demo data
export VAL_FILES="${VAL_FILES:-}"             # the same, for validation

# the mixture: shares of every batch, relative to one another; 0 leaves a source out
export TACO_RATIO="${TACO_RATIO:-}" # code execution
export NQ_RATIO="${NQ_RATIO:-}"     # search
export MATH_RATIO="${MATH_RATIO:-}" # maths with tools

# training
export LEARNING_RATE="${LEARNING_RATE:-}"
export TRAIN_BATCH_SIZE="${TRAIN_BATCH_SIZE:-}"         # prompts in a batch
export ROLLOUT_N="${ROLLOUT_N:-}"                       # trajectories per prompt
export TOTAL_TRAINING_STEPS="${TOTAL_TRAINING_STEPS:-}" # optimizer steps

# tools; the limits hold over all processes together
export TOOL_SERVER_URL="${TOOL_SERVER_URL:-}"             # a running tool server; empty: one is started with the run
export TOOL_MAX_WORKERS="${TOOL_MAX_WORKERS:-}"           # tool calls in flight
export TOOL_REQUEST_INTERVAL="${TOOL_REQUEST_INTERVAL:-}" # seconds between two calls
export RATE_LIMIT_PER_MINUTE="${RATE_LIMIT_PER_MINUTE:-}" # tool calls a minute

# machine
export MASTER_IP="${MASTER_IP:-}"                   # head node of a Ray cluster; empty: this machine alone
export WORKER_NODES="${WORKER_NODES:-}"             # its workers
export RAY_DASHBOARD_PORT="${RAY_DASHBOARD_PORT:-}" # on 127.0.0.1
export RAY_TEMP_DIR="${RAY_TEMP_DIR:-}"             # Ray's logs and sockets; empty: Ray's own choice
export WANDB_DIR="${WANDB_DIR:-}"                   # empty: the run's folder
export CONDA_ENV="${CONDA_ENV:-}"                   # use this conda environment and install nothing; empty: .venv
export CONDA_PATH="${CONDA_PATH:-}"                 # where conda lives; empty: ~/miniconda3

main() {
  local argument
  for argument in "$@"; do
    case "${argument}" in
      -h | --help)
        usage "${BASH_SOURCE[0]}"
        return
        ;;
      -*) die 2 "unknown option ${argument}: see --help" ;;
      *=* | '~'*) ;;
      *) die 2 "not an override: '${argument}'; write KEY=VALUE, see --help" ;;
    esac
  done
  cd -- "${REPO_ROOT}"
  bootstrap run
  exec verl-mixed train "$@"
}

main "$@"
