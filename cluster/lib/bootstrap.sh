# shellcheck shell=bash
# The Python environment of the scripts: `.venv/` in the repository root, which these functions make; or the conda
# environment CONDA_ENV or the venv VENV, which they only check. Source this file after common.sh. It needs REPO_ROOT.
#
# `.venv/.stamp` holds a hash of the installed requirements, or the word `installing` during an installation. If the hash
# matches, pip is not asked. A venv with the word `installing` was interrupted; it is made again from pip's cache.

# requirement_files KIND: the requirement files of an environment; KIND is run or dev. They depend on the machine and not
# on PROFILE, so that another profile installs nothing.
requirement_files() {
  if nvidia-smi -L >/dev/null 2>&1; then
    printf '%s\n' "${REPO_ROOT}/requirements/gpu.lock"
  else
    printf '%s\n' "${REPO_ROOT}/requirements/torch.txt" "${REPO_ROOT}/requirements/laptop.lock"
  fi
  [[ "$1" != dev ]] || printf '%s\n' "${REPO_ROOT}/requirements/dev.lock"
}

# wanted_stamp KIND: the hash of all requirement files and of the repository's path.
wanted_stamp() {
  local -a files
  mapfile -t files < <(requirement_files "$1")
  { cat -- "${files[@]}" "${REPO_ROOT}/pyproject.toml" && printf '%s' "${REPO_ROOT}"; } | sha256sum | cut -d' ' -f1
}

# find_python: the first interpreter that is new enough and not too new; PYTHON names one.
find_python() {
  local candidate
  for candidate in ${PYTHON:+"${PYTHON}"} python3.11 python3.12 python3.10 python3 python; do
    if "${candidate}" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' \
      >/dev/null 2>&1; then
      command -v -- "${candidate}"
      return
    fi
  done
  die 1 "no Python 3.10 to 3.12 with venv found (tried ${PYTHON:+${PYTHON}, }python3.11, python3.12, python3.10, python3," \
    "python): verl 0.9.1 stops at 3.12; install one (Debian: apt-get install python3-venv) or name it in PYTHON"
}

# make_venv: make an empty .venv. A .venv that these scripts did not make is moved aside, never deleted.
make_venv() {
  local venv="$1" python
  python="$(find_python)" || return 1
  if [[ -d "${venv}" && ! -e "${venv}/.stamp" ]]; then
    say "${venv} was not made by this script: moving it to ${venv}.old.$$"
    mv -- "${venv}" "${venv}.old.$$" || return 1
  fi
  rm -rf -- "${venv}" && mkdir -p -- "${venv}" && echo installing >"${venv}/.stamp" || return 1
  say "making .venv with $("${python}" --version 2>&1)"
  "${python}" -m venv "${venv}"
}

# install_into VENV KIND: install torch alone and first if it has its own file, then the lock files, then this checkout.
install_into() {
  local venv="$1" kind="$2" file torch=""
  local -a pip=("${venv}/bin/python" -m pip --disable-pip-version-check --no-input)
  local -a locks=()
  for file in $(requirement_files "${kind}"); do
    if [[ "${file}" == */torch.txt ]]; then
      torch="${file}"
    else
      locks+=(-r "${file}")
    fi
  done
  if [[ -n "${torch}" ]]; then
    say "installing torch (1 of 3)"
    "${pip[@]}" install --quiet --quiet --constraint "${REPO_ROOT}/requirements/laptop.lock" \
      ${TORCH_INDEX_URL:+--index-url "${TORCH_INDEX_URL}"} -r "${torch}" || return 1
  fi
  say "installing verl, ray, transformers and the rest (2 of 3)"
  "${pip[@]}" install --quiet --quiet ${torch:+--constraint "${torch}"} "${locks[@]}" || return 1
  say "installing this checkout (3 of 3)"
  "${pip[@]}" install --quiet --quiet --no-deps --no-build-isolation --no-index --editable "${REPO_ROOT}"
}

# is_current KIND: .venv is complete and matches the requirement files. An environment for dev is also good for runs.
is_current() {
  local venv="${REPO_ROOT}/.venv"
  [[ -x "${venv}/bin/verl-mixed" && "$(cat -- "${venv}/.stamp" 2>/dev/null)" == "$(wanted_stamp run)" ]] || return 1
  [[ "$1" == run || "$(cat -- "${venv}/.stamp-dev" 2>/dev/null)" == "$(wanted_stamp dev)" ]]
}

