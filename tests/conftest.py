"""Gives each test process one thread of torch, which has to be said before torch is imported.

`make test` runs two processes on two cores, and the models of most tests are so small that waking a second thread takes
longer than the work: with one thread the same tests take about half of the CPU time. Tests of what threads share ask for
more (the fixture `two_threads`).
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
