"""Download of published data files into a local cache, with a verified checksum and a log message about the licence."""

from __future__ import annotations

import logging
from pathlib import Path

logger = logging.getLogger(__name__)


def download_cached(url: str, *, checksum: str, folder: str, licence: str) -> Path:
    """Download a file unless it is already in the user's cache, and return its path in the cache.

    Parameters
    ----------
    url
        Address of the file. The last part of the address is the name of the file.
    checksum
        Expected checksum of the file, in the form ``"algorithm:digest"``. A downloaded file with another checksum is
        deleted.
    folder
        Name of the folder within the user's cache.
    licence
        Licence of the file, reported in a log message.

    Returns
    -------
    Path of the file in the cache.

    Raises
    ------
    ValueError
        If the downloaded file has another checksum, because it is incomplete or was changed.
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
