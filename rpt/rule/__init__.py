"""The update rule, pure, over tensors: `simple` says it one matrix at a time, `update` for a whole stack."""
