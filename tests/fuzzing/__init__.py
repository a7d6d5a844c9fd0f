"""Random fabrics, slow exact references that share no code with `synth`, and the comparison of labels."""
