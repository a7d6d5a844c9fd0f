"""A program as data flow, run in one thread: sends what is complete, uses what has come.

`task_graph` compiles a program, `engine` runs calls (`run`), `arithmetic` combines. Imports `lowering` and
`transport`.
"""
