"""Event-driven times of every piece on every link; `service` says which piece a link carries next.

`simulator.simulate` is the entry for a schedule written out, `implicit` plays one link of each orbit for all.
"""
