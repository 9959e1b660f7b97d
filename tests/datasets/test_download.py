from __future__ import annotations

import hashlib
import logging
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pooch
import pytest

from scbd.datasets._download import download_cached

WHOLE = b"the whole file" * 100
CHECKSUM = "sha256:" + hashlib.sha256(WHOLE).hexdigest()


@pytest.fixture
def local_server(tmp_path, monkeypatch):
    """Serve files on this machine; yield the address, the requested paths and the cache folder."""
    answers = {"/whole.txt": WHOLE, "/other.txt": b"another file", "/half.txt": WHOLE}
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            if self.path not in answers:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(answers[self.path])))
            self.end_headers()
            content = answers[self.path]
            self.wfile.write(content[: len(content) // 2] if "half" in self.path else content)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(pooch, "os_cache", lambda name: tmp_path / name)
    yield f"http://127.0.0.1:{server.server_port}", asked, tmp_path / "scbd" / "test"
    server.shutdown()
    server.server_close()


def get(url):
    return download_cached(url, checksum=CHECKSUM, folder="test", licence="CC0 1.0")


def test_download_cached_called_twice_downloads_once_and_logs_licence(local_server, caplog):
    address, asked, folder = local_server
    with caplog.at_level(logging.INFO, logger="scbd"):
        path = get(address + "/whole.txt")
    assert path == folder / "whole.txt" and path.read_bytes() == WHOLE
    assert "whole.txt is licensed CC0 1.0" in caplog.text
    assert get(address + "/whole.txt") == path and asked == ["/whole.txt"]


@pytest.mark.parametrize("name", ["other.txt", "half.txt"])
def test_download_cached_other_or_truncated_file_raises_and_is_removed(local_server, name):
    address, _, folder = local_server
    with pytest.raises((ValueError, ConnectionError), match="(is not the known other.txt|could not be downloaded)"):
        get(f"{address}/{name}")
    assert not list(folder.iterdir())


def test_download_cached_changed_cache_downloads_again(local_server):
    address, asked, _ = local_server
    path = get(address + "/whole.txt")
    path.write_bytes(WHOLE[:50])
    assert get(address + "/whole.txt").read_bytes() == WHOLE and len(asked) == 2


def test_download_cached_unreachable_address_raises(local_server):
    address, _, folder = local_server
    with pytest.raises(ConnectionError, match="nothing.txt could not be downloaded .HTTPError.: try again, or give"):
        get(address + "/nothing.txt")
    with pytest.raises(ConnectionError, match="could not be downloaded"):
        get("http://127.0.0.1:9/closed.txt")
    assert not folder.exists() or not list(folder.iterdir())
