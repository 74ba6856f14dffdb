"""`python -m rpt COMMAND`: the package's commands, each imported only when asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

COMMANDS = {
    "demo": ("rpt.demo.cli", "main", "train a small transformer with AdamW and with RPT"),
    "sites": ("rpt.observers.cli", "sites_main", "derive a model's observation sites"),
    "report": ("rpt.observers.cli", "report_main", "draw a recorded run"),
}


def _usage() -> str:
    lines = ["usage: python -m rpt COMMAND [options]", ""]
    lines += [f"  {name:<8}{what}" for name, (_, _, what) in COMMANDS.items()]
    return "\n".join([*lines, "", "python -m rpt COMMAND --help lists a command's options."])


def main(arguments: Sequence[str] | None = None) -> int:
    """Dispatch to a command.

    Returns:
        The command's exit status; 2 for a command that does not exist.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in COMMANDS:
        print(
            f"python -m rpt: error: unknown command {name!r}; choose from {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return 2
    module, function, _ = COMMANDS[name]
    command: Callable[[Sequence[str]], int | None] = getattr(import_module(module), function)
    return command(rest) or 0


if __name__ == "__main__":
    sys.exit(main())
