"""The process group "synth": from a fabric to schedules, and from calls to runs."""
