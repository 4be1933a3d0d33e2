"""The factory of executors. It is part of the composition root: the only module that imports every kind."""

from collections.abc import Callable

from penstock.executor.protocol import Executor, ExecutorConfig, ModelInfo
from penstock.executor.ranks.ranked import open_multiproc


def open_executor(config: ExecutorConfig, progress: Callable[[str], None] = lambda _line: None) -> Executor:
    """Load the model and allocate its memory. `progress` gets a line for every stage that may take long.

    Torch is imported here and not earlier, because light commands do not need it."""
    kind = config.kind
    if kind == "auto":
        kind = "uniproc" if config.tensor_parallel_size == 1 else "multiproc"
    if kind == "uniproc":
        from penstock.executor.uniproc import UniprocExecutor

        return UniprocExecutor(config, progress)
    if kind == "multiproc":
        return open_multiproc(config, progress)
    from penstock.executor.ranks.ray_executor import open_ray

    return open_ray(config, progress)


def preview(config: ExecutorConfig) -> ModelInfo:
    """Return what a start would say of the model and its memory, without loading its weights."""
    from penstock.executor.ranks import preview

    return preview.preview(config)
