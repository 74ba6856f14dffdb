"""Where state lives: what is kept of a parameter, in which stack, and at what cost."""
