#!/usr/bin/env bats
# Whose RAY_TEMP_DIR is: dir_state and own_temp_dir of cluster/lib/node.sh.

setup() {
  eval "$(sed -n '/^dir_state() {/,/^}/p; /^own_temp_dir() {/,/^}/p' "${BATS_TEST_DIRNAME}/../../cluster/lib/node.sh")"
  MARK="10.0.0.1/10.0.0.1" OTHER=54321
  cd "${BATS_TEST_TMPDIR}" || return
}

# folder NAME: a folder of ours, as a start leaves it.
folder() {
  mkdir "$1"
  printf '%s' "${MARK}" >"$1/.verl_mixed_cluster"
}

is() { [ "$(dir_state "$1")" == "$2" ]; }

as_root() { ((EUID == 0)) || skip "only root can make files of another user"; }

@test "a new, an empty and a marked folder of this user are known" {
  mkdir empty && folder marked && mkdir other && touch other/file
  ln -s marked link
  is new none
  is empty empty
  is marked ours
  is link ours
  is other foreign
  chmod 777 marked # as Ray does
  is marked ours
}

@test "what another user made is foreign, with the mark or without" {
  as_root
  mkdir empty && chown "${OTHER}" empty
  folder marked && chown -R "${OTHER}" marked
  folder their_mark && chown "${OTHER}" their_mark/.verl_mixed_cluster
  folder mine && ln -s mine link && chown -h "${OTHER}" link
  ln -s nothing dangling && chown -h "${OTHER}" dangling
  for name in empty marked their_mark link dangling; do is "${name}" foreign; done
}

@test "a mark that is no file of its own is none" {
  folder mine
  mkdir linked fifo && ln -s ../mine/.verl_mixed_cluster linked/ && mkfifo fifo/.verl_mixed_cluster
  is linked foreign
  is fifo foreign
}

@test "a folder that everybody can replace is foreign, unless the sticky bit prevents it" {
  mkdir open && folder open/marked
  chmod 777 open
  is open/marked foreign
  is open/new foreign
  chmod 1777 open
  is open/marked ours
  is open/new none
}

@test "a start closes the folder and removes what others put there" {
  as_root
  folder opened && chmod 777 opened
  mkdir opened/tmp opened/session_1 && chown "${OTHER}" opened/tmp
  ln -s /etc opened/session_latest && chown -h "${OTHER}" opened/session_latest
  RAY_TEMP_DIR="${PWD}/opened" own_temp_dir
  [ "$(stat -c %u opened/tmp)" == 0 ]
  [ "$(stat -c %a opened)" == 700 ]
  [ -d opened/session_1 ] && [ ! -e opened/session_latest ] && [ -d /etc ]
}

@test "a start takes no folder of another user" {
  as_root
  folder theirs && chown -R "${OTHER}" theirs
  RAY_TEMP_DIR="${PWD}/theirs" run own_temp_dir
  [ "${status}" -eq 1 ]
  [ "$(stat -c %u theirs)" == "${OTHER}" ] && [ ! -e theirs/tmp ]
}
