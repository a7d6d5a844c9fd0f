"""The frozen acceptance suite: what Arborcast promises, judged from outside.

It asks by the command `synth` and by the names that README shows, and judges by `judges.py`, which imports
nothing of the product. Rooms, names and formats of the code may change; this suite may not: it changes in
commits of its own alone, and each says why a promise became another one.

How to read a failure: a case is a line of a table and named by it. On the left stands what the product says,
on the right what the table or the judge does. `Wrong` is the judge's replay of a schedule file and names the
step, the chunk, the rank or the link. A line of `samples/frontier.json` is a floor: points may become better,
but no `proved` and no `complete` may go away. No time that a clock measured is ever judged.
"""
