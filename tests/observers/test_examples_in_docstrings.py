"""Every public name of `rpt.observers` shows how it is used, and does what it shows."""

import doctest
import inspect

import pytest

from rpt import observers


@pytest.mark.parametrize("name", observers.__all__)
def test_example_runs(name):
    shown = getattr(observers, name)
    module = inspect.getmodule(shown)
    found = doctest.DocTestFinder(recurse=False).find(shown, name, globs=vars(module).copy())
    examples = [test for test in found if test.examples]
    assert examples, "no example"
    runner = doctest.DocTestRunner()
    for example in examples:
        assert runner.run(example).failed == 0
