"""Models that can be cut into stages (`layered`): by index, or any by its graph; and networks to plan for."""
