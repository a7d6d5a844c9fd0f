"""Symmetries of a topology, declared or found: automorphisms, isomorphism, groups of translations.

`translation_search` finds the largest abelian group that moves every rank. Imports values and `kernels`.
"""
