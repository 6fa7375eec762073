from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = ["measure", "measure_children", "measure_lists", "move_bits", "rewrite"]

def measure(
    views: ReadableBuffer,
    validity: ReadableBuffer | None,
    offset: int,
    length: int,
    sizes: list[int],
) -> list[tuple[int, int, int]]: ...
def measure_children(
    codes: ReadableBuffer, offsets: ReadableBuffer, offset: int, length: int
) -> dict[int, tuple[int, int, int]]: ...
def measure_lists(
    offsets: ReadableBuffer,
    sizes: ReadableBuffer,
    validity: ReadableBuffer | None,
    large: bool,
    offset: int,
    length: int,
) -> tuple[int, int, int]: ...
def move_bits(bits: ReadableBuffer, offset: int, length: int, out: WriteableBuffer) -> None: ...
def rewrite(
    views: ReadableBuffer,
    validity: ReadableBuffer | None,
    offset: int,
    length: int,
    texts: list[ReadableBuffer],
    moves: list[tuple[int, int]],
    out: WriteableBuffer,
    packed: WriteableBuffer,
) -> None: ...
