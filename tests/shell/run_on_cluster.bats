#!/usr/bin/env bats
# run_mixed_training.sh with MASTER_IP: from the jumphost, and on the head itself.
# bats file_tags=slow
bats_require_minimum_version 1.8.0

setup() {
  load helpers
  make_cluster
}

teardown() { end_tmux; }

script() { run "${CHECKOUT}/run_mixed_training.sh" "$@"; }

@test "start checks the cluster, syncs, and starts the launcher in a tmux session of the run on the head" {
  TACO_RATIO=0.5 script mixed.seed=3
  [ "${status}" -eq 0 ]
  grep -q "^setup_cluster status MASTER_IP=192.0.2.1" "${CALLS}"
  grep -q "^setup_cluster sync" "${CALLS}"
  grep -q "^verl-mixed <train> <mixed.seed=3> MASTER_IP=10.9.9.9 RAY_PORT=7000 TACO_RATIO=0.5" "${CALLS}"
  tmux has-session -t =verl_training_demo
  [ "$(tmux show-options -wv -t verl_training_demo remain-on-exit)" = on ]
  [ "$(tmux show-environment -t verl_training_demo VERL_MIXED_CLUSTER)" = VERL_MIXED_CLUSTER=192.0.2.1 ]
}

@test "without MASTER_IP, every command goes to the one cluster that was set up, and says so" {
  unset MASTER_IP
  record 192.0.2.1 192.0.2.5
  script
  [ "${status}" -eq 0 ]
  [[ "${lines[0]}" == "cluster 192.0.2.1, which setup_cluster.sh recorded; MASTER_IP=local runs on this machine" ]]
  grep -q "^setup_cluster sync MASTER_IP=192.0.2.1" "${CALLS}"
  grep -q "^verl-mixed <train> MASTER_IP=10.9.9.9" "${CALLS}"
  grep -q "^export WORKER_NODES=192.0.2.5" "${SENT}"
  touch "${CHECKOUT}/runs/demo/config.yaml"
  for command in status logs stop validate dry-run attach; do
    before="$(calls '^ssh')"
    script "${command}"
    [[ "${output}" == *"cluster 192.0.2.1, which setup_cluster.sh recorded"* ]]
    [[ "${command}" == dry-run || "$(calls '^ssh')" -gt "${before}" ]]
  done
  [ ! -e "${CHECKOUT}/.venv" ]
}

@test "OVERRIDES travel to the head once, whatever its own block has" {
  set_in run_mixed_training.sh "OVERRIDES=(mixed.seed=1 'a=[x, y]')"
  script b=2
  [ "${status}" -eq 0 ]
  grep -qF "verl-mixed <train> <mixed.seed=1> <a=[x, y]> <b=2> MASTER_IP" "${CALLS}"
  end_tmux
  OVERRIDES="c=3" script d=4
  [ "${status}" -eq 0 ]
  grep -qF "verl-mixed <train> <c=3> <d=4> MASTER_IP" "${CALLS}"
}

@test "RAY_ADDRESS of another Ray than MASTER_IP's is exit 2 and names both" {
  RAY_ADDRESS=10.0.0.4:6379 script
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"MASTER_IP=192.0.2.1 (192.0.2.1:6379) and RAY_ADDRESS=10.0.0.4:6379 name two Rays"* ]]
  RAY_ADDRESS=192.0.2.1:6379 script
  [ "${status}" -eq 0 ]
}

@test "after a start it says what to type next" {
  SSH_JUMP=me@bastion script
  for words in "status" "logs -f" "ssh -J me@bastion 192.0.2.1 -t 'tmux attach -t verl_training_demo'" \
    "ssh -J me@bastion 192.0.2.1 -N -L 8265:127.0.0.1:8265" "stop"; do
    [[ "${output}" == *"${words}"* ]]
  done
}

@test "words with spaces, quotes and brackets reach the launcher unchanged, over ssh and tmux" {
  words=("a='it is'" 'b=[1, 2]' 'c="x y"' '~d.e' '+f={g: $HOME}' "++h=a;" 'i=*' $'j=two\nlines' 'k=\back')
  script "${words[@]}"
  [ "${status}" -eq 0 ]
  expected="verl-mixed <train>$(printf ' <%s>' "${words[@]}")"
  [[ "$(<"${CALLS}")" == *"${expected}"* ]]
}

