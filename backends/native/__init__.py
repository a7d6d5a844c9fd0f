"""The data path in C: frames over channels, graphs of actions, sums; `native.h` says what is where.

A call into the library releases the interpreter's lock for as long as it works or sleeps, so that a busy
interpreter does not slow a collective down. What is rare comes back to Python with a code.
"""
