"""What the site adds to the pages in this folder: the root's own pages, the reference, and some code.

The Markdown files link to each other as they lie in the repository. Here the links are turned: the root's
pages become pages of the site, and a link to a file that is no page becomes its name.
"""

from __future__ import annotations

import ast
import posixpath
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = {
    "README.md": "index.md",
    "RESULTS.md": "results.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
# The packages whose `__all__` is public, and the folder of each in the checkout.
PACKAGES = {
    "rpt": "rpt",
    "rpt.roots": "rpt/roots",
    "rpt.distributed": "rpt/distributed",
    "rpt.integrations": "rpt/integrations",
    "rpt.integrations.huggingface": "rpt/integrations/huggingface.py",
    "rpt.integrations.lightning": "rpt/integrations/lightning.py",
    "rpt.observers": "observers",
    "rpt.geometry.self_context": "geometry/self_context",
    "rpt.geometry.rt_filter": "geometry/rt_filter",
    "rpt.geometry.lorentz": "geometry/lorentz",
}
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
SOURCE = re.compile(r"^<!-- source: (.+) -->$", re.MULTILINE)

_assembled: tempfile.TemporaryDirectory[str] | None = None


def tree_of(path: Path) -> ast.Module:
    file = path / "__init__.py" if path.is_dir() else path
    return ast.parse(file.read_text(encoding="utf-8"))


def public_names(package: str) -> list[str]:
    """What `__all__` of a package says, read without importing it."""
    for node in tree_of(ROOT / PACKAGES[package]).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return sorted(ast.literal_eval(node.value), key=str.lower)
    raise LookupError(f"{package} has no __all__")


def identifier(package: str, name: str, path: Path | None = None) -> str:
    """`package.name`; where a module has that name too, the name inside the module that defines it."""
    path = path or ROOT / PACKAGES[package]
    if not (path / f"{name}.py").is_file() and not (path / name).is_dir():
        return f"{package}.{name}"
    for node in tree_of(path).body:
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            module = path.joinpath(*str(node.module).split("."))
            inside = f"{package}.{node.module}"
            return identifier(inside, name, module) if module.is_dir() else f"{inside}.{name}"
    return f"{package}.{name}"


@event_priority(100)  # before mkdocstrings reads its own settings
def on_config(config: Any) -> Any:
    """Lay the three folders out as they are installed, for the reference to be read from."""
    global _assembled
    _assembled = tempfile.TemporaryDirectory(prefix="rpt-docs-")
    tree = Path(_assembled.name) / "rpt"
    shutil.copytree(ROOT / "rpt", tree)
    for part in ("observers", "geometry"):
        shutil.copytree(ROOT / part, tree / part)
    for path in tree.rglob("*.py"):  # only the plural is a section whose doctests become code
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace("    Example:\n", "    Examples:\n"), encoding="utf-8")
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [_assembled.name]
    reference = [{package: f"reference/{package}.md"} for package in PACKAGES]
    config.nav = [{"Reference": reference} if "Reference" in part else part for part in config.nav]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the root's pages and one page of reference a package."""
    for source, target in ROOT_PAGES.items():
        text = turn_links((ROOT / source).read_text(encoding="utf-8"), source, target)
        files.append(File.generated(config, target, content=text))
    for package in PACKAGES:
        parts = [f"# {package}\n", f"::: {package}\n    options:\n      members: []\n"]
        parts[1] += "      show_root_heading: false\n"
        options = "    options:\n      inherited_members: true\n" if package == "rpt" else ""
        parts += [f"::: {identifier(package, name)}\n{options}" for name in public_names(package)]
        files.append(File.generated(config, f"reference/{package}.md", content="\n".join(parts)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Put code where a page names its source, and turn the links of the pages of this folder."""
    source = page.file.src_uri
    if source in ROOT_PAGES.values() or source.startswith("reference/"):
        return markdown
    markdown = turn_links(markdown, f"docs/{source}", source)
    return SOURCE.sub(lambda found: listing(found[1].split()), markdown)


def on_post_build(config: Any) -> None:
    """No public name may be missing from the reference."""
    for package in PACKAGES:
        page = (Path(config.site_dir) / "reference" / f"{package}.html").read_text(encoding="utf-8")
        names = [identifier(package, name) for name in public_names(package)]
        missing = [name for name in names if f'id="{name}"' not in page]
        if missing:
            raise LookupError(f"the reference of {package} lacks {', '.join(missing)}")
    if _assembled is not None:
        _assembled.cleanup()


def listing(candidates: list[str]) -> str:
    """The first of some files that exists, as a block of code."""
    path = next(name for name in candidates if (ROOT / name).is_file())
    return f"`{path}`:\n\n```python\n{(ROOT / path).read_text(encoding='utf-8')}```"


def turn_links(markdown: str, source: str, target: str) -> str:
    """Links of a repository's file `source` as links of the site's page `target`."""

    def turn(found: re.Match[str]) -> str:
        place, anchor = found[1], found[2] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), place))
        if path in ROOT_PAGES:
            path = f"docs/{ROOT_PAGES[path]}"
        if not path.startswith("docs/"):
            return f"](https://no.page/{path})"
        path = posixpath.relpath(path[len("docs/") :], posixpath.dirname(target) or ".")
        return f"]({path}{anchor})"

    turned = LINK.sub(turn, markdown)
    return re.sub(r"\[([^\]]+)\]\(https://no\.page/([^)]+)\)", r"\1 (`\2`)", turned)
