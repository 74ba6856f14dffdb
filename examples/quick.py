"""What the examples share: what `--quick` is worth, and where pictures go."""

from __future__ import annotations

from pathlib import Path

__all__ = ["RUNS", "announce", "writable"]

RUNS = Path("runs")  # git ignores it


def announce(quick: bool) -> None:
    """With `--quick`, say before anything else that no figure that follows means anything."""
    if quick:
        print(
            "--quick shows that the example runs. It is far too short for its figures to mean anything.",
            flush=True,
        )


def writable(path: str | Path) -> Path:
    """The path, in a folder that exists."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
