"""The paper's experiments: a file a family, with its grid and what is made of its rows; and the demo."""

from scbd.paper._demo import demo
from scbd.paper._reproduce import EXPERIMENTS, reproduce

__all__ = ["EXPERIMENTS", "demo", "reproduce"]
