"""The cross-device ops that a strategy can use."""
