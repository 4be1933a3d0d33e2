"""The parts of benchmarks/gpu_suite.py. Each is a process that prints a JSON line per figure; killed, it has said the rest."""

MARK = "=> "  # begins such a line
