"""How long a step is: the root mean square that every update is given before the learning rate.

Pure functions over a stack: updates are (b, n), numbers (b, 1) (`rpt.rule.scalars`).
Source: the specification, section 8.
"""

from __future__ import annotations

import math

from torch import Tensor

from .scalars import Numbers, Scalars

__all__ = ["rescale_to_rms"]


def rescale_to_rms(
    update: Tensor, length: Scalars, rms: float, size: Scalars, numbers: Numbers
) -> Tensor:
    """Give every row the root mean square `rms` over its `size` true entries; a zero row stays zero.

    A row of one entry keeps its length: there is nothing to spread, and a fixed length would leave
    its sign alone. A scalar's first step is then the learning rate, as AdamW's.

    Args:
        update: u, (b, n), changed in place.
        length: ‖u‖, (b, 1).
        rms: the target, in units of the learning rate.
        size: number of entries behind each row without padding, (b, 1).
        numbers: how the numbers are kept.
    """
    where = numbers.where
    target = where(size > 1, rms * size**0.5, length)
    return update.mul_(numbers.tensor(target / where(length > 0, length, math.inf)))
