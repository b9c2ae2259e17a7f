#!/usr/bin/env bats
# benchmarks/release_check.sh: its parts, their environment, its table. The checkout's scripts and Python are stand-ins
# that record their calls; they know the file by its name, as nothing of this environment reaches them.
bats_require_minimum_version 1.5.0

setup() {
  REPO_ROOT="$(cd -- "${BATS_TEST_DIRNAME}/../.." && pwd)"
  CALLS="${BATS_TEST_TMPDIR}/calls"
  CHECKOUT="${BATS_TEST_TMPDIR}/checkout"
  BIN="${BATS_TEST_TMPDIR}/bin"
  export TMPDIR="${BATS_TEST_TMPDIR}/tmp"
  mkdir -p "${CHECKOUT}/cluster" "${CHECKOUT}/benchmarks" "${CHECKOUT}/requirements" "${BIN}" "${TMPDIR}"
  cp -r "${REPO_ROOT}/cluster/lib" "${CHECKOUT}/cluster/lib"
  cp "${REPO_ROOT}/benchmarks/release_check.sh" "${CHECKOUT}/benchmarks/"
  touch "${CHECKOUT}/requirements/torch.txt" "${CHECKOUT}/requirements/laptop.lock"
  script run_mixed_training.sh 'mkdir -p runs/mixed_demo data/demo; echo page >runs/mixed_demo/report.html'
  script run_tests.sh ''
  stand_in "${BIN}/python3.11" '
    case "$*" in
      "-m venv "*)
        mkdir -p "$3/bin"
        cp "$0" "$3/bin/python"
        sed "s/echo \"python/echo \"verl-mixed/" "$0" >"$3/bin/verl-mixed"
        chmod +x "$3/bin/verl-mixed" ;;
      "-m build "*) mkdir -p dist && touch dist/a-1.whl dist/a-1.tar.gz ;;
      "train "*) mkdir -p runs/outside && echo page >runs/outside/report.html ;;
    esac'
  git -C "${CHECKOUT}" init --quiet
  commit
  export SYSTEM_PATH="${BIN}:/usr/bin:/bin" PIP_INDEX_URL=https://index.example/simple SECRET_OF_THIS_SHELL=1
  unset PYTHON TORCH_INDEX_URL
}

# stand_in FILE BODY: it notes its arguments and environment, then runs BODY.
stand_in() {
  local name
  name="$(basename "$1")"
  printf '#!/usr/bin/env bash\n{ echo "%s $*"; env | sed "s/^/env %s /"; } >>"%s"\n%s\n' \
    "${name/python3.11/python}" "${name}" "${CALLS}" "$2" >"$1"
  chmod +x "$1"
}

script() { stand_in "${CHECKOUT}/$1" "$2"; }

commit() {
  git -C "${CHECKOUT}" add --all
  git -C "${CHECKOUT}" -c user.name=test -c user.email=test@example.org commit --quiet --message "state"
}

check() { run "${CHECKOUT}/benchmarks/release_check.sh" "$@"; }

row() { grep -E "^$1 +$2 +[0-9]+ " <<<"${output}"; }

@test "--help prints the header" {
  check --help
  [ "${status}" -eq 0 ]
  [[ "${output}" == *"--without PART"* ]]
}

@test "a wrong option, a wrong part and no part are exit 2" {
  for words in "--slow" "--only trian" "--without" "--only train --without train"; do
    # shellcheck disable=SC2086 # several words
    check ${words}
    [ "${status}" -eq 2 ]
  done
  [ ! -s "${CALLS}" ]
}

@test "every part runs, in order, and is a row of the table" {
  check
  [ "${status}" -eq 0 ]
  for name in train tests long build install outside sdist; do row "${name}" 0; done
  run grep -nE "^(run_mixed|run_tests|python -m build|python -m pip install .*a-1.whl|verl-mixed train|verl-mixed audit)" "${CALLS}"
  [ "${#lines[@]}" -eq 7 ]
  [[ "${lines[0]}" == *run_mixed_training.sh* && "${lines[2]}" == *"run_tests.sh --long" && "${lines[6]}" == *"audit runs/outside" ]]
}

@test "nothing of this shell reaches a part but what names a package index" {
  check
  run ! grep -qE "env (run_tests.sh|run_mixed_training.sh|verl-mixed) SECRET_OF_THIS_SHELL" "${CALLS}"
  grep -q "env run_tests.sh PIP_INDEX_URL=https://index.example/simple" "${CALLS}"
  run ! grep -q "env run_tests.sh HOME=${HOME}\$" "${CALLS}"
}

@test "what is checked is what is committed" {
  echo 'exit 1' >>"${CHECKOUT}/run_tests.sh"
  check --only tests
  [ "${status}" -eq 0 ]
  [[ "${output}" == *"what is not committed is not checked"* ]]
  commit
  check --only tests
  [ "${status}" -eq 1 ]
}

@test "a part that fails is said with its last words, the others go on, and its log stays" {
  script run_mixed_training.sh 'echo "the last words"; exit 3'
  commit
  check --only train,tests
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"the last words"* ]]
  row train 3
  row tests 0
  grep -q "the last words" "$(row train 3 | awk '{print $4}')"
}

@test "a start without its report is not good" {
  script run_mixed_training.sh ''
  commit
  check --only train
  [ "${status}" -eq 1 ]
}

@test "parts are taken and left out by name, and the tests can be the fast ones" {
  check --without train,long,outside,sdist --fast
  [ "${status}" -eq 0 ]
  grep -q "^run_tests.sh --fast" "${CALLS}"
  row build 0
  row install 0
  run ! grep -q "^run_mixed_training.sh" "${CALLS}"
}

@test "the wheel is installed with the versions of the locks, torch first" {
  check --only build,install
  [ "${status}" -eq 0 ]
  run grep -n "^python -m pip install --quiet -c" "${CALLS}"
  [[ "${lines[0]}" == *"-r "*"/requirements/torch.txt" ]]
  [[ "${lines[1]}" == *"-c "*"/laptop.lock setuptools "*"a-1.whl" ]]
}

@test "its folder is removed, or kept when asked" {
  check --only tests
  [ -z "$(ls "${TMPDIR}")" ]
  check --only tests --keep
  [ -n "$(ls "${TMPDIR}")" ]
}

@test "a part that hangs is ended" {
  script run_tests.sh 'exec sleep 1000'
  commit
  PART_LIMIT_S=1 check --only tests
  [ "${status}" -eq 1 ]
  row tests 124
}
