"""Summaries for TensorBoard, by the names of ``tf.summary``: `mpistrat.training.summary`."""

from mpistrat.training.summary import (
    SummaryWriter,
    create_file_writer,
    experimental,
    flush,
    histogram,
    image,
    record_if,
    scalar,
    should_record_summaries,
    text,
)

__all__ = [
    "SummaryWriter",
    "create_file_writer",
    "experimental",
    "flush",
    "histogram",
    "image",
    "record_if",
    "scalar",
    "should_record_summaries",
    "text",
]
