# shellcheck shell=bash
# What starts again by itself after a kill: a node's Ray (keep_up) and the launcher of a run (start_killed_again).
#
# keep_up runs `ray start --block` in this shell's session and starts it again each time it ends.
# node.sh writes these functions into the script that a node's tmux session runs; cluster/slurm/node.sh sources this file.
# A head that is started again is a new cluster. The workers' Ray of the old one ends by itself within a minute, and
# their own keep_up then joins the new one. Runs that were going on fail; `start --retries` resumes them.

# read_stat PID: STAT becomes the fields of /proc/PID/stat after the process name; returns 1 if the process is gone.
# "$(<file)" is not used, because it would end this shell for a missing file even with `||` behind it.
read_stat() {
  STAT=""
  IFS= read -r -d '' STAT 2>/dev/null <"/proc/$1/stat" || true
  STAT="${STAT##*) }"
  [[ -n "${STAT}" ]]
}

# in_sessions SID...: processes of these kernel sessions.
in_sessions() {
  local file pid sid
  local -a parts
  (($# > 0)) || return 0
  for file in /proc/[0-9]*/stat; do
    pid="${file//[^0-9]/}"
    read_stat "${pid}" || continue
    read -ra parts <<<"${STAT}"
    [[ "${parts[0]}" != Z ]] || continue
    for sid in "$@"; do
      [[ "${parts[3]:-}" != "${sid}" ]] || printf '%s\n' "${pid}"
    done
  done
}

# end_rest: kill what is left of this session besides this shell. `ray start` ends its parts if one of them ends, but
# nothing ends them if `ray start` itself was killed, and they would hold the ports.
end_rest() {
  local pid
  local -a left
  mapfile -t left < <(in_sessions "$(own_session)")
  for pid in "${left[@]}"; do
    [[ "${pid}" == "$$" ]] || kill -s KILL "${pid}" 2>/dev/null || true
  done
}

own_session() {
  local -a parts
  read_stat "$$"
  read -ra parts <<<"${STAT}"
  printf '%s\n' "${parts[3]}"
}

# end_kept SIGNAL: end the command, which drains its node, and then this shell.
end_kept() {
  trap '' TERM HUP INT
  kill -s "$1" "${KEPT}" 2>/dev/null || true
  wait "${KEPT}" 2>/dev/null || true
  exit 143
}

# keep_up FILE COMMAND...: run the command, and start it again each time it ends while FILE is there. The pause between
# two starts doubles from KEEP_UP_PAUSE_S to 60 s, and is short again after a minute without an end. TERM ends both.
keep_up() {
  local file="$1" code pause="${KEEP_UP_PAUSE_S:-1}" began
  shift
  set -m # its own process group, with the default action for SIGINT: Ray cancels tasks by it
  while :; do
    began="${SECONDS}" code=0
    "$@" &
    KEPT=$!
    trap 'end_kept TERM' TERM HUP INT
    wait "${KEPT}" || code=$?
    [[ -e "${file}" ]] || exit "${code}"
    end_rest
    ((SECONDS - began < 60)) || pause="${KEEP_UP_PAUSE_S:-1}"
    printf '\n%s: Ray ended with exit %s and is started again in %s s\n\n' "$(date)" "${code}" "${pause}"
    sleep "${pause}" &
    KEPT=$!
    wait "${KEPT}" || true
    [[ -e "${file}" ]] || exit "${code}"
    pause=$((2 * pause < 60 ? 2 * pause : 60))
  done
}

# start_killed_again RETRIES: `launch_once`, and again if a signal killed the launcher itself (SIGKILL, or a crash; not the
# signals that ask it to end). The new launcher counts the retry and may refuse it, so it has one start more than RETRIES.
start_killed_again() {
  local ended more=$(($1 > 0 ? $1 + 1 : 0))
  while :; do
    launch_once && ended=0 || ended=$?
    ((ended > 128 && more-- > 0)) && [[ " 129 130 143 " != *" ${ended} "* ]] || return "${ended}"
    echo "the launcher was killed (exit ${ended}) at $(date), and is started again"
    export VERL_MIXED_KILLED="${ended}"
  done
}
