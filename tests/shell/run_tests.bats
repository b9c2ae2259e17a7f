#!/usr/bin/env bats
# run_tests.sh: stages, summary, exit codes. Every tool is a stand-in that records its call.
bats_require_minimum_version 1.5.0

LONG="algorithm or model or toolservers or agents or environments or reasoning or vllm"

setup() {
  load helpers
  make_checkout
  mkdir -p "${CHECKOUT}/.ci"
  for tool in ruff pyright lint-imports shellcheck shfmt bats bwrap tmux sshd ip chromium; do
    printf '#!/bin/sh\necho "%s $*" >>"${CALLS}"\n[ "%s" != "${BROKEN}" ]\n' "${tool}" "${tool}" \
      >"${BATS_TEST_TMPDIR}/bin/${tool}"
    chmod +x "${BATS_TEST_TMPDIR}/bin/${tool}"
  done
}

@test "--help prints the header" {
  run "${CHECKOUT}/run_tests.sh" --help
  [ "${status}" -eq 0 ]
  [[ "${output}" == *"--fast"* ]]
}

@test "an unknown option is exit 2, and so is a path where all are run" {
  run "${CHECKOUT}/run_tests.sh" --slow
  [ "${status}" -eq 2 ]
  run "${CHECKOUT}/run_tests.sh" tests/samplers
  [ "${status}" -eq 2 ]
  [[ "${output}" == *"PATH goes with --nightly"* ]]
}

@test "every stage runs and is summed up" {
  run "${CHECKOUT}/run_tests.sh"
  [ "${status}" -eq 0 ]
  for stage in "ruff format" "ruff check" pyright lint-imports shellcheck shfmt bats pytest; do
    [[ "${output}" == *"ok       ${stage} ("* ]]
  done
  grep -q -- "dev.lock" "${CALLS}"
}

@test "--fast checks no types, which take a minute of both cores" {
  run "${CHECKOUT}/run_tests.sh" --fast
  [ "${status}" -eq 0 ]
  [[ "${output}" != *"pyright"* && "${output}" == *"ok       pytest ("* ]]
  ! grep -q pyright "${CALLS}"
}

@test "a failing stage fails the whole, after the others ran" {
  BROKEN=pyright run "${CHECKOUT}/run_tests.sh"
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"FAILED   pyright"* ]]
  [[ "${output}" == *"ok       pytest"* ]]
}

@test "a suite that hangs is ended and fails, and what it had printed is shown" {
  printf '#!/bin/sh\necho "1 test so far"\nexec sleep 1000\n' >"${BATS_TEST_TMPDIR}/bin/bats"
  SUITE_LIMIT_S=1 run "${CHECKOUT}/run_tests.sh"
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"1 test so far"* ]]
  [[ "${output}" == *"FAILED   bats ("*", exit 124)"* ]]
  [[ "${output}" == *"ok       pytest"* ]]
}

@test "a suite that hangs is waited for until it has said where" {
  printf '#!/bin/bash\ntrap '\''sleep 2; echo "it hung here"; exit 1'\'' ABRT\nsleep 1000 &\nwait\n' \
    >"${BATS_TEST_TMPDIR}/bin/bats"
  SUITE_LIMIT_S=1 run "${CHECKOUT}/run_tests.sh"
  [[ "${output}" == *"it hung here"* ]]
  [[ "${output}" == *"FAILED   bats ("*", exit 124)"* ]]
}

@test "how a suite ended is known though a later process got its number" {
  [ -w /proc/sys/kernel/ns_last_pid ] || skip "needs root: the next process number is chosen"
  mkfifo "${CALLS}.number"
  cat >"${BATS_TEST_TMPDIR}/bin/bats" <<'END'
#!/bin/sh
read -r _ _ _ waited_for _ <"/proc/${PPID}/stat" # the parent of the shell that notes how this ends
echo "${waited_for}" >"${CALLS}.number"
END
  cat >"${BATS_TEST_TMPDIR}/bin/shfmt" <<'END'
#!/bin/sh
number="$(timeout 60 cat "${CALLS}.number")"
timeout 60 tail -f --pid="${number}" /dev/null
echo "$((number - 1))" >/proc/sys/kernel/ns_last_pid
END
  run "${CHECKOUT}/run_tests.sh"
  [ "${status}" -eq 0 ]
  [[ "${output}" == *"ok       bats"* ]]
}

@test "--fast leaves out what is slow, and the real runs" {
  run "${CHECKOUT}/run_tests.sh" --fast
  [ "${status}" -eq 0 ]
  [ "$(grep -c -- "pytest .*-m not (ray or slow or sandbox or nodes or nightly or cluster or ${LONG}) " "${CALLS}")" -eq 2 ]
  grep -q -- "bats --print-output-on-failure --filter-tags !slow" "${CALLS}"
  [ "$(grep -c -- "pytest " "${CALLS}")" -eq 2 ]
}

@test "one run with two workers has all folders but that of the limiter, which goes beside it" {
  run "${CHECKOUT}/run_tests.sh"
  [ "${status}" -eq 0 ]
  [ "$(grep -c -- "pytest .*-m not (nightly or cluster or ${LONG}) " "${CALLS}")" -eq 2 ]
  grep -q -- "pytest .*-n 2 --dist loadfile .* --ignore=tests/rate_limit tests$" "${CALLS}"
  grep -q -- "pytest .* tests/rate_limit$" "${CALLS}"
  grep -qE "^ok       pytest tests/rate_limit \(" <<<"${output}"
}

@test "--nightly runs what is left to the night, and property tests with more examples" {
  run "${CHECKOUT}/run_tests.sh" --nightly
  [ "${status}" -eq 0 ]
  grep -q -- "pytest .*--hypothesis-profile=nightly -m (nightly or hypothesis) and not (cluster or ${LONG}) tests$" "${CALLS}"
  [ "$(grep -c -- "pytest " "${CALLS}")" -eq 1 ]
  run "${CHECKOUT}/run_tests.sh" --nightly tests/samplers
  grep -q -- "pytest .* tests/samplers$" "${CALLS}"
}

@test "--cluster runs the training over several machines, and nothing else" {
  run "${CHECKOUT}/run_tests.sh" --cluster
  [ "${status}" -eq 0 ]
  grep -q -- "pytest .*-m cluster tests" "${CALLS}"
  [ "$(grep -c -- "pytest " "${CALLS}")" -eq 1 ]
}

@test "--long runs each algorithm, the pretrained model and vLLM, and nothing else" {
  run "${CHECKOUT}/run_tests.sh" --long
  [ "${status}" -eq 0 ]
  grep -q -- "pytest .*-m ${LONG} tests" "${CALLS}"
  [ "$(grep -c -- "pytest " "${CALLS}")" -eq 1 ]
}
