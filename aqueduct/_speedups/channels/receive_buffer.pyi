from typing import final

__all__ = ["ReceiveBuffer"]

@final
class ReceiveBuffer:
    def take_up(self) -> int: ...
