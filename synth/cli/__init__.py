"""The command `synth`: one module for each larger command, and how all of them ask and speak.

`app` is the entry. The only place in `synth` that imports the other packages, inside its commands.
"""
