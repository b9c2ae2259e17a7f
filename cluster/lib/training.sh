# shellcheck shell=bash
# The functions of run_mixed_training.sh. Source this file after common.sh, bootstrap.sh and remote.sh, and before the
# settings block. It needs REPO_ROOT.
#
#   on this machine     start_here, resume_here, status_here, ...: with the Python environment, from REPO_ROOT
#   on the head         launch: the same run inside tmux session verl_training_<run>
#   from the jumphost   at_head COMMAND: the script again, over there, with ON_HEAD=1

# find_run makes it the session of the run, verl_training_<run>; `tmux attach -t verl_training` finds the only one.
readonly SESSIONS=verl_training
TMUX_SESSION="${SESSIONS}"

# Settings of a run, besides the cluster's SETTINGS. They are sent to the head with the run.
RUN_SETTINGS=(PROFILE EXPERIMENT_NAME MODEL_PATH TRAIN_FILES VAL_FILES TACO_RATIO NQ_RATIO MATH_RATIO LEARNING_RATE
  TRAIN_BATCH_SIZE ROLLOUT_N MAX_RESPONSE_LENGTH KL_COEF TOTAL_TRAINING_STEPS TOOL_SERVER_URL TOOL_MAX_WORKERS
  TOOL_REQUEST_INTERVAL RATE_LIMIT_PER_MINUTE N_GPUS_PER_NODE NNODES RETRIES ON_END)

# Cluster settings that a run needs. Settings of the host itself (Python, Ray's token) are in the host's file `env`.
HEAD_SETTINGS=(WORKER_NODES CONDA_ENV CONDA_PATH VENV WANDB_DIR RAY_TEMP_DIR RAY_PORT RAY_DASHBOARD_PORT RAY_AUTH_MODE)

# The names of the settings block: besides those, what leads to the head. OVERRIDES holds words of the command line.
# shellcheck disable=SC2034 # run_mixed_training.sh reads it
BLOCK=(MASTER_IP HOSTS_FILE "${RUN_SETTINGS[@]}" "${HEAD_SETTINGS[@]}" SSH_USER SSH_PORT SSH_KEY SSH_OPTIONS SSH_JUMP
  REMOTE_REPO OVERRIDES)

# Secrets come from the environment only. They are sent on stdin and in a file of mode 0600, which is removed once read.
# JUDGE_BASE_URL is the address that JUDGE_API_KEY belongs to, so that it is sent in the same way.
SECRETS=(WANDB_API_KEY TOOL_SERVER_TOKEN SERPER_API_KEY HF_TOKEN JUDGE_API_KEY JUDGE_BASE_URL)

# The values of the environment, saved as remote.sh saves those of SETTINGS.
for _setting in "${RUN_SETTINGS[@]}" OVERRIDES; do
  [[ -z "${!_setting:-}" ]] || FROM_ENVIRONMENT["${_setting}"]="${!_setting}"
done
unset _setting

# settle NAME...: take the environment's value, else the block's. An array of the block becomes one string of words; of
# files whose names have spaces, with commas.
settle() {
  local name
  for name in "$@"; do
    local value="${FROM_ENVIRONMENT["${name}"]:-}"
    if [[ -z "${value}" ]]; then
      local -n words="${name}"
      value="${words[*]:-}"
      [[ "${name}" != *_FILES || "$(declare -p "${name}" 2>/dev/null)" != "declare -a"* || "${words[*]}" == "${words[*]// /}" ]] ||
        value="$(printf '%s,' "${words[@]}")"
      unset -n words
    fi
    unset "${name}" # an array cannot become a string
    declare -g "${name}=${value}"
    [[ -z "${value}" ]] || export "${name?}" # an empty one is an unset one, also to Ray
  done
}

# check_retries: exit 2 unless RETRIES, of the environment or the block, is a whole number.
check_retries() {
  local given="${FROM_ENVIRONMENT[RETRIES]:-${RETRIES}}"
  [[ "${given:-0}" =~ ^[0-9]{1,6}$ ]] ||
    die 2 "RETRIES=${given}: want a whole number, 0 at least: how often a run that failed is started again"
}

# refuse_settings_of_hosts: a run on this machine would ignore them.
refuse_settings_of_hosts() {
  local name
  for name in CONTAINER_IMAGE CONTAINER_ENGINE CONTAINER_OPTIONS HOST_ENV SETUP_COMMANDS RAY_WORKER_PORTS; do
    [[ -z "${FROM_ENVIRONMENT["${name}"]:-}" ]] ||
      die 2 "${name} is for the hosts of a cluster, and this run is on this machine: unset it, and start this script in" \
        "the environment or the container that you want"
  done
}

