"""Names of torch that are not public: each fails here when it moves."""

from pathlib import Path

import pytest

from toolkit.system import compat


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="Linux lists what its processor can")
def test_a_cpu_says_whether_it_multiplies_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: torch renames what it asks the processor, or the limit of oneDNN is not read."""
    assert not compat.multiplies_bf16("cpu")  # tests/conftest.py
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    flags = Path("/proc/cpuinfo").read_text()
    assert compat.multiplies_bf16("cpu") == ("avx512_bf16" in flags or "amx_tile" in flags)
