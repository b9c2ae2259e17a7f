"""Logs in all their packings; logs that are empty, missing or damaged beside others."""

import gzip
import io
import lzma
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_mixed.diagnose import log_file
from verl_mixed.diagnose.diagnose import main

OOM = "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"
TEXT = ("fine\n" * 1000 + OOM + "\n" + "fine\n" * 2000).encode()


def zstd(text: bytes) -> bytes:
    if shutil.which("zstd"):
        return subprocess.run(["zstd", "-c"], input=text, capture_output=True, check=True).stdout
    return pytest.importorskip("zstandard").ZstdCompressor().compress(text)


def utf16(text: bytes, coding: str = "utf-16") -> bytes:
    return text.decode().encode(coding)


PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "plain": lambda text: text,
    "gzip": gzip.compress,
    "xz": lzma.compress,
    "xz of two streams": lambda text: lzma.compress(text[:3000]) + lzma.compress(text[3000:]),
    "zstd": zstd,
    "utf-16 with a mark": utf16,
    "utf-16 without a mark": lambda text: utf16(text, "utf-16-le"),
    "utf-16, the other order": lambda text: utf16(text, "utf-16-be"),
    "gzip of utf-16": lambda text: gzip.compress(utf16(text)),
}


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_log_is_read_as_what_it_holds(
    packing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "worker.out"
    log.write_bytes(PACKINGS[packing](TEXT))

    code = main([str(log)])

    assert (code, f"{log}:1001 (byte 5000)" in capsys.readouterr().out) == (1, True)


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_a_packed_log_that_is_cut_off_is_read_as_far_as_it_goes(
    pack: Callable[[bytes], bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "worker.out"
    log.write_bytes(pack(TEXT + bytes(range(256)) * 99)[:-40])

    assert main([str(log)]) == 1
    assert "ends in its middle" in capsys.readouterr().err


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_a_packed_log_is_unpacked_in_chunks_however_small_it_is(
    pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    log = tmp_path / "worker.out"
    log.write_bytes(2 * pack(bytes(20 << 20)))
    sizes = [len(chunk) for chunk in log_file.log_chunks(log, "worker.out")]
    assert (sum(sizes), max(sizes) <= log_file.CHUNK_BYTES) == (40 << 20, True)


def test_the_name_of_a_log_does_not_act_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a\x1b]0;title\x07"
    folder.mkdir()
    (folder / "\x1b[2J.log").write_text(OOM)
    (folder / "\x1b[3J.log.gz").write_bytes(gzip.compress(OOM.encode())[:-9])
    (folder / "\x1b[4J.log.gz").write_bytes(gzip.compress(b""))

    main([str(folder), str(folder / "\x1b[5J")])

    output = capsys.readouterr()
    assert "\x1b" not in output.out + output.err
    assert "ends in its middle" in output.err and "is empty" in output.err


def test_the_package_zstandard_is_used_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unpack:
        def stream_reader(self, file: io.BytesIO, *, read_across_frames: bool) -> io.BytesIO:
            return io.BytesIO(b"unpacked " + file.read())

    class Package:
        ZstdDecompressor = Unpack

    def load(name: str) -> type[Package]:
        if name != "zstandard":
            raise ImportError(name)
        return Package

    monkeypatch.setattr(log_file, "import_module", load)

    assert b"".join(log_file._read_zstd(io.BytesIO(b"x"), Path("log"))) == b"unpacked x"


def test_without_anything_that_reads_zstd_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(log_file, "import_module", load)
    monkeypatch.setenv("PATH", str(tmp_path))
    log = tmp_path / "train.log.zst"
    log.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))

    assert main([str(log)]) == 2
    assert "install the program `zstd` or the package zstandard" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("logs", "code", "says"),
    [
        # names of logs, exit code, a text on stderr
        ((), 2, "no log is named"),
        (("empty",), 2, "every log is empty"),
        (("missing",), 2, "cannot read"),
        (("folder",), 2, "no log with any text"),
        (("empty", "fine"), 0, "empty is empty"),
        (("fine", "missing"), 2, "cannot read"),
        (("missing", "failed"), 1, "cannot read"),
        (("folder", "empty", "failed"), 1, "empty is empty"),
    ],
)
def test_a_log_without_text_does_not_stop_the_others(
    logs: tuple[str, ...],
    code: int,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "fine").write_text("fine\n")
    (tmp_path / "failed").write_text(OOM)

    got = main([str(tmp_path / log) for log in logs])

    output = capsys.readouterr()
    assert got == code
    assert says in output.err
    assert ("cuda-out-of-memory" in output.out) is ("failed" in logs)