@test "a secret travels on stdin, is in no argument, and no file keeps it" {
  WANDB_API_KEY=s3cret script
  [ "${status}" -eq 0 ]
  grep -q "verl-mixed <train>.* KEY=s3cret" "${CALLS}"
  [ "$(calls "^ssh")" -ge 1 ]
  run ! grep "^ssh.*s3cret" "${CALLS}"
  [[ "${output}" != *s3cret* ]]
  run ! grep -r s3cret "${HEAD_HOME}" "${HOME}" "${CHECKOUT}"
  run tmux show-environment -g
  [[ "${output}" != *s3cret* ]]
  run ! compgen -G "${HEAD_HOME}/.verl_mixed/start.*"
}

@test "WANDB_DIR of this start comes before the one that setup recorded" {
  WANDB_DIR=/mine script
  grep -q "verl-mixed <train>.*WANDB_DIR=/mine" "${CALLS}"
}

@test "an array in the block is a list of files" {
  sed -i 's/TRAIN_FILES=()/TRAIN_FILES=(a.parquet b.parquet)/' "${CHECKOUT}/run_mixed_training.sh"
  script
  grep -q "verl-mixed <train>.*FILES=a.parquet b.parquet" "${CALLS}"
}

@test "a cluster that is not complete is exit 1, names the remedy and starts nothing" {
  SETUP_FAILS=status script
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"./setup_cluster.sh setup"* ]]
  [ "$(calls ssh)" -eq 0 ]
}

@test "code that cannot be copied is exit 1 and starts nothing" {
  SETUP_FAILS=sync script --yes
  [ "${status}" -eq 1 ]
  grep -q "setup_cluster sync --yes" "${CALLS}"
  [ "$(calls '<train>')" -eq 0 ]
}

@test "setup_cluster.sh gets the hosts file and what the environment said, and no more" {
  printf '[head]\n192.0.2.1 conda_env=mine\n' >"${BATS_TEST_TMPDIR}/hosts"
  unset MASTER_IP
  script --hosts "${BATS_TEST_TMPDIR}/hosts"
  [ "${status}" -eq 0 ]
  grep -q "^setup_cluster status MASTER_IP=192.0.2.1 HOSTS_FILE=${BATS_TEST_TMPDIR}/hosts CONDA_ENV=$" "${CALLS}"
}

@test "a hosts file that cannot be read is exit 2" {
  script --hosts /nowhere/hosts
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"cannot read --hosts /nowhere/hosts"* ]]
}

@test "a head that does not answer is exit 1 and is named" {
  SSH_EXIT=255 script status
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"192.0.2.1: no answer by ssh"* ]]
}

@test "a launcher that ends at once gives its last lines and its exit code" {
  TRAIN_EXIT=2 script
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"boom: the last words"* ]]
  [[ "${output}" == *"ended at once with exit 2"* ]]
  run ! compgen -G "${HEAD_HOME}/.verl_mixed/start.*"
}

@test "a start that ended before is replaced by the next one" {
  TRAIN_EXIT=1 script
  [ "${status}" -eq 1 ]
  # the tmux server keeps the environment of its first client, and with it TRAIN_EXIT
  tmux set-environment -gu TRAIN_EXIT
  script
  [ "${status}" -eq 0 ]
  [ "$(tmux display-message -p -t =verl_training_demo: '#{pane_dead}')" = 0 ]
}

@test "a long preparation is no failure: it says what the launcher does" {
  sed -i 's/echo step/echo preparing the demo; sleep 300/' "${HEAD_HOME}/python/verl-mixed"
  export START_TIMEOUT_S=1
  script
  [ "${status}" -eq 0 ]
  [[ "${output}" == *"still preparing after 1 s: preparing the demo"* ]]
}

@test "a second start of a running run is exit 2 and names session, step and remedy" {
  script
  facts "RUN_HOLDER='process 12 on gpu1'" RUN_STEP=4
  script
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"runs/demo is running already in tmux session verl_training_demo: process 12 on gpu1, step 4 of 16"* ]]
  [[ "${output}" == *"'stop'"* ]]
  [ "$(calls '<train>')" -eq 1 ]
  [ "$(calls 'setup_cluster sync')" -eq 1 ] # nothing was copied under the live run
}

