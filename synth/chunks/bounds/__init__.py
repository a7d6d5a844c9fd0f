"""Limits of R/C in S steps that hold for every number of chunks, as certificates, and their exact check.

`step_certificate` holds the values; `step_check`, with `flow_check` and `spanning_check`, recomputes what
they prove and imports no builder; `flow_bound` builds those of flows, `synth.chunks.trees` those of trees.
"""
