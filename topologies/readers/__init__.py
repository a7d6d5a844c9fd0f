"""Readers of what a machine's own tools write: text in, a `Machine` out; `files` sees which one serves."""
