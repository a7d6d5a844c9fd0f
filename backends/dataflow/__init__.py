"""A program as data flow, run in one thread: sends what is complete, uses what has come.

`task_graph` compiles a program, `graph_template` one for all lengths of the buffer, `engine` runs calls
(`run`), `arithmetic` combines. Imports `lowering` and `transport`.

A graph is compiled once for each schedule and number of pieces and stretched to the length of a call
(`schedules.held` keeps both), so that a call is prepared by the one before it. The engine sleeps in `poll`:
with the 3 to 15 descriptors of a host's ranks it takes 0.45 to 1.1 us, `epoll` 0.5 and 0.35 for each change
of what a channel waits for.
"""
