"""Pieces of bytes as one file."""

import io
from collections.abc import Generator


class PieceFile(io.RawIOBase):
    """Reads forward and keeps one piece at most. Closing it ends the generator of the pieces."""

    def __init__(self, pieces: Generator[bytes, None, None]) -> None:
        super().__init__()
        self._pieces, self._left = pieces, memoryview(b"")

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        """Fills the buffer from the current piece; 0 only at the end."""
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._left = memoryview(piece)
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def close(self) -> None:
        """Drops the current piece and ends the generator."""
        self._left = memoryview(b"")
        self._pieces.close()
        super().close()
