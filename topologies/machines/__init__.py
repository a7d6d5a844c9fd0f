"""The products of the catalog by who makes them, each with the public source of its rates.

`boxes` has what boxes of several vendors share; the others end in `ENTRIES`, lines of the catalog. Ranks are
numbered box by box, inside a box as the machine's own tools number the GPUs. Where no latency has been
published, that of NVLink stands in for a link between chips (`topologies.rates`).
"""
