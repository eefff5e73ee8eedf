"""The command line: one module per verb, one output sink, one table from errors to sentences."""
