import penstock.executor  # noqa: F401 - before torch: it sets how torch's threads wait
