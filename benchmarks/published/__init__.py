"""The published results that this project set out to reproduce: each before and after, in one run (__main__.py)."""
