"""The question of a chunk schedule: blocks copied over routes in S steps of R rounds.

`time_reversal` turns reductions into it, `reachable_sends` leaves what can matter, `prune` cuts an answer
down to a tree per chunk.
"""
