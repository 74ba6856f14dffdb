"""Training text that every machine has: the sources of Python's standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["VOCABULARY_SIZE", "Corpus", "decode", "encode", "load_corpus", "source_files"]

MAX_CHARACTERS = 4_000_000
MIN_CHARACTERS = 200_000
VALIDATION_EVERY = 10  # every tenth file is held out

# One fixed character set for every Python version: newline, printable ASCII, and one for the rest.
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
OTHER = len(CHARACTERS)
VOCABULARY_SIZE = len(CHARACTERS) + 1
_CODE_OF_BYTE = bytes(
    CHARACTERS.index(chr(byte)) if chr(byte) in CHARACTERS else OTHER for byte in range(256)
)


def encode(text: str) -> Tensor:
    """Characters to codes: uint8 (characters,), below `VOCABULARY_SIZE`."""
    if not text:
        return torch.empty(0, dtype=torch.uint8)  # a buffer of no bytes is refused
    as_bytes = text.encode("ascii") if text.isascii() else _one_byte_each(text)
    return torch.frombuffer(bytearray(as_bytes.translate(_CODE_OF_BYTE)), dtype=torch.uint8)


def _one_byte_each(text: str) -> bytes:
    return bytes(ord(c) if ord(c) < 128 else 255 for c in text)


def decode(codes: Sequence[int] | Tensor) -> str:
    """Codes to characters; what the vocabulary lacks comes back as U+FFFD."""
    return "".join(CHARACTERS[int(code)] if int(code) < OTHER else "\ufffd" for code in codes)


@dataclass(frozen=True)
class Corpus:
    """Encoded text, uint8 and one-dimensional.

    `fingerprint` is the SHA-256 of both parts: two runs with equal fingerprints saw the same text.
    """

    train: Tensor
    validation: Tensor
    files: int
    fingerprint: str


def source_files(folder: Path | None = None) -> list[Path]:
    """Return the standard library's top-level modules by name, without the build's own settings."""
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    return sorted(p for p in folder.glob("*.py") if not p.name.startswith("_sysconfigdata"))


def load_corpus(folder: Path | None = None, max_characters: int = MAX_CHARACTERS) -> Corpus:
    """Read the text: files in order of name until `max_characters`, every tenth held out.

    Raises:
        FileNotFoundError: the folder holds less than 200,000 characters of Python (a Python whose
            standard library is packed into an archive, for example).
    """
    parts: tuple[list[str], list[str]] = ([], [])
    total = files = 0
    for index, path in enumerate(source_files(folder)):
        text = path.read_text(encoding="utf-8", errors="replace")[: max_characters - total]
        parts[index % VALIDATION_EVERY == VALIDATION_EVERY - 1].append(text)
        total += len(text)
        files += 1
        if total >= max_characters:
            break
    if total < MIN_CHARACTERS:
        where = folder or sysconfig.get_paths()["stdlib"]
        raise FileNotFoundError(
            f"{where} holds {total:,} characters of Python source in {files} files; "
            f"at least {MIN_CHARACTERS:,} are needed to train on"
        )
    train, validation = (encode("".join(part)) for part in parts)
    digest = hashlib.sha256(train.numpy().tobytes() + b"|" + validation.numpy().tobytes())
    return Corpus(train, validation, files, digest.hexdigest())
