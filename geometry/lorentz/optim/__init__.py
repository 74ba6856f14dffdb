"""Points as parameters, and the optimizer for them."""