# add_overrides WORD...: WORDS becomes OVERRIDES of the environment, or of the block, and then the WORDs. One whose key is
# among the WORDs is left out: the command line wins, and a head that gets all as WORDs adds nothing.
add_overrides() {
  local word keys=" " text="${FROM_ENVIRONMENT[OVERRIDES]:-}"
  local -a own=()
  # shellcheck disable=SC2128 # one string of words, where the block has no array
  if [[ -z "${text}" && "$(declare -p OVERRIDES)" != "declare -a"* ]]; then text="${OVERRIDES}"; fi
  if [[ -n "${text}" ]]; then
    text="$(xargs -r -n 1 printf '%s\n' <<<"${text}" 2>/dev/null)" ||
      die 2 "cannot read OVERRIDES as words: a quote has no end; write them as on the command line"
    mapfile -t own <<<"${text}"
  else
    own=("${OVERRIDES[@]}")
  fi
  for word in "$@"; do
    keys+="$(key_of "${word}") "
  done
  WORDS=()
  for word in "${own[@]}"; do
    [[ "${word}" == *=* || "${word}" == '~'* ]] ||
      die 2 "not an override: '${word}' in OVERRIDES; write KEY=VALUE, see --help"
    [[ "${keys}" == *" $(key_of "${word}") "* ]] || WORDS+=("${word}")
  done
  WORDS+=("$@")
}

# key_of OVERRIDE: its key, without the signs + ++ ~ before it.
key_of() {
  local key="${1%%=*}"
  printf '%s' "${key//[+~]/}"
}

