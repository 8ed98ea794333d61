"""Functions that a coordinator sends to workers: asynchronous training and task farms."""
