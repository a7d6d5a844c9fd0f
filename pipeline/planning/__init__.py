"""How plans are found: the order of the devices, memory, the dynamic program, the search, what it beats."""
