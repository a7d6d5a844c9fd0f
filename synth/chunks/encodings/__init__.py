"""One instance as a formula: `sat` (CaDiCaL), `ilp` (HiGHS), `smt` (z3, the paper's form).

`registry` names them, and `reachable_sends` says which sends can matter in S steps, for all of them.
"""