@test "two runs have a tmux session each" {
  script
  facts RUN_FOLDER=runs/other.2
  script
  [ "${status}" -eq 0 ]
  tmux has-session -t =verl_training_demo
  tmux has-session -t =verl_training_other_2
}

@test "a start asks nothing of a head without this code: sync brings it" {
  mv "${CHECKOUT}" "${CHECKOUT}.here"
  CHECKOUT="${CHECKOUT}.here" REMOTE_REPO="${BATS_TEST_TMPDIR}/nowhere" script
  [[ "${output}" == *"no repository there"* ]]
  grep -q "setup_cluster sync" "${CALLS}"
}

@test "--no-sync copies nothing, and asks whether the hosts have this commit" {
  script start --no-sync
  [ "${status}" -eq 0 ]
  grep -q "^setup_cluster sync --check MASTER_IP" "${CALLS}"
  facts RUN_FOLDER=runs/other
  SETUP_FAILS=sync script start --no-sync
  [ "${status}" -eq 1 ]
  [ "$(calls '<train>')" -eq 1 ]
}

@test "a tmux session of the run's name of somebody else is left alone" {
  tmux new-session -d -s verl_training_demo sleep 300
  script
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"not made by this script"* ]]
  tmux has-session -t =verl_training_demo
  [ "$(calls '<train>')" -eq 0 ]
}

@test "a run that was stopped says where it goes on" {
  facts RUN_STEP=7 RUN_CHECKPOINT=5
  script
  [ "${status}" -eq 0 ]
  [[ "${output}" == *"resuming runs/demo on "*" from global_step_5 of 16"* ]]
}

@test "a complete run says so and starts nothing" {
  facts RUN_STEP=16 RUN_CHECKPOINT=16 RUN_DONE=1
  script
  [ "${status}" -eq 0 ]
  [[ "${output}" == *"complete: runs/demo"*"TOTAL_TRAINING_STEPS"* ]]
  [ "$(calls '<train>')" -eq 0 ]
}

@test "resume refuses where there is no checkpoint, and starts where there is one" {
  script resume
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"nothing to resume: runs/demo"* ]]
  facts RUN_STEP=7 RUN_CHECKPOINT=5
  script resume
  [ "${status}" -eq 0 ]
  [ "$(calls '<train>')" -eq 1 ]
}

@test "status asks the head, and says whether the run goes on" {
  script
  touch "${CHECKOUT}/runs/demo/config.yaml"
  facts "RUN_HOLDER='process 12 on gpu1'"
  script status mixed.experiment=demo
  [ "${status}" -eq 0 ]
  grep -q "verl-mixed <watch> <runs/demo>" "${CALLS}"
  grep -q "python <.*/config/child.py> <verl_mixed.commands.facts> <--facts> <--> <mixed.experiment=demo>" "${CALLS}"
  [[ "${output}" == *"running      process 12 on gpu1"* && "${output}" == *"verl_training_demo (runs/demo)"* ]]
  [ "$(calls setup_cluster)" -eq 2 ]
}

@test "commands of verl-mixed about the run pass through to the head, with their options" {
  mkdir -p "${CHECKOUT}/runs/demo"
  touch "${CHECKOUT}/runs/demo/config.yaml"
  for command in report diagnose audit limiter watch; do
    script "${command}" --json mixed.experiment=demo
    [ "${status}" -eq 0 ]
    grep -q "^verl-mixed <${command}> <runs/demo> <--json>" "${CALLS}"
  done
  [ "$(calls '<--facts> <--> <mixed.experiment=demo>')" -eq 5 ]
  VERL_MIXED_FAILS=audit script audit
  [ "${status}" -eq 1 ]
}

