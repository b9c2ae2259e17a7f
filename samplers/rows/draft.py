"""The draft folder of a file that is being prepared: finished parts, and the position in the
inputs.

A process with the fingerprint of a draft continues after its last part; another starts again.
"""

# pyarrow has no types; what comes of it is narrowed where it is used.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
import shutil
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from config.disk import claimed, flush, sync, write_whole

_STATE = "state.json"
_SEEN = "seen.u64"


@dataclass(slots=True, kw_only=True)
class State:
    """The position in the inputs, and the counts so far."""

    file: int = 0
    record: int = 0
    """The next record to read, in input number `file`."""

    read: int = 0
    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    seen: int = 0
    """Number of digests of row ids in the draft."""

    parts: int = 0
    done: bool = False


def draft_folder(output: Path) -> Path:
    """The draft folder of a file, beside it, so that the draft can be renamed into place."""
    return output.with_name(f".{output.name}.draft")


class Draft:
    """A draft folder, locked. See `open_draft`."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self._folder = folder
        self._fingerprint = fingerprint

    def resume(self) -> tuple[State, NDArray[np.uint64]]:
        """(the state to continue from, the digests of the row ids so far)"""
        try:
            found = json.loads((self._folder / _STATE).read_text())
            state = State(**found.pop("state"))
            seen = np.fromfile(self._folder / _SEEN, np.uint64, state.seen)
            rows = sum(len(part) for part in self.parts(state))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):  # none, or damaged
            pass
        else:
            is_same = found == {"fingerprint": self._fingerprint}
            if is_same and (len(seen), rows) == (state.seen, state.kept):
                return state, seen
        for path in self._folder.iterdir():
            path.unlink()
        return State(), np.empty(0, np.uint64)

    def save(self, state: State, rows: Sequence[Any], seen: NDArray[np.uint64]) -> None:
        """Add a part and the state after it; after a crash in between, the draft is as before.

        Args:
            state: the state after the part; this method counts `parts` and `seen`.
            rows: tables of one schema.
            seen: digests of the new row ids.
        """
        if rows:
            table = pa.concat_tables(rows)
            packed = pa.ipc.IpcWriteOptions(compression="lz4")
            with (
                self._part(state.parts).open("wb") as file,
                pa.ipc.new_file(file, table.schema, options=packed) as writer,
            ):
                writer.write_table(table)
            sync(self._part(state.parts))
            state.parts += 1
        with (self._folder / _SEEN).open("ab") as file:
            file.truncate(state.seen * seen.itemsize)  # what a killed process wrote after its state
            file.write(seen.tobytes())
            flush(file)
        state.seen += len(seen)
        saved = {"fingerprint": self._fingerprint, "state": asdict(state)}
        write_whole(self._folder / _STATE, [json.dumps(saved).encode()])

    def parts(self, state: State) -> Iterator[Any]:
        """The tables of the saved parts in order, memory-mapped."""
        for number in range(state.parts):
            with pa.memory_map(str(self._part(number))) as source:
                yield pa.ipc.open_file(source).read_all()

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number:06}.arrow"

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def open_draft(output: Path, fingerprint: str) -> Generator[Draft]:
    """The locked draft of one output file.

    Args:
        fingerprint: of everything that decides the content of the output.

    Raises:
        OSError: the folder cannot be created, or another process has locked it.
    """
    folder = draft_folder(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot write {output}: {error.strerror}; choose another folder") from error
    with claimed(folder) as is_ours:
        if not is_ours:
            raise BlockingIOError(
                f"cannot prepare {output}: another process prepares it now; wait for it"
            )
        try:
            yield Draft(folder, fingerprint)
        finally:
            with suppress(OSError):
                folder.rmdir()  # if nothing is in it
