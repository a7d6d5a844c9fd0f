"""One instance as a formula: `sat` (CaDiCaL), `ilp` and `flow_ilp` (HiGHS), `smt` (z3, the paper's form).

`outcome` is what each may answer; `refutation` writes an infeasibility as DIMACS with its DRAT proof.
"""
