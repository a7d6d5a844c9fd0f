"""Linear programs: `highs` is the one door to HiGHS; floats propose, exact fractions decide.

`linear_program` and `exact_system` make a float solution exact, `integer_program` looks for whole numbers,
`tree_program` weighs trees on links or orbits.
"""