# bootstrap_venv KIND: make or update .venv. A subshell holds the lock, so that the run does not inherit it. Every step has
# `|| return`, because the `||` of the caller switches errexit off inside this function.
bootstrap_venv() (
  kind="$1"
  venv="${REPO_ROOT}/.venv"
  is_current "${kind}" && return
  exec 9>>"${REPO_ROOT}/.venv.lock" || return 1
  if ! flock -n 9; then
    say "another start is installing into .venv: waiting for it"
    flock 9 || return 1
  fi
  is_current "${kind}" && return
  say "installing the Python environment into .venv, once: some minutes, 2 GB with a CPU build of torch, 6 GB with CUDA, 12 GB with vLLM"
  began="${SECONDS}"
  if [[ ! -x "${venv}/bin/python" || ! -s "${venv}/.stamp" || "$(<"${venv}/.stamp")" == installing ]]; then
    make_venv "${venv}" || return 1
  fi
  echo installing >"${venv}/.stamp"
  install_into "${venv}" "${kind}" || return 1
  [[ "${kind}" != dev ]] || wanted_stamp dev >"${venv}/.stamp-dev"
  wanted_stamp run >"${venv}/.stamp"
  say "installed in $((SECONDS - began)) s"
)

# use_conda: activate CONDA_ENV and check it; nothing is installed into it. CONDA_PATH is conda's folder, or the script in
# it that activates environments.
use_conda() {
  local conda_sh="${CONDA_PATH:=${HOME:-}/miniconda3}"
  conda_sh="${conda_sh%/bin/activate}"
  conda_sh="${conda_sh%/etc/profile.d/conda.sh}/etc/profile.d/conda.sh"
  [[ -r "${conda_sh}" ]] ||
    die 2 "cannot read ${conda_sh} for CONDA_ENV=${CONDA_ENV}: set CONDA_PATH to conda's folder, or to its bin/activate"
  set +eu # conda's own scripts read unset variables
  # shellcheck disable=SC1090 # the user's conda, known only here
  source "${conda_sh}" && conda activate "${CONDA_ENV}"
  local status=$?
  set -eu
  ((status == 0)) || die 2 "cannot activate CONDA_ENV=${CONDA_ENV}: create it, or unset CONDA_ENV to use .venv"
  check_environment "CONDA_ENV=${CONDA_ENV}"
}

# use_venv FOLDER: put this venv first on PATH.
use_venv() {
  export VIRTUAL_ENV="$1"
  export PATH="${VIRTUAL_ENV}/bin:${PATH}"
  unset PYTHONHOME
}

# check_environment NAME: check that the environment first on PATH has all packages of a run; NAME is for the message. The
# run uses the code of this checkout, even if another checkout is installed in the environment.
check_environment() {
  export PYTHONPATH="${REPO_ROOT}${PYTHONPATH:+:${PYTHONPATH}}"
  (cd -- "${REPO_ROOT}" && python -m verl_mixed.checks.packages) ||
    die 2 "$1 is not complete: install the packages named above, then 'pip install --no-deps -e ${REPO_ROOT}'"
}

# is_ours: VENV is unset or names `.venv`, which these scripts make.
is_ours() {
  [[ -z "${VENV:-}" || "$(realpath -m -- "${VENV}")" == "$(realpath -m -- "${REPO_ROOT}/.venv")" ]]
}

# has_environment: an environment exists, so `bootstrap run` would install nothing.
has_environment() {
  [[ -n "${CONDA_ENV:-}" ]] || ! is_ours || is_current run
}

# bootstrap KIND: put `python` and `verl-mixed` of the environment first on PATH. KIND is run or dev.
bootstrap() {
  local kind="$1"
  if [[ -n "${CONDA_ENV:-}" ]]; then
    use_conda
    return
  fi
  if ! is_ours; then
    [[ -x "${VENV}/bin/python" ]] || die 2 "no ${VENV}/bin/python for VENV=${VENV}: correct it, or unset it to use .venv"
    use_venv "$(realpath -s -- "${VENV}")"
    check_environment "VENV=${VENV}"
    return
  fi
  bootstrap_venv "${kind}" || die 1 "the Python environment is not complete; start again to continue (see above)"
  use_venv "${REPO_ROOT}/.venv"
}
