"""A program that runs a model over a Ray cluster and reports what happens, one line of JSON at a time.

argv: the model's folder. Lines on standard input: arguments of `run`, which prints the ranks' processes and tokens, then
goes on generating until the executor fails, and prints the failure; "enough", which ends it in peace.
"""

import json
import queue
import sys
import threading
from pathlib import Path
from typing import Any

import ray

from penstock.executor.protocol import ExecutorError
from penstock.executor.ranks import ray_executor
from tests.support.checkpoints import config_of
from tests.support.driver import Driver


def report(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def run(model: str, num_ranks: int, place_timeout_s: float, can_kill: bool) -> None:
    config = config_of(Path(model), num_ranks)
    ray_executor.PLACE_TIMEOUT_S = place_timeout_s
    if not can_kill:
        vars(ray_executor)["remove_placement_group"] = vars(ray)["kill"] = kept.append
    try:
        executor = ray_executor.open_ray(config)
    except ExecutorError as error:
        report(error=str(error))
        return
    driver = Driver(executor)
    first = driver.admit([5, 6, 7, 8, 9])
    driver.generate(first, count=12)
    report(
        tokens=first.output,
        pids=[worker.pid for worker in executor.worker_watch.workers],
        names=[worker.name for worker in executor.worker_watch.workers],
    )
    try:
        while not enough.is_set():
            driver.generate(driver.admit([1, 2, 3]), count=4)
            driver._next_slot = 1
            driver.free = list(range(20, executor.info.num_blocks))
        executor.close()
        report(closed=True)
    except ExecutorError as error:
        report(error=str(error))
        executor.close()


if __name__ == "__main__":
    kept: list[Any] = []  # actors end with their last reference too
    orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    enough = threading.Event()

    def hear() -> None:
        for line in sys.stdin:
            if line.strip() == "enough":
                enough.set()
            else:
                enough.clear()
                orders.put(json.loads(line))
        enough.set()
        orders.put(None)

    threading.Thread(target=hear, daemon=True).start()
    while (arguments := orders.get()) is not None:
        run(sys.argv[1], **arguments)
