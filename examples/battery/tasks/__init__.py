"""All tasks by name, in the order of the report."""

from __future__ import annotations

from ..task import Task
from . import images, ladder, low_dimensional, other, science, tabular, text

__all__ = ["TASKS"]

TASKS: dict[str, Task] = {
    task.name: task
    for module in (text, images, science, tabular, low_dimensional, other, ladder)
    for task in module.TASKS
}
