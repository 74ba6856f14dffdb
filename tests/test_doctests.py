"""Every public name shows how it is used, and what it shows is true."""

import doctest
import importlib
import inspect

import pytest

PACKAGES = (
    "rpt",
    "rpt.roots",
    "rpt.observers",
    "rpt.integrations",
    "rpt.distributed",
    "rpt.geometry.self_context",
    "rpt.geometry.rt_filter",
    "rpt.geometry.lorentz",
)
# Packages whose examples are still being written.
PENDING: tuple[str, ...] = ()
# Constants and aliases have no docstring of their own: their module's shows them.
_CONFIG = "rpt.geometry.lorentz.models.config"
SHOWN_BY = {
    "ABLATION": _CONFIG,
    "RADIUS_ABLATION": _CONFIG,
    "SIZES": _CONFIG,
    "RADIUS_RULES": "rpt.geometry.lorentz.layers.radius",
    "PointLike": "rpt.geometry.lorentz.ops.point",
    "TangentLike": "rpt.geometry.lorentz.ops.point",
}
PUBLIC = [(p, name) for p in PACKAGES for name in importlib.import_module(p).__all__]


def docstrings(package, name):
    """Of a public name, its own first; a class's methods follow, what it inherits does not."""
    if name in SHOWN_BY:
        return [importlib.import_module(SHOWN_BY[name]).__doc__]
    thing = getattr(importlib.import_module(package), name)
    if not inspect.isclass(thing):
        return [thing.__doc__ or ""]
    members = [getattr(member, "__func__", member) for member in vars(thing).values()]
    documented = [m for m in members if inspect.isroutine(m) or isinstance(m, property)]
    return [text or "" for text in (vars(thing).get("__doc__"), *(m.__doc__ for m in documented))]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_an_example(package):
    def shown(name):
        own = docstrings(package, name)[0]
        return ">>>" in own and (name not in SHOWN_BY or name in own)

    missing = [name for where, name in PUBLIC if where == package and not shown(name)]
    assert package in PENDING or missing == []


@pytest.mark.filterwarnings("ignore:fused_attention is now called:DeprecationWarning")
@pytest.mark.parametrize(("package", "name"), PUBLIC, ids=lambda part: part)
def test_the_examples_of_a_public_name_run(package, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parser, told = doctest.DocTestParser(), []
    for text in docstrings(package, name):
        doctest.DocTestRunner().run(parser.get_doctest(text, {}, name, None, None), out=told.append)
    assert not told, "".join(told)
