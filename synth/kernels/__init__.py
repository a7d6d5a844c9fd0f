"""Graph algorithms on arrays, most of them compiled: maximum flow, cheapest arborescence, distances.

`compiled` is the one door to numba; `cache_folder` says where caches are. Imports values alone.
"""
