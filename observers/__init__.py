"""From a model to entropy ranks: what to observe, how, and when."""
