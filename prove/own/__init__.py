"""Starts Penstock servers, proves them and injects faults into them. Only this part of `prove` needs the engine."""
