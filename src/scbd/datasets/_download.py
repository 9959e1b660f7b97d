"""Files of others: fetched once, checked, with their licence said."""

from __future__ import annotations

import logging
from pathlib import Path

logger = logging.getLogger(__name__)


def fetch(url: str, *, checksum: str, folder: str, licence: str) -> Path:
    """The file of an address, from the user's cache or downloaded into it.

    Parameters
    ----------
    url
        Address; its last part is the file's name.
    checksum
        ``"algorithm:digest"``. A file that does not match is never kept.
    folder
        Of the cache.
    licence
        Said in the log.

    Raises
    ------
    ValueError
        If what arrives is not the file, or not all of it.
    ConnectionError
        If the address cannot be reached.
    """
    import pooch
    from requests.exceptions import RequestException

    name = url.rsplit("/", 1)[1]
    logger.info("%s is licensed %s; you agree to its terms by using it.", name, licence)
    downloader = pooch.HTTPDownloader(timeout=60)
    try:
        path = pooch.retrieve(url, checksum, fname=name, path=pooch.os_cache("scbd") / folder, downloader=downloader)
    except ValueError as error:
        msg = (
            f"What came from {url} is not the known {name} (its checksum differs: part of it is missing, or it was "
            "changed there). It was not kept: try again, or give the path of your own copy."
        )
        raise ValueError(msg) from error
    except (RequestException, OSError) as error:
        msg = f"{url} could not be downloaded ({type(error).__name__}): try again, or give the path of your own copy."
        raise ConnectionError(msg) from error
    return Path(path)
