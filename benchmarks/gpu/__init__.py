"""What runs on a GPU: a ladder of parts. Each is a process that prints a JSON line per figure; killed, it has reported the rest."""

MARK = "=> "  # begins such a line
