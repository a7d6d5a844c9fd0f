"""Spanning-tree packings: exact, by multiplicative weights, with few trees, and with free roots."""
