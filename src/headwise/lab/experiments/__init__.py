"""One module per experiment, each with its ``EXPERIMENT``."""
