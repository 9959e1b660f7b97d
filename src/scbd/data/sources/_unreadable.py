"""Images that cannot be read: all that are met are told at once, since each repair of a screen begins it anew."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from scbd._messages import head

if TYPE_CHECKING:
    from collections.abc import Iterator

# from here on it is no matter of single files
_MOST = 100


class UnreadableImages(ValueError):
    """What is wrong with some images.

    Parameters
    ----------
    *sentences
        One an image, each of which names it.
    """

    def __init__(self, *sentences: str) -> None:
        self.sentences = sentences
        several = f"{len(sentences)} images cannot be read: {head(s.rstrip('.') for s in sentences)}."
        super().__init__(sentences[0] if len(sentences) == 1 else several)


class Unreadable:
    """Keeps what is wrong with images until the others have been read, too."""

    def __init__(self) -> None:
        self._sentences: list[str] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the errors of a block, up to a hundred."""
        try:
            yield
        except UnreadableImages as error:
            self._sentences += error.sentences
            if len(self._sentences) > _MOST:
                self.tell()

    def tell(self) -> None:
        """Raise what was kept, if anything.

        Raises
        ------
        UnreadableImages
            With all sentences.
        """
        if self._sentences:
            raise UnreadableImages(*self._sentences)
