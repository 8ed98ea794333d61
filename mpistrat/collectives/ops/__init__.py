"""The cross-device ops that a strategy is given: one class a file."""
