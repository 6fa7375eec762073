from _typeshed import ReadableBuffer

__all__ = ["is_batch", "numbers"]

def is_batch(metadata: ReadableBuffer, nodes: int, buffers: int, views: int) -> bool: ...
def numbers(
    metadata: ReadableBuffer,
) -> tuple[int, int, int, tuple[int, int, int] | None, bool, int, bool]: ...