# choose_cluster: if neither MASTER_IP nor HOSTS_FILE is given, MASTER_IP becomes the cluster that `setup` recorded here, or
# whose head this machine is. Exits with 2 if the choice is not clear. MASTER_IP=local, or RAY_ADDRESS, is this machine.
choose_cluster() {
  local file wanted here="MASTER_IP=local runs on this machine" why="which setup_cluster.sh recorded"
  local -a found=()
  if [[ "${FROM_ENVIRONMENT[MASTER_IP]:-${MASTER_IP}}" == local ]]; then
    [[ -z "${FROM_ENVIRONMENT[MASTER_IP]:-}" || -z "${FROM_ENVIRONMENT[HOSTS_FILE]:-}" ]] ||
      die 2 "MASTER_IP=local is this machine, and HOSTS_FILE=${FROM_ENVIRONMENT[HOSTS_FILE]} a cluster: give one of them"
    unset "FROM_ENVIRONMENT[MASTER_IP]" WORKER_NODES
    MASTER_IP="" HOSTS_FILE=""
    return
  fi
  [[ -z "${RAY_ADDRESS:-}" ]] && ! is_cluster || return 0
  for file in "${REPO_ROOT}"/.cluster/*/hosts; do
    [[ ! -e "${file}" ]] || found+=("$(head_of "${file}")")
  done
  if ((${#found[@]} == 0)); then # first: `sync` brings the block of setup_cluster.sh to the head, and no record
    why="of which this machine is the head"
    heads_here
  fi
  wanted="$(head_of_setup)"
  if [[ -z "${HOME_CLUSTER:-}" && -n "${wanted}" && " ${found[*]} " != *" ${wanted} "* ]]; then
    ((${#found[@]} == 0)) || here="MASTER_IP=${found[0]} runs on that cluster, which is set up; ${here}"
    die 2 "the block of setup_cluster.sh names the head ${wanted}, whose cluster is not set up: run" \
      "'./setup_cluster.sh setup' first; ${here}"
  fi
  ((${#found[@]} <= 1)) ||
    die 2 "several clusters were set up (${found[*]}): choose one, as in 'MASTER_IP=${found[0]} ./${0##*/}'; ${here}"
  ((${#found[@]} == 1)) || return 0
  MASTER_IP="${found[0]}"
  say "cluster ${MASTER_IP}, ${why}; ${here}"
}

# head_of HOSTS_FILE: the address of its head.
head_of() { sed -n '/^\[head\]/,/^\[/{/^[^[#;[:space:]]/{s/[[:space:]].*//p;q}}' "$1" 2>/dev/null; }

# head_of_setup: the head that the settings block of setup_cluster.sh names, if any.
head_of_setup() {
  local head hosts
  # shellcheck disable=SC2016 # for the other shell
  { read -r head && read -r hosts; } < <(settings_block "${REPO_ROOT}/setup_cluster.sh" |
    env -u MASTER_IP -u HOSTS_FILE bash -c 'source /dev/stdin; printf "%s\n" "${MASTER_IP-}" "${HOSTS_FILE-}"')
  [[ -n "${head}" || -z "${hosts}" ]] || head="$(head_of "${hosts}")"
  printf '%s\n' "${head}"
}

# heads_here: append to `found` the heads that are this machine, and set HOME_CLUSTER, the name of that cluster. Exits with
# 2 if it is only another node. The home folder may be one for all hosts, so each file `env` of setup names its head.
heads_here() {
  local id head nodes=""
  while read -r id head; do
    nodes="${id}, whose head is ${head}"
    # shellcheck disable=SC2034 # is_here reads it
    JUMPHOST_PYTHON="$(jumphost_python)" || exit
    ! is_here "${head}" || { found+=("${head}") && HOME_CLUSTER="${id}"; }
  done < <(for file in "${HOME:-}"/.verl_mixed/*/env; do
    [[ ! -r "${file}" ]] || sed -n -e 's/^export VERL_MIXED_CLUSTER=\([^ ]*\).*/\1/p' \
      -e 's/^export MASTER_IP=\([^ ]*\) .*/\1/p' "${file}" | paste -s -d ' '
  done | sort -u)
  [[ -z "${nodes}" || -n "${found[*]}" ]] ||
    die 2 "a cluster was set up for this user, not from this checkout (${nodes}): run this on its jumphost or its head, or" \
      "give MASTER_IP=local for a run on this machine"
}

# choose_profile: laptop where there is no GPU, else gpu.
choose_profile() {
  [[ -z "${PROFILE}" ]] || return 0
  export PROFILE=laptop
  nvidia-smi -L >/dev/null 2>&1 || return 0
  if [[ -e "${REPO_ROOT}/config/profile/gpu.yaml" ]]; then
    PROFILE=gpu
  else
    say "this machine has a GPU, but there is no config/profile/gpu.yaml: PROFILE=laptop, on the CPU"
  fi
}

# enter_cluster: on the head, load the file `env` that `setup` wrote: path of Python, Ray's token and address.
enter_cluster() {
  local wandb_dir="${WANDB_DIR}"
  export VERL_MIXED_CLUSTER="${VERL_MIXED_CLUSTER:-${MASTER_IP//[^A-Za-z0-9.-]/_}}" # as cluster/inventory.py has it
  CLUSTER_ENV="${HOME}/.verl_mixed/${VERL_MIXED_CLUSTER}/env"
  [[ -r "${CLUSTER_ENV}" ]] || return 0
  # shellcheck disable=SC1090 # written by setup
  source "${CLUSTER_ENV}"
  if [[ -n "${RAY_ADDRESS:-}" ]]; then
    MASTER_IP="${RAY_ADDRESS%:*}"
    export RAY_PORT="${RAY_ADDRESS##*:}"
  fi
  [[ -z "${wandb_dir}" ]] || export WANDB_DIR="${wandb_dir}"
}

# has_python: an environment exists, so a start would install nothing.
has_python() { has_cluster_python || has_environment; }

has_cluster_python() { [[ -r "${CLUSTER_ENV:-}" ]] && command -v verl-mixed >/dev/null; }

# use_python: the cluster's Python if `setup` named one, else the one that bootstrap.sh makes.
use_python() {
  has_cluster_python || bootstrap run
  choose_profile
}

# use_found_python: like use_python, for commands that only read: nothing is installed.
use_found_python() {
  has_python || die 2 "no Python environment in ${REPO_ROOT}/.venv on $(hostname), so nothing was started there:" \
    "'${0##*/} start' installs it"
  use_python
}

# find_run OVERRIDES...: RUN_FOLDER, RUN_HOLDER, RUN_STEP, RUN_TOTAL, RUN_CHECKPOINT, RUN_DONE of verl_mixed/run/name.py.
find_run() {
  local found
  found="$(python "${REPO_ROOT}/config/child.py" verl_mixed.commands.facts --facts -- "$@")" || exit 2
  eval "${found}" # quoted by shlex
  # shellcheck disable=SC2153 # that text sets it
  TMUX_SESSION="${SESSIONS}_${RUN_FOLDER##*/}"
  TMUX_SESSION="${TMUX_SESSION//[^A-Za-z0-9_-]/_}" # tmux takes no dot and no colon
}

session_there() { tmux has-session -t "=${TMUX_SESSION}" 2>/dev/null; }

# pane FORMAT: something of the run's pane.
pane() { tmux display-message -p -t "=${TMUX_SESSION}:" "$1"; }

# session_mark NAME: a variable of the session's environment; empty where it is not set.
session_mark() {
  local line
  line="$(tmux show-environment -t "=${TMUX_SESSION}" "$1" 2>/dev/null)" || return 0
  printf '%s\n' "${line#*=}"
}

# session_ended: the exit code of the session's launcher; empty while it runs.
session_ended() {
  local code
  code="$(session_mark VERL_MIXED_EXIT)"
  printf '%s' "${code:+, ended with exit ${code}}"
}

# --- on this machine ----------------------------------------------------------

start_here() {
  use_python
  exec verl-mixed train "$@"
}

resume_here() {
  use_python
  find_run "$@"
  refuse_to_resume
  # shellcheck disable=SC2153 # find_run sets it
  ((RUN_DONE)) || say "resuming ${RUN_FOLDER} from global_step_${RUN_CHECKPOINT}"
  exec verl-mixed train "$@"
}

refuse_to_resume() {
  [[ -z "${RUN_HOLDER}" ]] ||
    die 2 "cannot resume ${RUN_FOLDER}: it is running (${RUN_HOLDER}, step ${RUN_STEP}); see '${0##*/} status'"
  ((RUN_DONE || RUN_CHECKPOINT)) ||
    die 2 "nothing to resume: ${RUN_FOLDER} on $(hostname) has no checkpoint, or trainer.resume_mode=disable; '${0##*/} start' begins it"
}

status_here() {
  run_folder_here "$@" >/dev/null
  verl-mixed watch "${RUN_FOLDER}"
  if [[ -n "${RUN_HOLDER}" ]]; then
    printf 'running      %s\n' "${RUN_HOLDER}"
  elif ((RUN_DONE)); then
    printf 'complete     all %s steps\n' "${RUN_TOTAL}"
  elif ((RUN_CHECKPOINT)); then
    printf 'stopped      goes on from global_step_%s: %s resume\n' "${RUN_CHECKPOINT}" "${0##*/}"
  else
    printf 'stopped      before its first checkpoint: %s start\n' "${0##*/}"
  fi
  printf 'folder       %s\n' "${PWD}/${RUN_FOLDER}"
  if session_there; then
    printf 'tmux         %s (%s%s)\n' "${TMUX_SESSION}" "$(session_mark VERL_MIXED_RUN)" "$(session_ended)"
  fi
}

# --- commands of verl-mixed about the run ---------------------------------------

# of_run_here COMMAND [OPTION ...] [OVERRIDE ...]: `verl-mixed COMMAND` for the run's folder; options go to the command.
of_run_here() {
  local command="$1"
  shift
  split_words "$@"
  run_folder_here "${OF_RUN[@]}" >/dev/null
  exec verl-mixed "${command}" "${RUN_FOLDER}" "${OF_COMMAND[@]}"
}

# split_words WORD...: OF_RUN becomes the overrides, which say what run it is, and OF_COMMAND the other words.
split_words() {
  local word
  OF_RUN=() OF_COMMAND=()
  for word in "$@"; do
    if [[ "${word}" == *=* && "${word}" != -* ]]; then OF_RUN+=("${word}"); else OF_COMMAND+=("${word}"); fi
  done
}

# run_folder_here OVERRIDES...: the run's folder; exits where there is none.
run_folder_here() {
  use_found_python
  find_run "$@"
  [[ -e "${RUN_FOLDER}/config.yaml" ]] ||
    die 1 "no run in ${RUN_FOLDER} on $(hostname): '${0##*/} start' begins it, EXPERIMENT_NAME names another"
  printf '%s\n' "${PWD}/${RUN_FOLDER}"
}

# folder_here OVERRIDES...: the run's folder, for a jumphost that follows the log.
folder_here() {
  use_found_python
  find_run "$@"
  [[ -e "${RUN_FOLDER}/train.log" ]] ||
    die 1 "no ${RUN_FOLDER}/train.log on $(hostname): the trainer has not started yet; see '${0##*/} status' or 'attach'"
  printf '%s\n' "${PWD}/${RUN_FOLDER}"
}

logs_here() {
  local folder
  folder="$(folder_here "$@")" || exit
  show_log "${folder}"
}

# show_log FOLDER [HOST]: the end of the log; with --follow, until interrupted. A remote `tail -f` gets a terminal,
# because otherwise it would not end with this script.
show_log() {
  local -a show=(tail -n "${LOG_LINES:-100}" ${FOLLOW:+-f} -- "$1/train.log")
  if (($# == 1)); then
    "${show[@]}"
  elif [[ -n "${FOLLOW}" && -t 0 && -t 1 ]]; then
    remote_tty "$2" "${show[@]}"
  else
    remote "$2" "${show[@]}"
  fi
}

# session_here OVERRIDES...: the name of the run's tmux session.
session_here() {
  use_found_python
  find_run "$@"
  session_there || die 1 "no tmux session ${TMUX_SESSION} on $(hostname): no run was started in one, or its host was" \
    "restarted; '${0##*/} logs -f' follows a run's log$(other_sessions)"
  printf '%s\n' "${TMUX_SESSION}"
}

# other_sessions: the sessions of other runs here, in words.
other_sessions() {
  local names
  names="$(tmux list-sessions -F '#{session_name}' 2>/dev/null | grep "^${SESSIONS}_" | paste -sd' ' -)" || true
  printf '%s' "${names:+; other runs are in ${names}}"
}

attach_here() {
  session_here "$@" >/dev/null
  tmux attach -t "=${TMUX_SESSION}"
}

stop_here() {
  use_found_python
  find_run "$@"
  run verl-mixed stop ${GRACE_S:+--grace "${GRACE_S}"} "${RUN_FOLDER}"
}

validate_here() {
  local code=0 other=0
  use_python
  verl-mixed check "$@" || code=$?
  verl-mixed doctor "$@" || other=$?
  ((other <= code)) || code="${other}"
  return "${code}"
}

# dry_run_here: print the commands of a start, and the resolved config if there is a Python to resolve it.
dry_run_here() {
  if ! has_python; then
    choose_profile
    say "not installed yet; the start would make ${REPO_ROOT}/.venv first (requirements/torch.txt, laptop.lock)"
    show_settings
    run verl-mixed train "$@"
    return
  fi
  use_python
  show_settings
  run verl-mixed train "$@"
  verl-mixed check "$@"
}

# show_settings: print the settings that have a value, without secrets.
show_settings() {
  local name
  for name in MASTER_IP "${RUN_SETTINGS[@]}" "${HEAD_SETTINGS[@]}"; do
    [[ -z "${!name:-}" ]] || printf '  %s=%q\n' "${name}" "${!name}" >&2
  done
  for name in "${SECRETS[@]}"; do
    [[ -z "${!name:-}" ]] || printf '  %s=(secret)\n' "${name}" >&2
  done
  show_forwarded
}

# --- on the head: the run in tmux ---------------------------------------------

# launch VERB OVERRIDES...: start or resume in tmux session verl_training here, and wait until the trainer runs or the
# launcher has ended. Refuses a second start, or says what it goes on from.
launch() {
  local verb="$1" script log_before
  shift
  command -v tmux >/dev/null || die 1 "no tmux on $(hostname): install it; a run lives in session ${TMUX_SESSION}"
  use_python
  find_run "$@"
  refuse_second "${verb}"
  if ((RUN_DONE)); then
    say "complete: ${RUN_FOLDER} on $(hostname) has all ${RUN_TOTAL} steps; nothing is started"
    say "  more steps: TOTAL_TRAINING_STEPS; another run: EXPERIMENT_NAME; its report: ${PWD}/${RUN_FOLDER}/report.html"
    return
  elif ((RUN_CHECKPOINT)); then
    say "resuming ${RUN_FOLDER} on $(hostname) from global_step_${RUN_CHECKPOINT} of ${RUN_TOTAL}"
  else
    say "starting ${RUN_FOLDER} on $(hostname)"
  fi
  if session_there; then
    run tmux kill-session -t "=${TMUX_SESSION}" # ours, and its run has ended
  fi
  log_before="$(log_size)"
  script="$(write_start_script start "$@")" || exit
  start_session bash "${script}" || {
    rm -f -- "${script}"
    die 1 "$(hostname): tmux did not start session ${TMUX_SESSION} (see above); another start at the same time?"
  }
  wait_for_trainer "${log_before}"
  rm -f -- "${script}" # it removes itself; this is for one that never ran
  say_next
}

# start_session CMD...: in one call of tmux, so that remain-on-exit holds before the command can end. A server that is
# started by it has no secret in its environment, and no mark that `cleanup` ends processes by: other people's sessions
# may come to live there.
start_session() (
  cluster="${VERL_MIXED_CLUSTER:-}"
  unset "${SECRETS[@]}" VERL_MIXED_CLUSTER VERL_MIXED_NODE
  run tmux new-session -d -s "${TMUX_SESSION}" -x 160 -y 48 "$@" \; \
    set-option -w -t "${TMUX_SESSION}" remain-on-exit on \; \
    set-environment -t "${TMUX_SESSION}" VERL_MIXED_CLUSTER "${cluster}" \; \
    set-environment -t "${TMUX_SESSION}" VERL_MIXED_RUN "${RUN_FOLDER}"
)

# may_start_here VERB OVERRIDES...: refuse what `launch` would refuse, before a start changes anything on the hosts. A head
# without an environment has no run.
may_start_here() {
  local verb="$1"
  shift
  has_python || return 0
  use_found_python
  find_run "$@"
  refuse_second "${verb}"
}

# refuse_second VERB: exit 2 if this run is active, or another run is in its tmux session; a resume needs a checkpoint.
refuse_second() {
  local other="" place=""
  if session_there; then
    other="$(session_mark VERL_MIXED_RUN)"
    [[ "${other}" != "${RUN_FOLDER}" ]] || place=" in tmux session ${TMUX_SESSION}"
  fi
  [[ -z "${RUN_HOLDER}" ]] ||
    die 2 "${RUN_FOLDER} is running already${place}: ${RUN_HOLDER}, step ${RUN_STEP} of ${RUN_TOTAL}; see it with" \
      "'${0##*/} status' or 'attach', end it with 'stop', or choose another EXPERIMENT_NAME"
  [[ "$1" != resume ]] || refuse_to_resume
  session_there || return 0
  [[ -n "${other}" ]] || die 2 "tmux session ${TMUX_SESSION} on $(hostname) was not made by this script, so it is left" \
    "alone: end it with 'tmux kill-session -t ${TMUX_SESSION}' if it is yours"
  [[ "$(pane '#{pane_dead}')" == 1 ]] ||
    die 2 "tmux session ${TMUX_SESSION} on $(hostname) is running ${other}: wait for it, or end it with" \
      "'EXPERIMENT_NAME=${other##*/} ${0##*/} stop'"
}

log_size() { stat -c %s -- "${RUN_FOLDER}/train.log" 2>/dev/null || echo 0; }

# write_start_script VERB OVERRIDES...: a file of mode 0600 that holds the settings and the command, and removes itself.
# It notes the exit code in the session: tmux 3.3a loses that of one pane in five.
write_start_script() {
  local file
  (umask 077 && mkdir -p -- "${HOME}/.verl_mixed") && file="$(mktemp "${HOME}/.verl_mixed/start.XXXXXX")" || return 1
  # shellcheck disable=SC2016 # for the file's own shell
  {
    # what `cleanup` knows the run's processes by; no shell of a user has it
    printf 'export VERL_MIXED_NODE=%q\n' "${VERL_MIXED_CLUSTER:-}/${MASTER_IP:-}" &&
      echo 'rm -f -- "$0"; trap : INT; launch_once() (' && head_script "${REPO_ROOT}" "$@" && echo ')' &&
      declare -f start_killed_again && printf 'start_killed_again %q; code=$?\n' "${RETRIES:-0}" &&
      echo 'echo "ended with exit ${code} at $(date)"' &&
      echo "tmux set-environment -t ${TMUX_SESSION} VERL_MIXED_EXIT \"\${code}\"; exit \"\${code}\""
  } >"${file}" || return 1
  printf '%s\n' "${file}"
}

# wait_for_trainer LOG_SIZE: until train.log grows over LOG_SIZE. Leaves with the launcher's exit code when it ends first.
wait_for_trainer() {
  local deadline=$((SECONDS + ${START_TIMEOUT_S:-120})) dead
  while ((SECONDS < deadline)); do
    session_there || die 1 "tmux session ${TMUX_SESSION} on $(hostname) is gone: it was ended from elsewhere"
    dead="$(pane '#{pane_dead}')"
    [[ "${dead}" != 1 ]] || leave_as_launcher
    (($(log_size) <= $1)) || return 0
    sleep 0.3
  done
  say "still preparing after ${START_TIMEOUT_S:-120} s: $(last_lines 1)"
}

# last_lines LINES: the last lines that the launcher printed.
last_lines() { tmux capture-pane -p -S -60 -t "=${TMUX_SESSION}:" | sed '/^[[:space:]]*$/d' | tail -n "$1"; }

# leave_as_launcher: print the text of the ended pane and exit with its code; 1 if a signal ended its shell too.
leave_as_launcher() {
  local status
  status="$(session_mark VERL_MIXED_EXIT)"
  status="${status:-1}"
  last_lines 20 >&2
  ((status == 0)) || say "error: ${RUN_FOLDER} ended at once with exit ${status}; its last lines are above"
  exit "${status}"
}

# say_next: print the commands for the running run. SSH_HEAD is the jumphost's ssh command; empty on the head itself.
say_next() {
  local port="${RAY_DASHBOARD_PORT:-8265}" me="./${0##*/}"
  say "running in tmux session ${TMUX_SESSION} on $(hostname)"
  say "  state       ${me} status"
  say "  log         ${me} logs -f        (${PWD}/${RUN_FOLDER}/train.log)"
  if [[ -n "${SSH_HEAD:-}" ]]; then
    say "  watch       ${SSH_HEAD} -t 'tmux attach -t ${TMUX_SESSION}'        (Ctrl-b d leaves it)"
    say "  dashboard   ${SSH_HEAD} -N -L ${port}:127.0.0.1:${port}, then http://127.0.0.1:${port}"
  else
    say "  watch       tmux attach -t ${TMUX_SESSION}        (Ctrl-b d leaves it)"
    say "  dashboard   http://127.0.0.1:${port}"
  fi
  say "  end         ${me} stop"
}

# --- from the jumphost --------------------------------------------------------

# head_script REPO COMMAND WORD...: the text that a bash on the head reads: settings, secrets, and a call of this script.
head_script() {
  local repo="$1" name
  shift
  # before the first sync nothing can run there, and older code has no may_start; sync itself refuses under a live run
  [[ "$1" != may_start ]] || printf 'grep -qs may_start %q/run_mixed_training.sh || exit 0\n' "${repo}"
  printf 'cd -- %q || { echo "no repository there: setup_cluster.sh sync brings it" >&2; exit 1; }\n' "${repo}"
  printf 'export %s=%q\n' ON_HEAD 1 MASTER_IP "${RAY_HEAD:-${MASTER_IP}}" \
    VERL_MIXED_CLUSTER "${CLUSTER_ID:-${VERL_MIXED_CLUSTER:-}}" SSH_HEAD "${SSH_HEAD:-}"
  for name in "${RUN_SETTINGS[@]}" "${HEAD_SETTINGS[@]}" "${SECRETS[@]}"; do
    [[ -z "${!name:-}" ]] || printf 'export %s=%q\n' "${name}" "${!name}"
  done
  forwarded_lines
  name="${FROM_ENVIRONMENT[OVERRIDES]:-}" # the block there must not come instead
  [[ -z "${name}" ]] || printf 'export OVERRIDES=%q\n' "${name}"
  printf 'exec ./run_mixed_training.sh%s </dev/null\n' "$(printf ' %q' "$@")"
}

# at_head COMMAND WORD...: run this script on the head and return its exit code. There is no pipeline, because a dry run
# reads nothing, and the writer of a pipe without a reader fails with SIGPIPE.
at_head() {
  local code=0
  if ((HEAD_IS_HERE)); then
    run bash -s < <(head_script "${HOST_REPO[${HEAD}]}" "$@") || code=$?
  else
    remote_stdin "${HEAD}" bash -s < <(head_script "${HOST_REPO[${HEAD}]}" "$@") || code=$?
    check_answer "${code}"
  fi
  return "${code}"
}

# check_answer CODE: exit if ssh itself failed (255).
check_answer() {
  (($1 != 255)) || die 1 "${HEAD}: no answer by ssh (see above); './setup_cluster.sh status' shows every host"
}

# enter_jumphost: load the cluster's settings and hosts, and find out whether this machine is the head.
enter_jumphost() {
  HOSTS_GIVEN="${FROM_ENVIRONMENT[HOSTS_FILE]:-${HOSTS_FILE}}"
  load_cluster
  settle "${RUN_SETTINGS[@]}"
  HEAD="${HOST_NAMES[0]}"
  RAY_HEAD="${HOST_IP[${HEAD}]:-${HEAD}}" # an alias of ssh has no address here
  CLUSTER_ID="${HOME_CLUSTER:-${CLUSTER_ID}}"
  case "${RAY_ADDRESS:-auto}" in
    auto | "${HEAD}:${RAY_PORT}" | "${RAY_HEAD}:${RAY_PORT}" | "[${RAY_HEAD}]:${RAY_PORT}") ;;
    *) die 2 "MASTER_IP=${MASTER_IP} (${RAY_HEAD}:${RAY_PORT}) and RAY_ADDRESS=${RAY_ADDRESS} name two Rays: unset one of them" ;;
  esac
  HEAD_IS_HERE=0
  SSH_HEAD=""
  if is_here "${RAY_HEAD}" || is_here "${HEAD}"; then
    HEAD_IS_HERE=1
  else
    ssh_command "${HEAD}"
    local -n words="HOST_SSH_${HOST_INDEX[${HEAD}]}"
    SSH_HEAD="$(printf '%q ' ssh "${words[@]}" "${HOST_TARGET[${HEAD}]}")"
    SSH_HEAD="${SSH_HEAD% }"
  fi
}

# setup_cluster WORD...: run setup_cluster.sh for this cluster, with the same values of the environment.
setup_cluster() {
  local name
  local -a environment=()
  for name in "${SETTINGS[@]}"; do
    [[ -z "${FROM_ENVIRONMENT["${name}"]:-}" ]] || environment+=("${name}=${FROM_ENVIRONMENT["${name}"]}")
  done
  run env "${environment[@]}" MASTER_IP="${MASTER_IP}" ${HOSTS_GIVEN:+HOSTS_FILE="${HOSTS_GIVEN}"} \
    "${REPO_ROOT}/setup_cluster.sh" "$@"
}

# start_at_head VERB OVERRIDES...: ask whether the run may start, check the cluster, copy the code to its hosts, start the
# run on the head.
start_at_head() {
  local verb="$1"
  shift
  if ((HEAD_IS_HERE)) && [[ ! -e "${CLUSTER_RECORD}/hosts" && -z "${HOSTS_GIVEN}${WORKER_NODES}" ]]; then
    say "this machine is the head, and the cluster was set up elsewhere: no code is copied to the hosts"
    at_head launch "${verb}" "$@"
    return
  fi
  setup_cluster status >&2 ||
    die 1 "the cluster of MASTER_IP=${MASTER_IP} is not complete (see above): run './setup_cluster.sh setup', then" \
      "start again"
  at_head may_start "${verb}" "$@" || exit
  setup_cluster sync ${NO_SYNC:+--check} ${ASSUME_YES:+--yes} >&2 ||
    die 1 "the hosts do not all have this code (see above); './setup_cluster.sh sync' copies it, and a start with" \
      "--no-sync takes what the hosts have, where they have all the same commit"
  at_head launch "${verb}" "$@"
}

# dry_run_at_head: print every command of a start from this machine, and the commands on the head.
dry_run_at_head() {
  local there
  start_at_head start "$@"
  show_settings
  say "and there, in the session of the run (RUN: its name):"
  there="ON_HEAD=1 MASTER_IP=${RAY_HEAD} ./run_mixed_training.sh"
  say "+ cd -- ${HOST_REPO[${HEAD}]@Q}"
  say "+ ${there} launch start$(printf ' %q' "$@")"
  say "+$(printf ' %q' tmux new-session -d -s "${SESSIONS}_${EXPERIMENT_NAME:-RUN}" bash -c "${there} start$(printf ' %q' "$@")")"
  [[ -z "${CONTAINER_IMAGE:-}" ]] || printed "${HEAD}" run "${SESSIONS}_${EXPERIMENT_NAME:-RUN}" "$(names_of_run)" verl-mixed train "$@"
}

# names_of_run: the variables that the run has from here, on one line.
names_of_run() {
  local name
  for name in MASTER_IP "${RUN_SETTINGS[@]}" "${HEAD_SETTINGS[@]}" "${SECRETS[@]}"; do
    [[ -z "${!name:-}" ]] || printf '%s\n' "${name}"
  done | cat - <(
    printf "%s\n" VERL_MIXED_NODE VERL_MIXED_CLUSTER ON_HEAD
    forwarded
  ) | paste -sd' ' -
}

attach_at_head() {
  local session
  session="$(at_head session "$@")" || exit
  session="${session##*$'\n'}" # after what a .bashrc there prints
  if ((HEAD_IS_HERE)); then
    tmux attach -t "=${session}"
  else
    remote_tty "${HEAD}" tmux attach -t "=${session}"
  fi
}

# fetch_at_head OVERRIDES...: copy the run's files, without its checkpoints, to runs/ here.
fetch_at_head() {
  local folder name
  folder="$(at_head run_folder "$@")" || exit
  folder="${folder##*$'\n'}"
  name="${folder##*/}"
  ((HEAD_IS_HERE == 0)) || die 2 "the run is on this machine, in ${folder}: nothing is fetched"
  run mkdir -p -- "runs/${name}"
  if [[ "${DRY_RUN:-0}" == 1 ]]; then
    remote "${HEAD}" tar -C "${folder}" --exclude=./checkpoints --exclude=./export -czf - .
    return
  fi
  remote "${HEAD}" tar -C "${folder}" --exclude=./checkpoints --exclude=./export -czf - . |
    tar -C "runs/${name}" --no-same-owner -xzf - || die 1 "the run's files could not be fetched (see above)"
  say "fetched ${PWD}/runs/${name} (without checkpoints); its report: ${PWD}/runs/${name}/report.html"
}

# watch_at_head WORD...: with a terminal, the screen of `verl-mixed watch`.
watch_at_head() {
  local folder
  if ((HEAD_IS_HERE)) || [[ ! -t 0 || ! -t 1 ]]; then
    at_head watch "$@"
    return
  fi
  split_words "$@"
  folder="$(at_head run_folder "${OF_RUN[@]}")" || exit
  # shellcheck disable=SC2016 # for the far shell
  remote_tty "${HEAD}" bash -c '. ~/.verl_mixed/"$1"/env && exec verl-mixed watch "${@:2}"' watch "${CLUSTER_ID}" \
    "${folder##*$'\n'}" "${OF_COMMAND[@]}"
}

# dashboard_at_head: hold the tunnel to the cluster's dashboard open, until interrupted.
dashboard_at_head() {
  local port="${RAY_DASHBOARD_PORT:-8265}" words=""
  [[ "${RAY_AUTH_MODE:-token}" != token ]] || words="; it asks for the token in ${CLUSTER_RECORD}/token"
  say "dashboard    http://127.0.0.1:${port}${words}"
  ((HEAD_IS_HERE == 0)) || return 0
  ssh_command "${HEAD}"
  say "             while this command goes on (Ctrl-C ends it)"
  run "${SSH_COMMAND[@]}" -o ExitOnForwardFailure=yes -N -L "${port}:127.0.0.1:${port}" "${HOST_TARGET[${HEAD}]}" || {
    local code=$?
    ((code == 130)) || die 1 "${HEAD}: no tunnel (see above); another port of this machine: -L in 'ssh -N -L" \
      "9000:127.0.0.1:${port} ${HOST_TARGET[${HEAD}]}'"
  }
}

logs_at_head() {
  local folder
  folder="$(at_head folder "$@")" || exit
  folder="${folder##*$'\n'}" # after what a .bashrc there prints
  if ((HEAD_IS_HERE)); then
    show_log "${folder}"
  else
    show_log "${folder}" "${HEAD}"
  fi
}
