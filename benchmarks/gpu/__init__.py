"""GPU measurements as a ladder of parts. Each is a process that prints a JSON line per figure, even if killed later."""
