"""The process of a switch that adds and multicasts: `synth aggregate` starts one.

`aggregator` accepts groups and their ranks, `job` executes the switch's programs for one group after the
other's schedules have been verified. Groups find it through `backends.schedules.enlistment`.
"""
