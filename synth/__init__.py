"""Synthesis of collective-communication algorithms: bounds, schedules, verification, simulation."""
