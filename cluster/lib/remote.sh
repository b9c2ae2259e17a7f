# shellcheck shell=bash
# The cluster's settings and hosts, and functions that run a command on a host. Source this file after common.sh and
# BEFORE the settings block, because it saves the values of the environment. It needs REPO_ROOT. cluster/inventory.py
# decides the values.
#
#   check_block SCRIPT ...  refuse a variable in the settings block that no one reads
#   load_cluster            settings and hosts: environment > hosts file > block > what `setup` recorded > default
#   host_named WORD         the host of that address, or of that session name (head, node0)
#   run CMD...              print the command; run it unless DRY_RUN=1
#   remote HOST CMD...      run it on HOST with stdin closed; remote_stdin: with stdin; remote_tty: with a terminal. Where
#                           HOST is this machine, without ssh
#   node HOST SUB [ARG...]  run a subcommand of cluster/lib/node.sh on HOST; the host needs only bash

# shellcheck disable=SC2034 # the scripts that source this file read them
SETTINGS=(MASTER_IP WORKER_NODES CONDA_ENV WANDB_DIR CONDA_PATH VENV RAY_TEMP_DIR RAY_PORT RAY_DASHBOARD_PORT
  RAY_DASHBOARD_HOST RAY_AUTH_MODE SSH_USER SSH_PORT SSH_KEY SSH_OPTIONS SSH_JUMP REMOTE_REPO SHARED_DIRS NUM_CPUS
  NUM_GPUS OBJECT_STORE_MEMORY HOSTS_FILE ENV_FORWARD HOST_ENV SETUP_COMMANDS
  CONTAINER_IMAGE CONTAINER_ENGINE CONTAINER_OPTIONS RAY_WORKER_PORTS)

# The values of the environment, saved before a settings block assigns its own, so that the environment overrides it.
declare -A FROM_ENVIRONMENT=()
for _setting in "${SETTINGS[@]}"; do
  [[ -z "${!_setting:-}" ]] || FROM_ENVIRONMENT["${_setting}"]="${!_setting}"
done
unset _setting

run() {
  printf '+%s\n' "$(printf ' %q' "$@")" >&2
  [[ "${DRY_RUN:-0}" == 1 ]] || "$@"
}

# jumphost_python: the first Python 3.10 or newer; no package is needed.
jumphost_python() {
  local candidate
  for candidate in ${PYTHON:+"${PYTHON}"} python3 python3.13 python3.12 python3.11 python3.10; do
    if "${candidate}" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
      printf '%s\n' "${candidate}"
      return
    fi
  done
  die 2 "no Python 3.10 or newer on this machine: setup_cluster.sh needs one (without any package);" \
    "install one or name it in PYTHON"
}

# compute MODULE ARG...: run a standard-library module of this checkout.
compute() {
  PYTHONPATH="${REPO_ROOT}" PYTHONDONTWRITEBYTECODE=1 "${JUMPHOST_PYTHON}" "${REPO_ROOT}/config/child.py" "$@"
}

# settings_block SCRIPT: the lines of its settings block.
settings_block() { sed -n '/^# --- settings;/,/^}/p' "$1" 2>/dev/null; }

# Variables that the scripts read, and that a block may set although it does not list them.
readonly ALSO_READ=" PYTHON TORCH_INDEX_URL START_TIMEOUT_S STOP_GRACE_S RUN_GRACE_S SSH_TIMEOUT_S LOG_LINES "

