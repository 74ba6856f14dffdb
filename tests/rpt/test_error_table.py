"""Every message that the table of errors quotes is one that the code can say."""

import ast
import re
from pathlib import Path

import pytest
import torch

import rpt
from rpt import observers

TABLE = Path(__file__).parents[2] / "docs" / "errors.md"


def speaks(node):
    """Whether it raises or warns, or makes words for what does: returned, or a constant of the module."""
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper()
    function = getattr(node, "func", None)
    name = getattr(function, "id", getattr(function, "attr", ""))
    return isinstance(node, (ast.Raise, ast.Return)) or "warn" in name


def literals(tree):
    """String literals, f-strings with their holes left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(v.value for v in node.values if isinstance(v, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def spoken():
    """What the optimizer and the observers raise or warn of; no docstring is among it."""
    for package in (rpt, observers):
        for path in Path(package.__file__).parent.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if speaks(node):
                    yield from literals(node)


def composed():
    """What is put together from a table of ranges, as it is said."""
    for options in ({"lr": -1.0}, {"eps": -1.0}):
        with pytest.raises(ValueError) as caught:
            rpt.ResidualPolarTransport([torch.nn.Parameter(torch.ones(2))], **options)
        yield str(caught.value)


def quoted():
    for line in TABLE.read_text().splitlines():
        if line.startswith("| `"):
            yield re.match(r"\| `([^`]+)`", line)[1]


@pytest.mark.skipif(not TABLE.exists(), reason="the documentation is not beside the tests")
def test_the_table_quotes_messages_that_exist():
    texts = [*spoken(), *composed()]
    missing = [q for q in quoted() if not any(q in text for text in texts)]
    assert missing == []
    assert len(list(quoted())) > 30
