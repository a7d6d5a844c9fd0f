"""Large symmetric schedules kept small: representatives and the translations that make all the others."""
