"""Four teams with few texts each learn to sort them by topic, without showing each other a word.

The texts are real and need no download: the docstrings of Python's standard library. Words become numbers by a hash, so
that not even a vocabulary has to be agreed on; a model is an embedding, a mean and two layers.

    python examples/text.py
"""

import argparse
import ast
import random
import re
import sysconfig
import zlib
from pathlib import Path

import torch
from torch import Tensor, nn

from protofed import federate

TOPICS = {
    "files": ["os", "shutil", "pathlib", "tempfile", "zipfile", "tarfile", "fileinput", "glob", "gzip"],
    "network": ["socket", "ssl", "ftplib", "smtplib", "imaplib", "poplib", "http", "urllib", "socketserver", "xmlrpc"],
    "numbers": ["_pydecimal", "fractions", "statistics", "random", "datetime", "_pydatetime", "calendar", "ipaddress"],
    "code": ["ast", "dis", "inspect", "pdb", "tokenize", "typing", "unittest", "traceback", "doctest", "importlib"],
    "text": ["difflib", "textwrap", "string", "json", "html", "csv", "configparser", "email", "locale", "gettext"],
}
TEAMS = ["backup", "science", "web", "tools"]
WORDS, LENGTH = 4096, 60  # numbers that words are hashed to, 0 being none; words of a text
PER_TOPIC = 10  # training texts of a topic that a team has


def texts() -> dict[str, list[str]]:
    """Docstrings of some length, by topic."""
    library = Path(sysconfig.get_path("stdlib"))
    found: dict[str, list[str]] = {}
    for topic, modules in TOPICS.items():
        files = [f for m in modules for f in (library / f"{m}.py", *sorted((library / m).rglob("*.py"))) if f.is_file()]
        nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        said = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds)]
        found[topic] = sorted({text for text in said if len(text.split()) >= 8})
    return found


def numbers(text: str) -> list[int]:
    """The first words of a text as hashes, filled up with 0."""
    words = re.findall(r"[a-z]+", text.lower())[:LENGTH]
    hashed = [1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in words]
    return hashed + [0] * (LENGTH - len(hashed))


def teams() -> dict[str, dict[str, tuple[Tensor, list[str]]]]:
    """Every team has other texts of the same topics."""
    left = texts()
    for topic, some in left.items():
        random.Random(topic).shuffle(some)
    clients = {}
    for team in TEAMS:
        parts = {}
        for part, count in (("train", PER_TOPIC), ("test", 40)):
            chosen = [(left[topic].pop(), topic) for topic in TOPICS for _ in range(count)]
            parts[part] = (torch.tensor([numbers(text) for text, _ in chosen]), [topic for _, topic in chosen])
        clients[team] = parts
    return clients


class Bag(nn.Module):
    """The mean of the words' vectors, through a layer: the embedding of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32, padding_idx=0)
        self.mix = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
        self.fc = nn.Linear(32, len(TOPICS))

    def forward(self, ids: Tensor) -> Tensor:
        there = (ids > 0).unsqueeze(-1).float()
        mean = (self.words(ids) * there).sum(1) / there.sum(1).clamp(min=1)
        return self.fc(self.mix(mean))


def main(rounds: int = 20, methods: tuple[str, ...] = ("local", "fedproto", "fednh", "fedavg")) -> dict[str, float]:
    """Every method's accuracy on texts of the teams' own, and a look at what one team can tell."""
    clients = teams()
    found = {}
    for method in methods:
        torch.manual_seed(0)
        result = federate(Bag(), clients, method, rounds, lr=0.01, batch_size=8, quiet=True)
        print(f"{method:10} {result.accuracy:.1%}, {result.metrics['bytes_up'] / rounds / len(TEAMS):,.0f} bytes up")
        found[method] = result.accuracy
    asked = "Return a socket connected to the given address, using the timeout for blocking operations."
    print(f"\nteam web, by {method}: {asked!r} is about {result.predict(torch.tensor([numbers(asked)]), 'web')[0]}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    main(parser.parse_args().rounds)
