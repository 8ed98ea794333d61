"""The cross-device ops that a strategy can use: one class per file."""
