"""What docs/operate.md promises about faults: every process of a federation killed, stopped and cut off, by a plan."""

import random
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'protofed[flower]'")

from chaos import BACK_SECONDS, CLOSE, SECURE, Fault, Federation, compared, plan
from namespaces import why_not

pytestmark = [
    pytest.mark.namespace,
    pytest.mark.slow,
    pytest.mark.usefixtures("all_cores"),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
]
NAMES = ["north", "south", "west"]
ROLES = ["server", "serverapp", "superlink", *NAMES]


def test_whatever_is_killed_stopped_or_cut_off_comes_back(tmp_path: Path) -> None:
    """Each process is killed and stopped, each cable is pulled; the result is the simulation's."""
    faults = [Fault("kill", who, 0.0) for who in ROLES] + [Fault("stop", who, 5.0) for who in ROLES]
    faults += [Fault("cut", who, 5.0) for who in ("server", *NAMES)] + plan(3, 8, NAMES, 6.0)
    random.Random(22).shuffle(faults)
    suffered(Federation(tmp_path / "machines", NAMES, 5000, 2), faults, 6, tmp_path / "simulated")


def test_whoever_is_lost_in_a_secure_sum_comes_back(tmp_path: Path) -> None:
    """Clients are killed, stopped and cut off in whatever step of a sum they are, and so is the server."""
    pytest.importorskip("Crypto", reason="needs pycryptodome: protofed[secure]")
    faults = [Fault(what, who, 0.0 if what == "kill" else 5.0) for what in ("kill", "stop", "cut") for who in NAMES]
    faults += [Fault("kill", "serverapp", 0.0), Fault("kill", "server", 0.0)]
    random.Random(27).shuffle(faults)
    suffered(Federation(tmp_path / "machines", NAMES, 5000, 2, *SECURE), faults, 2, tmp_path / "simulated")


def suffered(federation: Federation, faults: list[Fault], most: int, simulated: Path) -> None:
    """Everybody comes back after every fault, and the end is the simulation's."""
    try:
        happened = list(federation.suffer(faults, seed=22, most=most))
        assert len(happened) == len(faults)
        late = [one for one in happened if one.back > BACK_SECONDS]
        assert not late, (late, federation.remarks)
        assert not federation.remarks  # nobody gave up and had to be started by somebody else
        federation.stop()
        found = compared(federation, simulated)
    finally:
        federation.close()
    assert found.lost == []
    assert found.furthest < CLOSE
