"""Options of parameter groups as the optimizer keeps them: checked, plain, and backends under names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import options
from .roots import RootBackend, resolve_roots

__all__ = ["Groups"]


class Groups:
    """How options of a group are kept.

    Args:
        custom: root backends that no text describes, by the names they go under.
    """

    def __init__(self, custom: dict[str, RootBackend]) -> None:
        self.custom = custom

    def validated(self, group: Mapping[str, Any], where: str) -> dict[str, Any]:
        """A group's options, checked, as plain values and text."""
        roots = group["roots"]
        if isinstance(roots, str):
            roots = self.custom.get(roots, roots)
        plain = options.validated({**group, "roots": roots}, where)
        options.refuse_uncapturable(plain, resolve_roots(roots), where)
        return plain | {"roots": self.name_roots(roots)}

    def name_roots(self, roots: str | RootBackend) -> str:
        """The backend as text, so that groups and checkpoints hold plain values only."""
        if isinstance(roots, str):
            return roots
        for name, known in self.custom.items():
            if known is roots:
                return name
        text = roots.describe()
        try:
            if resolve_roots(text) == roots:
                return text
        except ValueError:
            pass
        name, count = text, 1
        while self.custom.setdefault(name, roots) is not roots:
            count += 1
            name = f"{text}#{count}"
        return name

    def backend(self, name: str) -> RootBackend:
        """The backend that goes under a name.

        Raises:
            ValueError: one that is not known here, with the remedy.
        """
        if name in self.custom:
            return self.custom[name]
        try:
            return resolve_roots(name)
        except ValueError as error:
            raise ValueError(
                f"{error}. If it is a backend of your own, build the optimizer with that instance as "
                "roots= before loading"
            ) from error
