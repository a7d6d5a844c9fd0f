"""Alltoall of blocks of any sizes, planned anew in milliseconds: what experts of a mixture ask at each step.

    planner = AlltoallvPlanner(fabric)    once: ways, candidates for the tightest cut, the linear program
    plan = planner.plan(sizes)            every step: bytes from each rank (row) to each (column)
    plan.rate, plan.bound, plan.gap       exact; the gap is 0 where the certificate proves the optimum
    verify(plan.schedule())               written out, for the checker, the simulator and files

`cuts` limits the time by what has to leave or enter a set of ranks, `rerouting` moves parts of blocks from
links that have too much to ways that have room, `bounds.commodity_flows` is the linear program that answers
where cuts do not, and `rounds` puts what passes the same switches into rounds in which no port has two
partners.
"""
