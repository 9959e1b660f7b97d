"""The paper's experiments: a file a family, with its grid and what is made of its rows; and the demo."""

from scbd.paper._demo import demo
from scbd.paper._reproduce import EXPERIMENTS, reproduce

__all__ = ["EXPERIMENTS", "demo", "reproduce"]

# for other packages of scbd; no part of the API
from scbd.paper._reproduce import default_out as default_out
