"""`python -m rpt sites` and `python -m rpt report`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

__all__ = ["report_main", "sites_main"]


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _example(text: str) -> Tensor:
    """`2,16,64` → standard normal floats; `2,16:100` → integers below 100."""
    shape, _, below = text.partition(":")
    try:
        sizes = [int(size) for size in shape.split(",")]
        if min(sizes) < 1 or (below and int(below) < 1):
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no shape: write 2,16,64 for floats, 2,16:100 for integers below 100"
        ) from None
    return torch.randint(int(below), sizes) if below else torch.randn(sizes)


def _factory(parser: argparse.ArgumentParser, name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute):
        parser.error(f"{name!r} must name a factory as package.module:factory")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        target: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            target = getattr(target, part)
    except ImportError as error:
        parser.error(f"cannot import {module_name!r}: {error}")
    except AttributeError as error:
        parser.error(str(error))
    if not isinstance(target, nn.Module) and not callable(target):
        parser.error(f"{name!r} is neither a module nor callable")
    return target


def sites_main(argv: Sequence[str]) -> int:
    """Print which layers of a model the observation rule picks, and why.

    Returns:
        0; 2 for bad arguments, with one line on standard error.
    """
    parser = _OneLineParser(
        prog="python -m rpt sites",
        description="Derive a model's observation sites from one traced run.",
    )
    parser.add_argument(
        "factory",
        help="package.module:factory; it returns the model, or (model, *example_inputs)",
    )
    parser.add_argument(
        "--input",
        dest="inputs",
        action="append",
        type=_example,
        metavar="SHAPE",
        help="an example input: 2,16,64 for floats, 2,16:100 for integers below 100; repeatable",
    )
    parser.add_argument("--eval", action="store_true", help="judge the model in eval mode")
    arguments = parser.parse_args(argv)
    target = _factory(parser, arguments.factory)
    try:
        made = target if isinstance(target, nn.Module) else target()
    except TypeError as error:
        parser.error(f"{arguments.factory} must be callable without arguments: {error}")
    model, *inputs = made if isinstance(made, (tuple, list)) else (made,)
    if not isinstance(model, nn.Module):
        parser.error(f"{arguments.factory} returned {type(model).__name__}, not a module")
    inputs = arguments.inputs or inputs
    if not inputs:
        parser.error("no example input: return (model, input) from the factory, or pass --input")
    from .sites import derive_sites

    model.train(not arguments.eval)
    try:
        print(derive_sites(model, *inputs))
    except Exception as error:  # Whatever the user's model raises on these inputs.
        reason = str(error).splitlines()[0] if str(error) else ""
        parser.error(f"the model failed on the example: {type(error).__name__}: {reason}")
    return 0


def report_main(argv: Sequence[str]) -> int:
    """Draw what `rpt.observers.Recorder` wrote.

    Returns:
        0; 2 for bad arguments, with one line on standard error.
    """
    parser = _OneLineParser(
        prog="python -m rpt report",
        description="Draw ranks, polar weights, coherence and root refreshes of a recorded run.",
    )
    parser.add_argument(
        "records", type=Path, help="the JSON lines that rpt.observers.Recorder wrote"
    )
    parser.add_argument(
        "--out", type=Path, help="the picture; default: the records' name with .png"
    )
    parser.add_argument("--only", metavar="TEXT", help="only parameters whose name contains TEXT")
    arguments = parser.parse_args(argv)
    target = arguments.out or arguments.records.with_suffix(".png")
    from .report import write_report

    try:
        drawn = write_report(arguments.records, target, arguments.only)
    except ImportError:
        parser.error("the report needs matplotlib: pip install matplotlib")
    except OSError as error:
        parser.error(f"{error.filename or arguments.records}: {error.strerror or error}")
    except ValueError as error:
        parser.error(str(error))
    print(f"{target}: {len(drawn)} matrices")
    return 0
