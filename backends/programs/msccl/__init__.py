"""MSCCL's algorithm files (XML): `reader` makes a `GlobalProgram` of text, `writer` the text of a program."""
