"""What a wheel holds, and what importing the package does not do. No network."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build from a copy: setuptools leaves build folders in the source tree."""
    source = tmp_path_factory.mktemp("source")
    tracked = [
        *(ROOT / name for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE")),
        *(ROOT / "MANIFEST.in",),
        *(
            p
            for part in ("rpt", "observers", "geometry", "tests")
            for p in (ROOT / part).rglob("*.py")
        ),
        ROOT / "rpt" / "py.typed",
    ]
    for path in tracked:
        target = source / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "-w", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=out)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_only_rpt_lands_in_site_packages(wheel):
    assert wheel.name.startswith("residual_polar_transport-")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert top == {"rpt", next(n for n in top if n.endswith(".dist-info"))}
    assert "rpt/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_every_module_of_the_three_folders_is_in_the_wheel(wheel):
    names = {n for n in zipfile.ZipFile(wheel).namelist() if n.endswith(".py")}
    expected = {p.relative_to(ROOT).as_posix() for p in (ROOT / "rpt").rglob("*.py")}
    for part in ("observers", "geometry"):
        expected |= {f"rpt/{p.relative_to(ROOT).as_posix()}" for p in (ROOT / part).rglob("*.py")}
    assert names == expected


def test_the_installed_wheel_works_outside_the_checkout(wheel, tmp_path):
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    code = (
        "import rpt, rpt.observers, rpt.geometry.self_context as s, torch;"
        "print(rpt.__file__);"
        "rpt.ResidualPolarTransport(s.ContextMLP(2, 1, width=4).parameters());"
        "print(s.ContextMLP(2, 1, width=4)(torch.zeros(3, 2)).shape)"
    )
    done = _run(code, cwd=tmp_path, path=installed)
    assert str(installed) in done
    assert "torch.Size([3, 1])" in done


def test_import_is_lean():
    """Importing the package reaches for neither the layers nor the process groups."""
    code = (
        "import sys, torch;"
        "before = set(sys.modules);"
        "import rpt;"
        "new = set(sys.modules) - before;"
        "bad = [m for m in new if m.startswith(('rpt.geometry', 'rpt.demo', 'torch.distributed',"
        " 'rpt.distributed', 'matplotlib', 'tqdm', 'scipy'))];"
        "print('unwanted:', sorted(bad))"
    )
    assert "unwanted: []" in _run(code, cwd=ROOT, path=ROOT)


def test_the_package_shows_what_a_user_needs_and_no_more():
    code = (
        "import sys, rpt;"
        "shown = [n for n in dir(rpt) if not n.startswith('_')];"
        "assert shown == ['RPT', 'ResidualPolarTransport', 'distributed', 'geometry', 'observers',"
        " 'roots'], shown;"
        "assert rpt.RPT is rpt.ResidualPolarTransport;"
        "assert 'rpt.geometry' not in sys.modules and 'rpt.distributed' not in sys.modules;"
        "print(rpt.geometry.__name__, rpt.observers.derive_sites.__name__, rpt.roots.FullRoots.__name__,"
        " rpt.distributed.report.__name__, rpt.__version__);"
        "\ntry: import rpt.rpt\nexcept ModuleNotFoundError: print('no second one')"
        "\ntry: import rpt.tests\nexcept ModuleNotFoundError: print('nor anything beside it')"
    )
    shown = _run(code, cwd=ROOT, path=ROOT)
    assert "rpt.geometry derive_sites FullRoots report" in shown
    assert "no second one" in shown
    assert "nor anything beside it" in shown


def test_there_is_one_version(wheel):
    (metadata,) = (n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    version = re.search(r"^Version: (.*)$", text, re.M)[1]
    assert f'__version__ = "{version}"' in (ROOT / "rpt" / "__init__.py").read_text()


def test_the_rule_and_the_store_know_nothing_of_the_optimizer():
    for module, imported in _imports():
        if module.startswith("rpt.rule"):
            assert imported.startswith(("rpt.rule", "rpt.roots")) or not imported.startswith(
                "rpt"
            ), (
                module,
                imported,
            )
        if module.startswith("rpt.store"):
            assert imported.startswith(("rpt.store", "rpt.roots")) or not imported.startswith(
                "rpt"
            ), (
                module,
                imported,
            )


def _imports():
    """Every import in the three folders, function-level ones too: (importing module, imported)."""
    for folder in ("rpt", "observers", "geometry"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            module = parts if folder == "rpt" else ("rpt", *parts)
            package = module[:-1]  # also right for `__init__`, which is its own package
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    yield from ((".".join(module), alias.name) for alias in node.names)
                elif isinstance(node, ast.ImportFrom):
                    base = package[: len(package) - node.level + 1] if node.level else ()
                    source = ".".join([*base, *([node.module] if node.module else [])])
                    yield from (
                        (".".join(module), f"{source}.{alias.name}") for alias in node.names
                    )


def test_the_arrows_between_the_packages_point_one_way():
    found = [(a, b) for a, b in _imports() if b.split(".")[0] == "rpt"]
    assert len(found) > 20, "the scan saw hardly any import; it is broken"
    wrong = []
    for module, imported in found:
        if module.startswith("rpt.geometry"):
            allowed = imported.startswith(("rpt.geometry", "rpt.observers.protocol"))
        elif module.startswith(("rpt.observers", "rpt.roots")):
            allowed = not imported.startswith(
                ("rpt.optimizer", "rpt.ResidualPolarTransport", "rpt.geometry", "rpt.demo")
            )
        elif module.startswith(("rpt.demo", "rpt.__main__")):
            allowed = True
        else:
            allowed = not imported.startswith(("rpt.geometry", "rpt.demo"))
        if not allowed:
            wrong.append(f"{module} imports {imported}")
    assert wrong == []


def _run(code, cwd, path):
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