@test "fetch copies the run's files without its checkpoints" {
  mkdir -p "${CHECKOUT}/runs/demo/checkpoints/global_step_5"
  echo text >"${CHECKOUT}/runs/demo/config.yaml"
  touch "${CHECKOUT}/runs/demo/checkpoints/global_step_5/weights"
  cp -r "${CHECKOUT}" "${BATS_TEST_TMPDIR}/jumphost"
  rm -r "${BATS_TEST_TMPDIR}/jumphost/runs"
  REMOTE_REPO="${CHECKOUT}" run "${BATS_TEST_TMPDIR}/jumphost/run_mixed_training.sh" fetch
  [ "${status}" -eq 0 ]
  [ "$(cat "${BATS_TEST_TMPDIR}/jumphost/runs/demo/config.yaml")" = text ]
  [ ! -e "${BATS_TEST_TMPDIR}/jumphost/runs/demo/checkpoints" ]
}

@test "dashboard holds the tunnel open" {
  sed -i '3i [[ "$*" != *" -N "* ]] || { echo "tunnel $*" >>"${CALLS}"; exit 0; }' "${BATS_TEST_TMPDIR}/bin/ssh"
  RAY_DASHBOARD_PORT=9000 script dashboard
  [ "${status}" -eq 0 ]
  [[ "${output}" == *"http://127.0.0.1:9000"* ]]
  grep -q "^tunnel .*-N -L 9000:127.0.0.1:9000 192.0.2.1" "${CALLS}"
}

@test "status of a run that is not there is exit 1 and names the remedy" {
  script status
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"no run in runs/demo"*"start"* ]]
}

@test "logs shows the end of the far train.log; before there is one, exit 1" {
  script logs
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"no runs/demo/train.log"* ]]
  script
  script logs
  [ "${status}" -eq 0 ]
  [ "${lines[-1]}" = step ]
  grep -q "tail -n 100 -- ${CHECKOUT}/runs/demo/train.log" "${CALLS}"
}

@test "logs -f follows" {
  script
  timeout 60 "${CHECKOUT}/run_mixed_training.sh" logs -f >"${BATS_TEST_TMPDIR}/followed" 3>&- &
  until grep -q step "${BATS_TEST_TMPDIR}/followed"; do
    kill -0 "$!" # ended: it did not follow
    sleep 0.1
  done
  kill "$!"
  grep -q "tail -n 100 -f -- " "${CALLS}"
}

@test "attach takes a terminal on the head" {
  script
  script attach # tmux itself refuses: there is no terminal here
  grep -q "^ssh <-t> .*<tmux attach -t '=verl_training_demo' >" "${CALLS}"
}

@test "attach without a session is exit 1 and says what to do instead" {
  script attach
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"no tmux session verl_training_demo on "*"logs -f"* ]]
}

@test "stop asks the launcher on the head, with or without a session, and gives its exit code" {
  script stop --grace 60
  [ "${status}" -eq 0 ]
  grep -q "verl-mixed <stop> <--grace> <60> <runs/demo>" "${CALLS}"
  VERL_MIXED_FAILS=stop script stop
  [ "${status}" -eq 1 ]
}

@test "validate checks config and machine on the head and gives the worse code" {
  script validate
  [ "${status}" -eq 0 ]
  grep -q "verl-mixed <check>" "${CALLS}"
  grep -q "verl-mixed <doctor>" "${CALLS}"
  VERL_MIXED_FAILS=doctor script validate
  [ "${status}" -eq 1 ]
  [ "$(calls '<train>')" -eq 0 ]
}

@test "dry-run prints every command and the settings, masks secrets, and runs nothing" {
  WANDB_API_KEY=s3cret TACO_RATIO=0.5 script dry-run mixed.seed=3
  [ "${status}" -eq 0 ]
  for words in "setup_cluster.sh status" "setup_cluster.sh sync" "+ ssh" "tmux new-session -d -s verl_training_RUN" \
    "mixed.seed=3" "TACO_RATIO=0.5" "WANDB_API_KEY=(secret)"; do
    [[ "${output}" == *"${words}"* ]]
  done
  [[ "${output}" != *s3cret* ]]
  [ ! -s "${CALLS}" ]
  [ ! -e "${CHECKOUT}/runs" ]
  run ! tmux has-session
}

@test "dry-run does not fail by what it does not send: more than a pipe holds" {
  long="$(printf 'x%.0s' {1..100000})"
  script dry-run "mixed.seed=${long}"
  [ "${status}" -eq 0 ]
}

