"""Large symmetric schedules kept small: representatives and the translations that make all the others.

`methods` is the entry and says which questions have such an answer; trees come from `packing.symmetric`.
"""
