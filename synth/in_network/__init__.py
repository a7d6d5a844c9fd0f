"""Trees that also join and fork at able switches: the cheapest ones, and the linear program that packs them.

`program` is the entry: the best rate with its trees and prices, by column generation. It asks `pricing` for
the cheapest trees under prices, exactly where few ranks are apart; `steiner_tree` is what a tree is.
Schedules are made of them by `synth.packing.in_network`, limits by `synth.bounds`.
"""