@test "on the head itself no ssh is used" {
  export MASTER_IP=127.0.0.1
  mv "${HEAD_HOME}/.verl_mixed/192.0.2.1" "${HEAD_HOME}/.verl_mixed/127.0.0.1"
  HOME="${HEAD_HOME}" script mixed.seed=3
  [ "${status}" -eq 0 ]
  grep -q "^verl-mixed <train> <mixed.seed=3> MASTER_IP=10.9.9.9" "${CALLS}"
  [[ "${output}" == *"watch       tmux attach -t verl_training_demo"* ]]
  HOME="${HEAD_HOME}" script logs
  [ "${lines[-1]}" = step ]
  HOME="${HEAD_HOME}" script stop
  [ "${status}" -eq 0 ]
  [ "$(calls '^ssh')" -eq 0 ]
  # the jumphost's record is not here, so nobody is checked or synced from here
  [ "$(calls setup_cluster)" -eq 0 ]
}

@test "on the head without MASTER_IP, the run is on its cluster" {
  unset MASTER_IP
  mv "${HEAD_HOME}/.verl_mixed/192.0.2.1" "${HEAD_HOME}/.verl_mixed/gpu1"
  export HOME="${HEAD_HOME}"
  set_up_home gpu1 127.0.0.1 gpu1
  set_up_home gpu1 127.0.0.1 gpu1.10.0.0.2 # of a worker, where all hosts have one home folder
  printf '# --- settings; as sync brings it\n{\n  MASTER_IP=gpu1\n}\n' >>"${CHECKOUT}/setup_cluster.sh"
  script mixed.seed=3
  [ "${status}" -eq 0 ]
  [[ "${output}" == *"cluster 127.0.0.1, of which this machine is the head; MASTER_IP=local runs on this machine"* ]]
  grep -q "^verl-mixed <train> <mixed.seed=3> MASTER_IP=10.9.9.9" "${CALLS}"
  [ "$(tmux show-environment -t verl_training_demo VERL_MIXED_CLUSTER)" = VERL_MIXED_CLUSTER=gpu1 ]
  [ "$(calls '^ssh')" -eq 0 ]
}

@test "ON_HEAD=1 runs the launcher right there, in the cluster's Python" {
  sed -i 's/exec sleep 300/exit 0/' "${HEAD_HOME}/python/verl-mixed"
  HOME="${HEAD_HOME}" ON_HEAD=1 script start mixed.seed=3
  [ "${status}" -eq 0 ]
  grep -q "^verl-mixed <train> <mixed.seed=3> MASTER_IP=10.9.9.9 RAY_PORT=7000" "${CALLS}"
  [ "$(calls ssh)" -eq 0 ]
  run ! tmux has-session
}

# kill_launcher: SIGKILL for the launcher in the run's tmux session.
kill_launcher() { kill -9 "$(pgrep -P "$(tmux display-message -p -t =verl_training_demo: '#{pane_pid}')" sleep)"; }

# until_trains NUMBER: wait until the launcher was started so often.
until_trains() {
  local deadline=$((SECONDS + 30))
  until (($(calls '<train>') >= $1)); do
    ((SECONDS < deadline)) || return 1
    sleep 0.1
  done
}

@test "with --retries, a launcher that is killed is started again in its session; without, it is not" {
  ON_END="echo 'it is' over" script start --retries 2 mixed.seed=3
  [ "${status}" -eq 0 ]
  grep -qx "export RETRIES=2" "${SENT}"
  grep -qxF "export ON_END=echo\ \'it\ is\'\ over" "${SENT}"
  kill_launcher
  until_trains 2
  run tmux capture-pane -p -J -t =verl_training_demo:
  [[ "${output}" == *"the launcher was killed (exit 137)"*"is started again"* ]]
  end_tmux
  : >"${CALLS}"
  script start
  kill_launcher
  deadline=$((SECONDS + 30))
  until [ "$(tmux display-message -p -t =verl_training_demo: '#{pane_dead}')" = 1 ]; do
    ((SECONDS < deadline))
    sleep 0.1
  done
  [ "$(calls '<train>')" -eq 1 ]
  [ "$(tmux show-environment -t =verl_training_demo VERL_MIXED_EXIT)" = VERL_MIXED_EXIT=137 ]
}
