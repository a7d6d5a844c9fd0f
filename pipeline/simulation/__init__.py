"""Parts of the simulator: its clock, messages on shared links, and what replicas exchange at the end."""
