#!/usr/bin/env bats
# requirements/renew.sh: what it asks uv, and what it keeps of the answer. uv is a stand-in.
bats_require_minimum_version 1.5.0

setup() {
  REPO_ROOT="$(cd -- "${BATS_TEST_DIRNAME}/../.." && pwd)"
  CHECKOUT="${BATS_TEST_TMPDIR}/checkout"
  LOCKS="${CHECKOUT}/requirements"
  export CALLS="${BATS_TEST_TMPDIR}/calls"
  mkdir -p "${CHECKOUT}/cluster" "${LOCKS}" "${BATS_TEST_TMPDIR}/bin"
  cp -r "${REPO_ROOT}/cluster/lib" "${CHECKOUT}/cluster/lib"
  cp "${REPO_ROOT}/requirements/renew.sh" "${LOCKS}/"
  printf '# words\none==1\n' >"${LOCKS}/laptop.lock"
  printf '# words\nchecker==1\n' >"${LOCKS}/dev.lock"
  printf '# words\none==2\nnvidia-nccl==9\ntorch==3\n' >"${LOCKS}/gpu.lock"
  echo "torch==2" >"${LOCKS}/torch.txt"
  # uv gives back the pins that it finds, and a new one; with --upgrade all of them newer
  cat >"${BATS_TEST_TMPDIR}/bin/uv" <<'FAKE'
#!/usr/bin/env bash
echo "uv $*" >>"${CALLS}"
while (($#)); do
  case "$1" in
    --output-file) lock="$2" ;;
    --upgrade) upgrade=1 ;;
  esac
  shift
done
printf 'nvidia-nccl==9\ntriton==3\ntwo==1\n' | cat "${lock}" - | sort --unique >"${lock}.new"
[[ -z "${upgrade:-}" ]] || sed -i 's/==1/==5/' "${lock}.new"
mv "${lock}.new" "${lock}"
FAKE
  chmod +x "${BATS_TEST_TMPDIR}/bin/uv"
  export PATH="${BATS_TEST_TMPDIR}/bin:${PATH}"
}

@test "--help prints the header, an unknown option is exit 2" {
  run "${LOCKS}/renew.sh" --help
  [ "${status}" -eq 0 ]
  [[ "${output}" == *"--upgrade"* ]]
  run "${LOCKS}/renew.sh" --newest
  [ "${status}" -eq 2 ]
  [ ! -e "${CALLS}" ]
}

@test "pins stay, what is new comes, and what a build of torch brings does not" {
  run "${LOCKS}/renew.sh"
  [ "${status}" -eq 0 ]
  [ "$(grep -v '^#' "${LOCKS}/laptop.lock")" == $'one==1\ntwo==1' ]
  [ "$(grep -v '^#' "${LOCKS}/dev.lock")" == "checker==1" ]
  run grep -c -- "--no-emit-package torch" "${CALLS}"
  [ "${output}" == 2 ]
}

@test "the lock of a GPU has its own torch, and what that brings" {
  run "${LOCKS}/renew.sh"
  [ "${status}" -eq 0 ]
  [ "$(grep -v '^#' "${LOCKS}/gpu.lock")" == $'nvidia-nccl==9\none==2\ntorch==3\ntriton==3\ntwo==1' ]
  run grep -- "--extra gpu" "${CALLS}"
  [ "${#lines[@]}" -eq 1 ]
  [[ "${output}" != *"torch"* ]]
}

@test "a second time changes nothing" {
  "${LOCKS}/renew.sh"
  cp -r "${LOCKS}" "${BATS_TEST_TMPDIR}/before"
  "${LOCKS}/renew.sh"
  diff -r "${LOCKS}" "${BATS_TEST_TMPDIR}/before"
  run "${LOCKS}/renew.sh" --check
  [ "${status}" -eq 0 ]
}

@test "--upgrade takes newer versions" {
  run "${LOCKS}/renew.sh" --upgrade
  [ "${status}" -eq 0 ]
  [ "$(grep -v '^#' "${LOCKS}/laptop.lock")" == $'one==5\ntwo==5' ]
  [ "$(grep -v '^#' "${LOCKS}/dev.lock")" == "checker==5" ]
  [[ "$(<"${LOCKS}/gpu.lock")" == *"two==5"* ]]
}

@test "--check shows what would change, and writes nothing" {
  cp -r "${LOCKS}" "${BATS_TEST_TMPDIR}/before"
  run "${LOCKS}/renew.sh" --check
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"+two==1"* ]]
  diff -r "${LOCKS}" "${BATS_TEST_TMPDIR}/before"
}

@test "without uv, and where uv fails, the locks stay as they are" {
  cp -r "${LOCKS}" "${BATS_TEST_TMPDIR}/before"
  printf '#!/bin/sh\necho "no solution" >&2\nexit 1\n' >"${BATS_TEST_TMPDIR}/bin/uv"
  run "${LOCKS}/renew.sh"
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"no solution"* ]]
  rm "${BATS_TEST_TMPDIR}/bin/uv"
  PATH=/usr/bin:/bin run "${LOCKS}/renew.sh"
  [ "${status}" -eq 1 ]
  [[ "${output}" == *"pip install uv"* ]]
  diff -r "${LOCKS}" "${BATS_TEST_TMPDIR}/before"
}
