"""What a layer without a matrix of its own tells an observer."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class NoSites(nn.Module):
    """A module that declares no observation site; those inside it declare their own."""

    def optimizer_observation_modules(self) -> Iterable[nn.Module]:
        """None."""
        return []
