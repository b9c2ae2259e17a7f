"""The bytes of a log: plain, gzip, xz or zstd, in UTF-8 or UTF-16. Standard library only.

zstd needs Python 3.14, the package `zstandard`, or the program `zstd`.
"""

import codecs
import io
import lzma
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from gzip import BadGzipFile, GzipFile
from importlib import import_module
from pathlib import Path
from typing import IO, BinaryIO, cast

from verl_mixed.run.text import printable

CHUNK_BYTES = 1 << 20

XZ_BYTES = 1 << 28
"""Memory to unpack xz; what `xz -9` writes needs a quarter of it."""

PACKED = (".gz", ".xz", ".zst")
"""Ends of the names of compressed logs. The first bytes of a file decide what it is."""

_GZIP, _XZ, _ZSTD = b"\x1f\x8b", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"
_NO_ZSTD = (
    "nothing here reads zstd; install the program `zstd` or the package zstandard, "
    "or unpack the file on another machine"
)
_DAMAGED = (BadGzipFile, EOFError, zlib.error, lzma.LZMAError)


def log_chunks(path: Path | None, name: str) -> Iterator[bytes]:
    """The text of a log as UTF-8, in chunks; `path` None is standard input.

    A compressed file that ends in its middle gives the bytes before, and a note on stderr.

    Raises:
        OSError: the file cannot be read.
    """
    yield from _as_utf8(_unpacked(path, name))


def _unpacked(path: Path | None, name: str) -> Iterator[bytes]:
    if path is None:
        yield from _read(sys.stdin.buffer.read)
        return
    with path.open("rb") as file:
        head = file.peek(8)[:8] if file.seekable() else b""
        try:
            if head.startswith(_GZIP):
                with GzipFile(fileobj=file) as packed:
                    yield from _read(packed.read1)  # gives the bytes before a damage, then raises
            elif head.startswith(_XZ):
                yield from _read_xz(file)
            elif head.startswith(_ZSTD):
                yield from _read_zstd(file, path)
            else:
                yield from _read(file.read)
        except _DAMAGED as error:
            # the log is still written, or a full disk cut it off
            print(f"note: {printable(name)} ends in its middle: {error}", file=sys.stderr)


def _read(read: Callable[[int], bytes | None]) -> Iterator[bytes]:
    while chunk := read(CHUNK_BYTES):  # None: stdin does not block, and has nothing now
        yield chunk


def _read_xz(file: BinaryIO) -> Iterator[bytes]:
    unpack, is_whole = lzma.LZMADecompressor(memlimit=XZ_BYTES), True
    while data := file.read(CHUNK_BYTES):
        # zeros may pad a stream; text that no chunk had room for needs no input
        while data.strip(b"\0") or not (unpack.needs_input or unpack.eof):
            if text := unpack.decompress(data, CHUNK_BYTES):
                yield text
            is_whole, data = unpack.eof, unpack.unused_data
            if unpack.eof:  # a file may have several streams
                unpack = lzma.LZMADecompressor(memlimit=XZ_BYTES)
    if not is_whole:
        raise EOFError("the last stream is not complete")


def _read_zstd(file: BinaryIO, path: Path) -> Iterator[bytes]:
    if opened := _zstd_of_python(file):
        with opened as packed:
            yield from _read(packed.read)
        return
    program = shutil.which("zstd")
    if program is None:
        raise OSError(None, _NO_ZSTD)
    command = [program, "-dcq", "--", os.fspath(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None, "it is a pipe"
        yield from _read(process.stdout.read)
    if process.returncode:
        raise EOFError("zstd could not read the rest")


def _zstd_of_python(file: BinaryIO) -> AbstractContextManager[IO[bytes]] | None:
    """The unpacked file, by Python 3.14 or by the package zstandard; None if neither is here."""
    try:
        return import_module("compression.zstd").open(file, "rb")
    except ImportError:
        pass
    try:
        zstandard = import_module("zstandard")
    except ImportError:
        return None
    packed = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
    return cast("AbstractContextManager[IO[bytes]]", io.BufferedReader(packed, CHUNK_BYTES))


def _as_utf8(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """UTF-16 as UTF-8; everything else as it is."""
    first = next(chunks, b"")
    coding = _utf16_of(first)
    if coding is None:
        yield from filter(None, (first,))
        yield from chunks
        return
    decoder = codecs.getincrementaldecoder(coding)("replace")
    yield decoder.decode(first).removeprefix("\ufeff").encode("utf-8", "replace")
    for chunk in chunks:
        yield decoder.decode(chunk).encode("utf-8", "replace")


def _utf16_of(first: bytes) -> str | None:
    """The byte order of UTF-16, by its mark, or by the zero bytes that Latin letters have in it."""
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16-le" if first.startswith(codecs.BOM_UTF16_LE) else "utf-16-be"
    head = first[:4096]
    if len(head) < 8:
        return None
    even, odd = head[0::2].count(0), head[1::2].count(0)
    most = len(head) // 2
    if odd > 0.8 * most and even < 0.1 * most:
        return "utf-16-le"
    return "utf-16-be" if even > 0.8 * most and odd < 0.1 * most else None
