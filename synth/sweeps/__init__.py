"""Tables of schedules for all that a machine may become: its fragments, and what failures leave of them."""
