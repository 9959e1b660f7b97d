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
def served(tmp_path, monkeypatch):
    """A server on this machine: its answers by name, and what was asked of it."""
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


def test_a_file_is_fetched_once_and_its_licence_said(served, caplog):
    address, asked, folder = served
    with caplog.at_level(logging.INFO, logger="scbd"):
        path = get(address + "/whole.txt")
    assert path == folder / "whole.txt" and path.read_bytes() == WHOLE
    assert "whole.txt is licensed CC0 1.0" in caplog.text
    assert get(address + "/whole.txt") == path and asked == ["/whole.txt"]


@pytest.mark.parametrize("name", ["other.txt", "half.txt"])
def test_what_is_not_the_file_is_not_kept(served, name):
    address, _, folder = served
    with pytest.raises((ValueError, ConnectionError), match="(is not the known other.txt|could not be downloaded)"):
        get(f"{address}/{name}")
    assert not list(folder.iterdir())


def test_a_changed_copy_in_the_cache_is_fetched_again(served):
    address, asked, _ = served
    path = get(address + "/whole.txt")
    path.write_bytes(WHOLE[:50])
    assert get(address + "/whole.txt").read_bytes() == WHOLE and len(asked) == 2


def test_addresses_out_of_reach_get_a_sentence(served):
    address, _, folder = served
    with pytest.raises(ConnectionError, match="nothing.txt could not be downloaded .HTTPError.: try again, or give"):
        get(address + "/nothing.txt")
    with pytest.raises(ConnectionError, match="could not be downloaded"):
        get("http://127.0.0.1:9/closed.txt")
    assert not folder.exists() or not list(folder.iterdir())
