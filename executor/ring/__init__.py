"""A message queue in shared memory: one writer, N readers on the same machine, all messages in the same order."""
