"""A battery of training tasks that says when which optimizer wins: `python -m examples.battery`."""
