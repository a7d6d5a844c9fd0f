"""How bytes travel between two ranks: over sockets, or through memory that both can see."""
