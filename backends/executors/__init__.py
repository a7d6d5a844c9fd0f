"""Another way to run a program: torch's own messages, calls without tags."""
