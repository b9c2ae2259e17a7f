#!/usr/bin/env bats
# cluster/lib/keep_up.sh: a command is started again each time it ends, while a file is there.

setup() {
  load helpers
  cd "${BATS_TEST_TMPDIR}" || return
  export KEEP_UP_PAUSE_S=0
  # a Ray: has a child, notes its start, and lasts until a signal ends it
  cat >ray <<'RAY'
#!/usr/bin/env bash
sleep 1000 &
echo "$!" >>children
trap 'echo drained >>ends; kill %1; exit 0' TERM
echo "$$" >>starts # last: a test may kill it at once
wait
RAY
  chmod +x ray
  {
    cat "${REPO_ROOT}/cluster/lib/keep_up.sh"
    echo 'keep_up keep ./ray --block'
  } >node.sh
  : >keep
  env --default-signal=INT setsid bash node.sh >said 2>&1 3>&- &
  NODE=$!
  until_true starts 1
}

teardown() {
  rm -f keep
  local pid
  kill "${NODE}" 2>/dev/null || true
  while read -r pid; do kill -9 "${pid}" 2>/dev/null || true; done < <(cat starts children)
}

# until_true FILE LINES: wait until the file has so many lines.
until_true() {
  local try
  for ((try = 0; try < 300; try++)); do
    [[ -s "$1" ]] && (($(wc -l <"$1") >= $2)) && return
    sleep 0.1
  done
  echo "$1 has fewer than $2 lines: $(cat "$1" said)" >&2
  return 1
}

# gone PID
gone() {
  local try
  for ((try = 0; try < 300; try++)); do
    kill -0 "$1" 2>/dev/null || return 0
    sleep 0.1
  done
  echo "process $1 is still there" >&2
  return 1
}

@test "a command that was killed is started again, and what it left is ended first" {
  kill -9 "$(tail -n 1 starts)"
  until_true starts 2
  gone "$(head -n 1 children)"
  kill -9 "$(tail -n 1 starts)"
  until_true starts 3
  gone "$(sed -n 2p children)"
  kill -0 "${NODE}"
  grep -q 'Ray ended with exit 137 and is started again' said
}

@test "without the file the command is not started again, and the exit code is its own" {
  rm keep
  kill -9 "$(cat starts)"
  local code=0
  wait "${NODE}" || code=$?
  [ "${code}" -eq 137 ]
  [ "$(wc -l <starts)" -eq 1 ]
}

@test "SIGTERM ends the command in order, and it is not started again although the file is there" {
  kill -TERM "${NODE}"
  local code=0
  wait "${NODE}" || code=$?
  [ "${code}" -eq 143 ]
  grep -qx drained ends
  [ "$(wc -l <starts)" -eq 1 ]
}

@test "the command gets SIGINT's default action, although it is not in the foreground" {
  local ignored
  ignored="$(sed -n 's/^SigIgn:[[:space:]]*//p' "/proc/$(cat starts)/status")"
  (((16#${ignored} & 2) == 0))
}

# launched CODE...: start_killed_again with a launcher that ends with these codes, one after another; `starts` are counted.
launched() {
  local retries="$1" codes="${*:2}"
  run env CODES="${codes}" bash -c '
    . "$1"
    launch_once() {
      echo "killed=${VERL_MIXED_KILLED:-}" >>launched
      set -- ${CODES}
      CODES="${*:2}"
      return "$1"
    }
    start_killed_again "$2"' launched "${REPO_ROOT}/cluster/lib/keep_up.sh" "${retries}"
}

@test "a launcher that was killed is started again, and is told the exit code of the one before" {
  launched 3 137 139 0
  [ "${status}" -eq 0 ]
  [ "$(paste -sd' ' launched)" = "killed= killed=137 killed=139" ]
}

@test "a launcher that ended by itself, or was asked to, is not started again" {
  for code in 0 1 2 129 130 143; do
    rm -f launched
    launched 3 "${code}" 0
    [ "${status}" -eq "${code}" ]
    [ "$(wc -l <launched)" -eq 1 ]
  done
}

@test "without retries a killed launcher stays down; with N it is started N+1 times more, and no more" {
  launched 0 137 0
  [ "${status}" -eq 137 ]
  [ "$(wc -l <launched)" -eq 1 ]
  rm launched
  launched 2 137 137 137 137 0
  [ "${status}" -eq 137 ]
  [ "$(wc -l <launched)" -eq 4 ]
}
