"""What layers and links cost: `measured`, from operators (`analytic`), from the topology (`link_costs`)."""
