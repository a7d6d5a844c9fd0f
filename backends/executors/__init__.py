"""Other ways to run a program: numpy in adversarial orders, torch's own messages, calls without tags."""