# set_in_block SCRIPT: the names that the block assigns: not `export`, which has other readers, and no line of an array.
set_in_block() {
  settings_block "$1" | awk '
    in_array { in_array = !/\)[[:space:]]*(#.*)?$/; next }
    match($0, /^[[:space:]]*[A-Za-z_][A-Za-z0-9_]*[+]?=/) {
      name = substr($0, 1, RLENGTH)
      gsub(/[[:space:]+=]/, "", name)
      print name
      in_array = /=\([^)]*$/
    }'
}

# check_block SCRIPT NAME...: exit 2 if the settings block of the script sets variables that are none of the NAMEs, and
# that it does not use itself.
check_block() {
  local script="$1" name other words unknown=0
  shift
  for name in $(set_in_block "${script}"); do
    [[ " $* ${ALSO_READ}" != *" ${name} "* ]] || continue
    [[ " ${SECRETS[*]:-} " == *" ${name} "* ]] ||
      ! settings_block "${script}" | grep -E "[$][{]?${name}\>" >/dev/null || continue
    unknown=1
    # grep's exit code says only whether it found a line: none is no fault
    other="$(cd -- "${REPO_ROOT}" && grep -lsE "^ +${name}=" run_mixed_training.sh setup_cluster.sh)" || true
    other="$(grep -vxF -- "${script##*/}" <<<"${other}")" || true
    if [[ " ${SECRETS[*]:-} " == *" ${name} "* ]]; then
      words="a secret comes from the environment only: remove it there, and 'export ${name}=...' before the start"
    elif [[ -n "${other}" ]]; then
      words="it is a setting of ${other}, and is read there only"
    else
      words="$(nearest_setting "${name^^}" "$@")"
      words="there is no such setting${words:+; the nearest is ${words}}; a key of Hydra belongs in OVERRIDES of"
      words+=" run_mixed_training.sh, a variable of another program in the environment"
    fi
    say "error: ${name} in the settings block of ${script##*/}: ${words}"
  done
  ((unknown == 0)) || exit 2
}

# nearest_setting NAME KNOWN...: the known name that is spelled most like NAME, if any is.
nearest_setting() {
  local python
  python="$(jumphost_python 2>/dev/null)" || return 0
  "${python}" -c 'import difflib, sys
print(*difflib.get_close_matches(sys.argv[1], sys.argv[2:], n=1, cutoff=0.5))' "$@"
}

# given_settings: `environment NAME VALUE` or `block NAME VALUE`, NUL after each word. An array arrives quoted for shlex.
given_settings() {
  local name value
  for name in "${SETTINGS[@]}"; do
    if [[ -n "${FROM_ENVIRONMENT[${name}]:-}" ]]; then
      printf '%s\0' environment "${name}" "${FROM_ENVIRONMENT[${name}]}"
    elif [[ "$(declare -p "${name}" 2>/dev/null)" == "declare -a"* ]]; then
      local -n array="${name}"
      value="${array[*]@Q}"
      unset -n array
      [[ -z "${value}" ]] || printf '%s\0' block "${name}" "${value}"
    elif [[ -n "${!name:-}" ]]; then
      printf '%s\0' block "${name}" "${!name}"
    fi
  done
}

# records: the folder with a record per cluster: of this checkout, else the one that `setup` left on a head, if this is one.
records() {
  local file
  for file in "${REPO_ROOT}"/.cluster/*/hosts "${HOME:-}"/.verl_mixed/*/hosts; do
    [[ -e "${file}" ]] || continue
    printf '%s\n' "${file%/*/hosts}"
    return
  done
  printf '%s\n' "${REPO_ROOT}/.cluster"
}

# load_cluster: sets every name of SETTINGS to a string, and
#   CLUSTER_ID, CLUSTER_RECORD (.cluster/<MASTER_IP>), HOST_NAMES (head first),
#   RECORDED_WORKERS (at the last `setup`), LEFT_OUT (those of them that are not in the list now),
#   HOST_SESSION[name] (head, node0, ...), HOST_IP[name], HOST_REPO[name], HOST_TARGET[name] (user@address),
#   HOST_SETTINGS[name] (assignments for node.sh), HOST_SSH_<i> (ssh's words for the i-th host),
#   WORK (a private folder, gone at the end of the script).
load_cluster() {
  local resolved name
  JUMPHOST_PYTHON="$(jumphost_python)" || exit
  resolved="$(given_settings | compute cluster.inventory "${REPO_ROOT}" "$(records)")" || exit 2
  for name in "${SETTINGS[@]}"; do
    unset "${name}" # an array of the block cannot become a string
  done
  declare -gA IS_LOCAL=() HOST_INDEX=() HOST_SESSION=() HOST_IP=() HOST_REPO=() HOST_TARGET=() HOST_SETTINGS=()
  # every value on these lines was quoted by shlex
  eval "${resolved}" || exit 2
  WORK="$(mktemp -d /tmp/verl_mixed.XXXXXX)" || die 1 "cannot make a folder under /tmp" # 0700; a socket's path is short
  trap close_remotes EXIT
}

# close_remotes: end this script's ssh master connections and remove its files. It is the EXIT trap; call it before `exec`.
close_remotes() {
  local socket
  for socket in "${WORK}"/ssh-*; do
    [[ ! -S "${socket}" ]] || ssh -o ControlPath="${socket}" -O exit any >/dev/null 2>&1 || true
  done
  rm -rf -- "${WORK}"
}

# is_here ADDRESS: the address is one of this machine's; a socket can be bound to no other.
is_here() {
  "${JUMPHOST_PYTHON}" - "$1" <<'PYTHON' 2>/dev/null
import socket, sys
family, kind, _, _, address = socket.getaddrinfo(sys.argv[1], 0, type=socket.SOCK_DGRAM)[0]
socket.socket(family, kind).bind(address)
PYTHON
}

# is_local HOST: the host is this machine and this user, and no word for ssh says otherwise.
is_local() {
  local -n _words="HOST_SSH_${HOST_INDEX[$1]}"
  local target="${HOST_TARGET[$1]}"
  [[ -z "${_words[*]}" && ("${target}" != *@* || "${target%@*}" == "$(id -un)") ]] || return 1
  [[ -n "${IS_LOCAL[$1]:-}" ]] || IS_LOCAL["$1"]="$(is_here "${target#*@}" && echo yes || echo no)"
  [[ "${IS_LOCAL[$1]}" == yes ]]
}

# here CMD...: run it as ssh would: from the home folder, without the variables of this shell.
here() (
  cd -- "${HOME}" || exit
  exec env -i HOME="${HOME}" USER="$(id -un)" LOGNAME="$(id -un)" SHELL="${SHELL:-/bin/bash}" PATH="${PATH}" \
    ${LANG:+LANG="${LANG}"} ${TERM:+TERM="${TERM}"} ${TMUX_TMPDIR:+TMUX_TMPDIR="${TMUX_TMPDIR}"} "$@"
)

host_named() {
  local name
  for name in "${HOST_NAMES[@]}"; do
    if [[ "$1" == "${name}" || "$1" == "${HOST_SESSION[${name}]}" ]]; then
      printf '%s\n' "${name}"
      return
    fi
  done
  die 2 "no host '$1' in this cluster: give one of ${HOST_NAMES[*]} or a session name (head, node0, ...)"
}

# ssh_command HOST: SSH_COMMAND becomes the ssh command line up to the remote command.
ssh_command() {
  local -n words="HOST_SSH_${HOST_INDEX[$1]}"
  SSH_COMMAND=(ssh -o BatchMode=yes -o ConnectTimeout="${SSH_TIMEOUT_S:-10}" -o ServerAliveInterval=15
    -o ServerAliveCountMax=4)
  # a command that a dry run printed is typed later, when WORK is gone: ssh ends if it cannot make its socket
  [[ "${DRY_RUN:-0}" == 1 ]] ||
    SSH_COMMAND+=(-o ControlMaster=auto -o ControlPersist=60 -o ControlPath="${WORK}/ssh-%C")
  SSH_COMMAND+=("${words[@]}")
}

# remote_command CMD...: one quoted string that the remote shell splits into the same words, because ssh joins its
# arguments with spaces. The remote login shell may not be bash: zsh, for example, expands a bare =head to a path.
remote_command() {
  local word
  for word in "$@"; do
    [[ "${word}" =~ ^[A-Za-z0-9_./:@,+-]+$ ]] || word="${word@Q}"
    printf '%s ' "${word}"
  done
}

remote() {
  local host="$1"
  shift
  if is_local "${host}"; then
    run here "$@" </dev/null
    return
  fi
  ssh_command "${host}"
  run "${SSH_COMMAND[0]}" -n "${SSH_COMMAND[@]:1}" "${HOST_TARGET[${host}]}" "$(remote_command "$@")"
}

remote_stdin() {
  local host="$1"
  shift
  if is_local "${host}"; then
    run here "$@"
    return
  fi
  ssh_command "${host}"
  run "${SSH_COMMAND[@]}" "${HOST_TARGET[${host}]}" "$(remote_command "$@")"
}

remote_tty() {
  local host="$1"
  shift
  if is_local "${host}"; then
    run here "$@"
    return
  fi
  ssh_command "${host}"
  run "${SSH_COMMAND[0]}" -t "${SSH_COMMAND[@]:1}" "${HOST_TARGET[${host}]}" "$(remote_command "$@")"
}

# Ray's address and token are those of the cluster.
readonly NEVER_FORWARDED=" RAY_ADDRESS RAY_AUTH_TOKEN RAY_AUTH_TOKEN_PATH RAY_TMPDIR "

# is_secret NAME: the name says that its value is one.
is_secret() { [[ "$1" =~ (^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$) ]]; }

# forwarded: the names of the exported variables that ENV_FORWARD names; a secret only by its whole name. The settings have
# their own way.
forwarded() {
  local name pattern
  local -a patterns
  read -ra patterns <<<"${ENV_FORWARD:-}"
  while IFS= read -r name; do
    [[ "${NEVER_FORWARDED} ${SETTINGS[*]} ${RUN_SETTINGS[*]:-} ${SECRETS[*]:-} " != *" ${name} "* ]] || continue
    for pattern in "${patterns[@]}"; do
      # shellcheck disable=SC2053 # a pattern
      [[ "${name}" == ${pattern} ]] || continue
      ! is_secret "${name}" || [[ "${name}" == "${pattern}" ]] || continue
      printf '%s\n' "${name}"
      break
    done
  done < <(compgen -e)
}

# forwarded_lines: these variables as `export NAME=VALUE`.
forwarded_lines() {
  local name
  for name in $(forwarded); do
    printf 'export %s=%q\n' "${name}" "${!name}"
  done
}

# show_forwarded: these variables, without the values of secrets; a proxy's address may hold a password.
show_forwarded() {
  local name
  for name in $(forwarded); do
    if is_secret "${name}" || [[ "${name,,}" == *_proxy ]]; then
      say "  ${name}=(not shown)"
    else
      say "$(printf '  %s=%q' "${name}" "${!name}")"
    fi
  done
}

# node_script HOST: the text that the remote bash reads: the settings, then node.sh and the files that it needs. Secrets are
# sent in this text and never in an argument.
node_script() {
  printf 'echo %s\n' "${NODE_BEGINS}"
  printf '%s\n' "${HOST_SETTINGS[$1]}"
  # the head keeps the record, so that the scripts work there too
  [[ "${HOST_SESSION[$1]}" != head ]] ||
    printf 'RECORD_HOSTS=%q\nRECORD_SETTINGS=%q\n' "${RECORD_HOSTS}" "${RECORD_SETTINGS}"
  [[ -z "${NODE_SECRET:-}" ]] || printf 'CLUSTER_TOKEN=%q\n' "${NODE_SECRET}"
  [[ -z "${NODE_ENVIRONMENT:-}" ]] || printf 'NODE_ENVIRONMENT=%q\n' "${NODE_ENVIRONMENT}"
  printf 'RAY_NODES_PY=%q\n' "$(<"${REPO_ROOT}/cluster/ray_nodes.py")"
  cat -- "${REPO_ROOT}/cluster/lib/"{keep_up,container,ports,node}.sh
}

# show_node_texts: for a dry run, print node_script as commands that make it from files: `node_text SETTINGS`.
show_node_texts() {
  local host
  say "+ cd -- ${REPO_ROOT@Q}"
  # shellcheck disable=SC2016 # for the shell that the commands are typed in
  say '+ node_text() { printf "%s\n" "$1"; node_value CLUSTER_TOKEN '"${CLUSTER_RECORD@Q}/token;" \
    'node_value NODE_ENVIRONMENT '"${CLUSTER_RECORD@Q}/environment;" \
    'node_value RAY_NODES_PY cluster/ray_nodes.py; cat cluster/lib/{keep_up,container,ports,node}.sh; }'
  # shellcheck disable=SC2016 # the same
  say '+ node_value() { [[ ! -s "$2" ]] || printf "%s=%q\n" "$1" "$(cat "$2")"; }'
  for host in "${HOST_NAMES[@]}"; do
    printf '+ NODE_%s=%q\n' "${HOST_SESSION[${host}]}" "${HOST_SETTINGS[${host}]}$([[ "${HOST_SESSION[${host}]}" != head ]] ||
      printf '\nRECORD_HOSTS=%q\nRECORD_SETTINGS=%q' "${RECORD_HOSTS}" "${RECORD_SETTINGS}")" >&2
  done
}

# Output of .bashrc or of a login shell comes before this line and is dropped.
readonly NODE_BEGINS="verl_mixed: node.sh begins"

# printed HOST WORD...: what `printed` of node.sh says, for --dry-run. This machine composes it with the code of the host,
# and does not know the host's home folder and user.
printed() {
  local host="$1" said
  shift
  said="$(env HOME=HOME_THERE bash -s -- printed "$@" < <(
    printf 'id() { echo USER_THERE; }\n'
    node_script "${host}"
  ) | sed -e "0,/^${NODE_BEGINS}\$/d")"
  [[ -n "${said}" ]] || return 0
  # shellcheck disable=SC2016 # the host's shell expands them
  said="$(sed -e 's/HOME_THERE/${HOME}/g' -e 's/USER_THERE/$(id -un)/g' <<<"${said}")"
  say "on ${host}:"$'\n'"${said}"
}

node() {
  local host="$1"
  shift
  ssh_command "${host}"
  if [[ "${DRY_RUN:-0}" == 1 ]]; then
    local -n words="HOST_SSH_${HOST_INDEX[${host}]}"
    # shellcheck disable=SC2016 # for the shell that it is pasted into
    printf '+%s < <(node_text "${NODE_%s}")\n' "$(printf ' %q' ssh "${words[@]}" "${HOST_TARGET[${host}]}" bash -s -- "$@")" \
      "${HOST_SESSION[${host}]}" >&2
    case "$1" in
      start) printed "${host}" start ;;
      stop | cleanup) printed "${host}" end ;;
    esac
    return
  fi
  if is_local "${host}"; then
    here bash -s -- "$@" < <(node_script "${host}") | sed -u -e "0,/^${NODE_BEGINS}\$/d"
    return
  fi
  node_script "${host}" | "${SSH_COMMAND[@]}" "${HOST_TARGET[${host}]}" "bash -s -- $(remote_command "$@")" |
    sed -u -e "0,/^${NODE_BEGINS}\$/d"
}
