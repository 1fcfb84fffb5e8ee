"""Names of torch that are not public: each fails here when it moves."""

from pathlib import Path

import pytest
import torch

from toolkit.system import compat
from toolkit.system.devices import has_bf16_units, is_faster_in_bf16


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="Linux lists what its processor can")
def test_a_cpu_says_whether_it_multiplies_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: torch renames its questions to the processor, or the limit of oneDNN is not read."""
    assert not compat.bf16_units("cpu")  # tests/conftest.py
    assert not compat.multiplies_bf16("cpu")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    flags = Path("/proc/cpuinfo").read_text()
    assert compat.bf16_units("cpu") == ("avx512_bf16" in flags or "amx_tile" in flags)
    assert compat.multiplies_bf16("cpu") == ("amx_tile" in flags or ("avx512_bf16" in flags and "GenuineIntel" not in flags))


@pytest.mark.parametrize(("amx", "avx512", "intel", "faster"), [
    (True, True, True, True), (False, True, True, False), (False, True, False, True), (False, False, False, False),
])  # fmt: skip
def test_intels_processors_need_amx(amx: bool, avx512: bool, intel: bool, faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when: AVX512-BF16 alone is taken for fast there, AMX is not enough, or a resume looks at the speed and not at the units."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(compat, "_is_intel", lambda: intel)
    cpu = torch.device("cpu")
    assert (has_bf16_units(cpu), is_faster_in_bf16(cpu)) == (amx or avx512, faster)
