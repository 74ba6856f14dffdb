"""Pure functions on points in polar form."""
